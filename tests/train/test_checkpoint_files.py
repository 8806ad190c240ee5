"""What is called a checkpoint is on the disk, and nothing is loaded but what was written."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from easypipe import CheckpointManager, verify
from easypipe.cli import main
from easypipe.core import storage
from easypipe.core.errors import ConfigError, StateError, StorageError
from easypipe.train.checkpoint import files
from easypipe.train.checkpoint.checkpoint import Checkpoints, DamagedCheckpoint
from easypipe.train.record import check_record

ARRAYS = {"params/w": np.arange(300, dtype=np.float32).reshape(20, 15), "step": np.int32(7)}
ABSTRACT = {
    name: jax.ShapeDtypeStruct(
        value.shape, value.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    for name, value in ARRAYS.items()
}


def save(folder: Path, *steps: int, keep: int = 2) -> None:
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(
                step,
                {name: jnp.asarray(value) + step for name, value in ARRAYS.items()},
                {"told": step},
            )


def load(folder: Path, step: int):
    with Checkpoints(folder, keep=None) as checkpoints:
        run, arrays = checkpoints.run(step), checkpoints.load(step, ABSTRACT)
    assert run["told"] == step
    return arrays


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    save(folder, 1, 2)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found_before_it_is_loaded(copied, capsys):
    for name, value in load(copied, 2).items():
        np.testing.assert_array_equal(value, ARRAYS[name] + 2)
    files = sorted(path for path in (copied / "2").rglob("*") if path.is_file())
    assert {"data.json", "_METADATA", "manifest.ocdbt", "checksums.json"} <= {
        path.name for path in files
    }
    for file in files:
        whole = file.read_bytes()
        if not whole:
            continue
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(
            DamagedCheckpoint,
            match=rf"checkpoints/2: cannot be read: .*{file.name}.* before it: --step 1 \(in",
        ):
            load(copied, 2)
        broken = {Path(problem.at).name for found in verify(copied) for problem in found.problems}
        assert broken == {file.name}
        file.write_bytes(whole)
    assert main(["verify", str(copied.parent)]) == 0
    files[0].unlink()
    assert main(["verify", str(copied / "2")]) == 1
    assert "missing" in capsys.readouterr().out
    assert main(["verify", str(copied), "--repair"]) == 2
    assert "checkpoints cannot be rebuilt from a source. Train again" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lr=[1]", "a*", "a?", "a**b", "a\\b"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused_before_anything_is_written(
    tmp_path, name, monkeypatch
):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    for folder in (Path("run"), tmp_path / name / "run"):
        said = rf"run: {re.escape(str(tmp_path))}/.* in its path, where Orbax cannot write check"
        with pytest.raises(ConfigError, match=said):
            save(folder, 1)
        with pytest.raises(ConfigError, match=said), CheckpointManager(folder):
            pass
        with pytest.raises(ConfigError, match=rf"^train\.output_dir: {re.escape(str(tmp_path))}/"):
            check_record(folder)
    assert not list((tmp_path / name).iterdir())
    (tmp_path / "link").symlink_to(tmp_path / name)  # as the message says
    save(tmp_path / "link" / "run", 1)
    load(tmp_path / "link" / "run", 1)


@pytest.mark.parametrize("name", ["lr=[1]", "a*", "a?"])
def test_checkpoints_that_were_moved_into_such_a_path_are_read(copied, name):
    load(Path(copied.rename(copied.with_name(name))), 2)


def test_a_checkpoint_whose_arrays_orbax_did_not_merge_is_an_error_of_the_save_and_of_verify(
    tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "a[1]" / "checkpoints"
    monkeypatch.setattr(files, "check_path", lambda *_: None)
    with pytest.raises(
        StorageError, match=r"arrays/manifest\.ocdbt: was not written, so that its a"
    ):
        save(folder, 1)
    with monkeypatch.context() as before:
        before.setattr(files, "_unmerged", lambda _: {})
        save(folder, 1)  # as earlier versions did
    assert main(["verify", str(folder)]) == 1
    assert "manifest.ocdbt: was not written" in "".join(capsys.readouterr().out.splitlines())
    with Checkpoints(folder, keep=None) as checkpoints:
        assert checkpoints.run(1)["told"] == 1
        with pytest.raises(DamagedCheckpoint, match="manifest"):
            checkpoints.load(1, ABSTRACT)


def test_everything_is_synced_before_a_checkpoint_has_its_name_and_the_name_after(
    tmp_path, monkeypatch
):
    """Files, folders, and the folder that holds the name: all of them, in this order."""
    folder, events, fsync = tmp_path / "checkpoints", [], os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", recorded)
    storage.set_fault_hook(
        lambda step, path: events.append(step) if Path(path) == folder / "3" else None
    )
    try:
        save(folder, 3)
    finally:
        storage.set_fault_hook(None)
    before, after = set(events[: events.index("rename")]), events[events.index("rename") :]
    inside = {path: path.stat().st_ino for path in (folder / "3", *(folder / "3").rglob("*"))}
    assert not [path for path, inode in inside.items() if inode not in before]
    assert after == ["rename", folder.stat().st_ino, "committed"]


@pytest.mark.parametrize("when", ["sync", "rename"])
@pytest.mark.parametrize("kind", [OSError, ValueError, NotImplementedError])  # as TensorStore does
def test_what_did_not_get_its_name_is_no_checkpoint_and_is_swept(copied, when, kind):
    def strike(step: str, path: str) -> None:
        if step == when and Path(path) == copied / "3":
            raise kind("No space left on device")

    storage.set_fault_hook(strike)
    try:
        with pytest.raises(
            StorageError, match=r"checkpoints/3: cannot be written: .*No space left"
        ):
            save(copied, 3)
    finally:
        storage.set_fault_hook(None)
    assert sorted(path.name for path in copied.iterdir()) == ["1", "2", "3.tmp"]
    with Checkpoints(copied, keep=None) as checkpoints:  # who only reads leaves it to the writer
        assert checkpoints.steps() == [1, 2]
    # a save of step 2 in its place was killed between two renames
    os.rename(copied / "2", copied / "2.replaced")
    (copied / "1.deleting").mkdir()
    with Checkpoints(copied, keep=2) as checkpoints:
        assert checkpoints.steps() == [1, 2]
    assert sorted(path.name for path in copied.iterdir()) == ["1", "2"]
    load(copied, 2)


def test_a_step_saved_again_takes_the_place_of_the_old_one_and_the_newest_and_the_protected_stay(
    copied,
):
    with Checkpoints(copied, keep=1) as checkpoints:
        checkpoints.protected["me"] = {1}
        for step in (2, 3):
            checkpoints.save(
                step,
                {name: jnp.asarray(value) * step for name, value in ARRAYS.items()},
                {"told": step},
            )
            checkpoints.wait()
            assert checkpoints.steps() == [1, step]
            np.testing.assert_array_equal(
                checkpoints.load(step, ABSTRACT)["params/w"], ARRAYS["params/w"] * step
            )
    assert sorted(path.name for path in copied.iterdir()) == ["1", "3"]


def test_a_checkpoint_of_an_earlier_version_loads_and_verify_says_what_it_cannot_know(copied):
    (copied / "2" / "checksums.json").unlink()
    load(copied, 2)
    notes = [found.notes for found in verify(copied) if found.path.endswith("/2")]
    assert "no checksums: an earlier version saved it" in notes[0][0]
    shutil.rmtree(copied / "2" / "arrays")
    assert [problem.what for found in verify(copied / "2") for problem in found.problems] == [
        "missing"
    ]
    with pytest.raises(StateError, match="cannot be read"):
        load(copied, 2)


def test_an_older_checkpoint_that_cannot_be_deleted_is_warned_of(tmp_path, monkeypatch, caplog):
    """The newest is committed by then: the run goes on."""

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("easypipe.train.checkpoint.files.delete", refuse)
    save(tmp_path, 1, 2, keep=1)
    assert "an older checkpoint cannot be deleted" in caplog.text
    load(tmp_path, 2)

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import style

from easypipe.core.errors import StorageError, TrainError
from easypipe.train.metrics.log import MetricsFile, perplexity, read_metrics
from easypipe.train.report.pictures import pictures, plot_run


def written(path, steps):
    file = MetricsFile(path, after_step=0)
    for step in steps:
        file.append({"step": step, "loss": 1.0 / step})
    file.sync()
    file.close()
    return path


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_float32_reads_back_bit_for_bit(value):
    loss = np.float32(value)
    assert (
        np.float32(json.loads(json.dumps({"loss": loss.item()}))["loss"]).tobytes()
        == loss.tobytes()
    )


def test_the_first_and_the_last_record_are_known(tmp_path):
    for write in (True, False):
        with MetricsFile(tmp_path / "m.jsonl", after_step=0, write=write) as file:
            assert (file.first, file.last) == (None, None)
            for step in (1, 2, 3):
                file.append({"step": step, "loss": 1.0})
            assert (file.first["step"], file.last["step"]) == (1, 3)


def test_opening_cuts_to_the_step_gone_on_from(tmp_path):
    path = written(tmp_path / "metrics.jsonl", range(1, 8))
    file = MetricsFile(path, after_step=4)
    assert (file.first, file.last) == ({"step": 1, "loss": 1.0}, {"step": 4, "loss": 0.25})
    file.append({"step": 5, "loss": 9.0})
    file.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[-1]["loss"] == 9.0


@pytest.mark.parametrize("torn", range(1, 24))
def test_a_last_line_that_was_being_written_is_no_line(tmp_path, torn):
    path = written(tmp_path / "metrics.jsonl", [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "loss": 0.25}'[:torn])
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    MetricsFile(path, after_step=9).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"[1]",
        b'{"loss": 1.0}',
        b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "loss": -1e999}',
        b'{"step": 2, "loss": 1.0, "num_tokens": 1' + b"0" * 400 + b"}",
        b"\xff",
    ],
)
def test_a_foreign_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + line + b"\n")
    with pytest.raises(StorageError, match=r"metrics\.jsonl, line 2: not a metrics record"):
        MetricsFile(path, after_step=9)


def test_perplexity_of_what_no_float_holds():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) is None


def test_plot_is_a_png_of_its_size(tmp_path):
    path = written(tmp_path / "metrics.jsonl", range(1, 5))
    plan = {
        "unit": "rows",
        "steps": 5,
        "datasets": [{"name": name, "requested": 0.5, "realised": 0.5} for name in "ab"],
    }
    plan["by_step"] = [
        {"step": step, "requested": {"a": 0.5, "b": 0.5}, "realised": {"a": 0.4, "b": 0.6}}
        for step in (2, 5)
    ]
    with path.open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.1, "eval": {"held": {"loss": 0.3}}}) + "\n")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with style.context("default"):  # the suite's own are smaller, and bare
        drawn = plot_run(tmp_path)
    assert list(drawn) == ["loss", "mixture"], "of the others this run has no numbers"
    data = drawn["loss"].read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1200, 750)


def test_nothing_of_a_picture_stands_in_the_next(tmp_path: Path) -> None:
    """They are drawn on one sheet, one after another."""
    lines = [{"step": i, "loss": 4 / i, "learning_rate": i / 9, "data_wait": 0.5} for i in (1, 2)]
    lines[1]["tokens_per_second"] = None
    lines[0]["eval"] = {"held": {"loss": 3.0}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    together = pictures(tmp_path)
    assert list(together) == ["loss", "learning_rate", "data_wait"]
    for name, picture in together.items():
        assert pictures(tmp_path, (name,)) == {name: picture}


def test_the_backend_of_a_notebook_of_another_environment_does_not_matter(tmp_path: Path) -> None:
    """matplotlib does not import with it; the run had ended, and its plot was an error."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    code = "import sys; from easypipe.train.report.pictures import plot_run; plot_run(sys.argv[1])"
    environment = {**os.environ, "MPLBACKEND": "module://absent.backend_inline"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_plot_is_said(tmp_path):
    with pytest.raises(TrainError, match="no step was logged"):
        plot_run(written(tmp_path / "metrics.jsonl", []).parent)


def test_other_lines_than_a_checkpoint_was_saved_with_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as file:
        digests = {}
        for step in range(1, 7):
            file.append({"step": step, "loss": 1.0 / step})
            digests[step] = file.digest()
    with MetricsFile(path, after_step=4, digest=digests[4]) as again:
        assert (caplog.text, again.digest()) == ("", digests[4])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    MetricsFile(path, after_step=4, digest=digests[4]).close()
    assert "metrics.jsonl: damaged: up to step 4" in caplog.text
    assert "those that are there (2)" in caplog.text


@pytest.mark.parametrize(
    "left", [b"\0" * 40 + b"\n", b"\0" * 9 + b'.5}\n{"step": 6, "loss": 1.0}\n']
)
def test_what_a_power_cut_left_behind_the_lines_of_a_checkpoint_is_cut(
    tmp_path: Path, left: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, after_step=0) as file:
        for step in range(1, 5):
            file.append({"step": step, "loss": 1.0 / step})
        digest = file.digest()
    whole = path.read_bytes()
    path.write_bytes(whole + left)
    MetricsFile(path, after_step=4, digest=digest).close()
    assert path.read_bytes() == whole
    path.write_bytes(whole[5:] + left)
    with pytest.raises(StorageError, match=r"metrics\.jsonl, line 1: not a metrics record"):
        MetricsFile(path, after_step=4, digest=digest)

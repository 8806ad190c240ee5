"""Saving beside the steps: the second copy that is written, where there is room for one, and a save
that fails out of sight.
"""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from easypipe.core.errors import StorageError
from easypipe.train.checkpoint.checkpoint import Snapshots, has_room
from easypipe.train.config import CheckpointConfig
from easypipe.train.events import Callback
from easypipe.train.metrics.log import read_metrics
from easypipe.train.trainer import Trainer
from train.runs import Arithmetic, Tiny, settings


def sharded(number):
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("a",)), PartitionSpec("a", None))
    return {
        "x": jax.device_put(jnp.full((8, 4096), number, jnp.float32), place),
        "y": jnp.int32(number),
    }


def addresses(arrays):
    return {
        name: [part.data.unsafe_buffer_pointer() for part in array.addressable_shards]
        for name, array in arrays.items()
    }


def test_copies_have_memory_of_their_own_lie_alike_and_outlive_the_donation_of_what_was_copied():
    taken, state = Snapshots(), sharded(1)
    apart = taken.take(state)
    assert {name: array.sharding for name, array in apart.items()} == {
        name: array.sharding for name, array in state.items()
    }
    pairs = zip(addresses(apart).values(), addresses(state).values(), strict=True)
    assert all(set(ours).isdisjoint(theirs) for ours, theirs in pairs)
    jax.block_until_ready(
        jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    )
    assert float(apart["x"].min()) == float(apart["x"].max()) == 1


def test_on_a_cpu_every_copy_lies_in_the_memory_of_the_one_before_and_the_first_where_it_was_expected():
    taken, state = Snapshots(), sharded(1)
    taken.expect(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    )
    expected = addresses(taken._kept)["x"]
    for number in (1, 2, 3):
        apart = taken.take(sharded(number))
        assert addresses(apart)["x"] == expected
        assert float(apart["x"].min()) == float(apart["x"].max()) == number
    # of another shape, as the next model of a CheckpointManager may be
    other = taken.take({"z": jnp.ones(3)})
    assert set(other) == {"z"}


@pytest.mark.parametrize(
    ("needed", "told", "room"),
    [
        (40, [{"bytes_limit": 140, "peak_bytes_in_use": 100}], True),
        (41, [{"bytes_limit": 140, "peak_bytes_in_use": 100}], False),
        (
            40,
            [
                {"bytes_limit": 140, "peak_bytes_in_use": 60},
                {"bytes_limit": 140, "peak_bytes_in_use": 101},
            ],
            False,
        ),
        (40, [{}, {"bytes_in_use": 3}], True),
    ],
)
def test_there_is_room_where_every_device_had_it_at_its_fullest(needed, told, room):
    assert has_room(needed, told) is room


def test_without_room_the_arrays_themselves_are_written_and_steps_wait_for_them(
    tmp_path, monkeypatch, caplog
):
    whole = Trainer(lambda rngs: Tiny(rngs), settings(tmp_path / "whole"), Arithmetic()).run()
    monkeypatch.setattr("easypipe.train.checkpoint.checkpoint.has_room", lambda needed, told: False)
    Trainer(
        lambda rngs: Tiny(rngs),
        settings(tmp_path / "full", checkpoint=CheckpointConfig(every=4, keep=9)),
        Arithmetic(),
    ).run()
    assert caplog.text.count("no room on the devices for a second copy") == 1
    # go on from one that was written while steps wanted its memory
    shutil.rmtree(tmp_path / "full" / "checkpoints" / "12")
    again = Trainer(lambda rngs: Tiny(rngs), settings(tmp_path / "full"), Arithmetic()).run()
    assert again.resumed_from == 8
    for ours, theirs in zip(
        *(jax.tree.leaves(nnx.state(one.model)) for one in (whole, again)), strict=True
    ):
        assert np.array_equal(ours, theirs)


class Spoil(Callback):
    """Puts a file where the checkpoints are."""

    def __init__(self, folder):
        self.folder = folder

    def on_init(self, event):
        shutil.rmtree(self.folder)
        self.folder.write_text("in the way")


@pytest.mark.parametrize("steps", [4, 12])
def test_a_save_that_fails_out_of_sight_is_told_by_the_next_one_or_at_the_end(tmp_path, steps):
    config = settings(tmp_path, steps=steps)
    trainer = Trainer(
        lambda rngs: Tiny(rngs), config, Arithmetic(), callbacks=[Spoil(tmp_path / "checkpoints")]
    )
    with pytest.raises(
        StorageError, match=r"checkpoints/4: cannot be written: .*Check space and permissions"
    ):
        trainer.run()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == min(steps, 8), (
        "step 8 was taken while the save of 4 was thought to go well"
    )

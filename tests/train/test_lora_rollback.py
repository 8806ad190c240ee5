"""Adapters, ZeRO-1 and a roll-back at once, on eight devices, over packed documents; in a process
that has them.

`python test_lora_rollback.py FOLDER` prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forked

STEPS, BAD = 12, (8, 9)  # steps whose batch has labels outside the vocabulary


def measure(folder: Path) -> dict[str, Any]:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    import numpy as np
    from flax import nnx

    from easypipe import LoadStageConfig, PackStageConfig, Pipeline
    from easypipe.train.config import CheckpointConfig, SpikeConfig
    from easypipe.train.metrics.log import read_metrics
    from easypipe.train.model.config import LoraConfig
    from easypipe.train.model.decoder import ModelConfig
    from easypipe.train.trainer import Trainer
    from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
    from pipelines import config, tokenizer
    from train.runs import numbers, settings

    model = ModelConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
    )
    data = Pipeline(config(folder)).source().tokenize().mix().pack(PackStageConfig(seq_length=32))
    clean = data.load(LoadStageConfig(batch_size=8, num_epochs=None)).loader()

    class Shaken:
        """The documents of `clean`, with batches that do harm."""

        def __init__(self) -> None:
            self.loader = clean.copy()
            self.batch_size, self.state, self.restore, self.explain = (
                8,
                self.loader.state,
                self.loader.restore,
                self.loader.explain,
            )

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Any:
            for batch in self.loader:
                if self.loader.state().batch in BAD:
                    batch["labels"][0, 0] = 320 + 5
                yield batch

    def placed(state: Any) -> dict[str, list[float]]:
        """The largest and the smallest share of an array that one device holds, by part of the
        state.
        """
        of = {"optimizer": state.optimizer, "params": state.params, "rest": state.rest}
        shares = {
            part: [
                s.data.size / x.size
                for x in jax.tree.leaves(held)
                if x.ndim
                for s in x.addressable_shards
            ]
            for part, held in of.items()
        }
        return {part: [min(some), max(some)] for part, some in shares.items()}

    def run(name: str, copied: int | None = None) -> Any:
        """copied: after this step "died" is what a machine that died then would leave."""

        def listener(event: Any) -> None:
            events.append((event.kind, event.step))
            if event.kind == "step" and event.step == copied:
                deadline = time.monotonic() + 120
                while not (folder / name / "checkpoints" / "9").is_dir():
                    assert time.monotonic() < deadline, "checkpoint 9 is not there"
                    time.sleep(0.01)
                shutil.copytree(folder / name, folder / "died")

        events: list[tuple[str, int]] = []
        seen: list[Any] = []
        spikes = SpikeConfig(window=4, threshold=6.0, patience=2)
        changes = {
            "lora": LoraConfig(rank=2),
            "mesh": "zero1",
            "spikes": spikes,
            "checkpoint": CheckpointConfig(every=3, keep=4),
        }
        trainer = Trainer(
            model, settings(folder / name, steps=STEPS, **changes), Shaken(), listener=listener
        )
        step = trainer.train_step

        def looked_at(state: Any, batch: Any) -> Any:
            after = step(state, batch)
            seen.append(placed(after[0]))
            return after

        trainer.train_step = looked_at
        result = trainer.run()
        arrays = {
            ".".join(map(str, path)): np.asarray(value.get_value())
            for path, value in nnx.to_flat_state(nnx.state(result.model))
        }
        return result, events, seen, arrays

    whole, events, seen, arrays = run("whole", copied=10)
    lines, books = (
        numbers(read_metrics(whole.metrics)),
        read_metrics(folder / "whole" / "rollbacks.jsonl"),
    )
    saw: dict[str, Any] = {
        "rollbacks": [step for kind, step in events if kind == "rollback"],
        "told": [[b["step"], b["to"], b["batch_of_step"], len(b["documents"])] for b in books],
        "losses": [line["loss"] for line in lines],
        "places": seen,
    }
    encode = load_tokenizer(tokenizer()).reference_encode
    for book in books:  # every piece lies in its row; with EOS, together they are the batch
        batch, tokens = clean.batch(book["batch_of_step"] - 1), 0
        ids, real = np.asarray(batch["input_ids"], np.int32), np.count_nonzero(batch["segment_ids"])
        for told in book["documents"]:
            text = json.loads(Path(told["file"]).read_text().splitlines()[told["row"]])["text"]
            piece = np.asarray(encode(text), np.int32)[told["token_start"] : told["token_stop"]]
            assert piece.tobytes() in ids[told["row_of_batch"]].tobytes(), told
            tokens += piece.size
        assert tokens > 0.9 * real
    again, _, seen, theirs = run("died")
    saw["places"] += seen
    saw["resumed_from"] = again.resumed_from
    saw["same_lines"] = numbers(read_metrics(again.metrics)) == lines
    saw["same_books"] = read_metrics(folder / "died" / "rollbacks.jsonl") == books
    saw["same_arrays"] = arrays.keys() == theirs.keys() and all(
        arrays[key].tobytes() == theirs[key].tobytes() for key in arrays
    )
    return saw


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps(measure(Path(sys.argv[1]))))
    sys.exit()


@pytest.mark.slow
def test_a_rolled_back_run_with_adapters_stays_divided_and_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    done = forked.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-4000:]
    saw = json.loads(done.stdout.splitlines()[-1])
    assert saw["rollbacks"] == [9]
    assert [line[:3] for line in saw["told"]] == [[9, 6, 7], [9, 6, 8], [9, 6, 9]]
    assert all(line[3] >= 8 for line in saw["told"]), "documents of eight rows"
    assert [step for step, loss in enumerate(saw["losses"], start=1) if loss is None] == list(BAD)
    assert saw["losses"][-1] < saw["losses"][0]
    assert len(saw["places"]) == STEPS + STEPS - 9
    for place in saw["places"]:
        assert place["optimizer"] == [1 / 8, 1 / 8], "every moment is divided over all devices"
        assert place["params"] == place["rest"] == [1, 1], (
            "adapters and model are whole on each, as ZeRO-1 has them"
        )
    assert saw["resumed_from"] == 9
    assert saw["same_lines"]
    assert saw["same_books"]
    assert saw["same_arrays"]

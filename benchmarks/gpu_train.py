"""Measures tokens a second and MFU of training a Llama-style decoder of 1.2 billion parameters, in
bf16 with float32 master weights, on rows of 4,096 tokens. The peers are Hugging Face Trainer with
Liger's kernels and a compiled torch loop with SDPA, with the same shape, rows, AdamW and clipping.

    python benchmarks/gpu_train.py           # on one GPU
    python benchmarks/gpu_train.py --tiny    # small shapes, any machine: its figures mean nothing

Every contender runs in a process of its own, started by this one, in alternation; the first steps
(compilation, tuning) are not counted. Rows are full and, by default, one document each: what a peer
without segments attends to is then what easypipe attends to. With `--documents N` easypipe keeps
documents apart, Hugging Face is given position ids that restart, and the torch loop sees whole
rows. MFU is of the device's dense bfloat16 peak in the PaLM convention for all (flops.py), so that
ratios are those of tokens a second.

On a machine that reaches no network, carry transformers, accelerate and liger-kernel (pure Python)
unpacked on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from _common import REPOSITORY, Report


class Preset(NamedTuple):
    """A model and a batch. steps: in all, of which `warm` are not counted."""

    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    steps: int
    warm: int


LLAMA_1B = Preset(128256, 2048, 8192, 16, 32, 8, 4096, 8, 40, 10)
TINY = Preset(512, 64, 128, 2, 4, 2, 128, 4, 8, 3)
RATE = 1e-4
NAMES = ("easypipe", "hf+liger", "torch compiled")


def rows(preset: Preset, documents: int) -> Iterator[dict[str, np.ndarray]]:
    """The same batches for every contender, without end: ids that can be learnt, in `documents`
    equal pieces a row.
    """
    random = np.random.default_rng(0)
    piece = preset.length // documents
    for _ in itertools.count():
        start = random.integers(0, preset.vocab, (preset.batch, 1))
        ids = (
            (start + np.arange(preset.length) * random.integers(1, 5, (preset.batch, 1)))
            % preset.vocab
        ).astype(np.int32)
        segments = np.broadcast_to(
            np.minimum(np.arange(preset.length) // piece, documents - 1) + 1, ids.shape
        ).astype(np.int32)
        ends = np.concatenate(
            [segments[:, 1:] != segments[:, :-1], np.ones((preset.batch, 1), bool)], axis=1
        )
        labels = np.where(ends, -100, np.roll(ids, -1, 1)).astype(np.int32)
        starts = np.maximum.accumulate(
            np.where(np.roll(ends, 1, 1), np.arange(preset.length), 0), axis=1
        )
        places = (np.arange(preset.length) - starts).astype(np.int32)
        yield {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": places}


def easypipe(preset: Preset, options: argparse.Namespace) -> dict[str, Any]:
    import jax

    from easypipe.train.config import CheckpointConfig, OptimizerConfig, TrainingConfig
    from easypipe.train.metrics.devices import peak_flops
    from easypipe.train.metrics.log import read_metrics
    from easypipe.train.trainer import Trainer

    class Rows:
        batch_size = preset.batch

        def __len__(self) -> int:
            raise TypeError("it never ends")

        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            return rows(preset, options.documents)

        def state(self) -> dict[str, int]:
            return {}

        def restore(self, state: dict[str, int]) -> None: ...

    class Enough(Exception):
        """Ends the run before it saves: 15 GB that are no part of this."""

    times: dict[int, float] = {}

    def listener(event: Any) -> None:
        if event.kind == "step":
            times[event.step] = time.perf_counter()
            if event.step == preset.steps:
                raise Enough

    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            output_dir=folder,
            steps=preset.steps + 9,
            optimizer=OptimizerConfig(learning_rate=RATE, schedule="constant", weight_decay=0.1),
            checkpoint=CheckpointConfig(every=None),
        )
        trainer = Trainer(model_config(preset, options.remat), config, Rows(), listener=listener)
        with contextlib.suppress(Enough):
            trainer.run()
        records = read_metrics(Path(folder) / "metrics.jsonl")
    seconds = (times[preset.steps] - times[preset.warm]) / (preset.steps - preset.warm)
    return {
        "seconds": seconds,
        "losses": [records[0]["loss"], records[-1]["loss"]],
        "peak_bytes": records[-1]["peak_memory"],
        "peak_flops": peak_flops(jax.devices()[0]),
        "notes": [
            f"attention {trainer.origin.config.attention or 'by platform'}, remat {options.remat}"
        ],  # type: ignore[union-attr]
    }


def model_config(preset: Preset, remat: str) -> Any:
    from easypipe.train.model.decoder import ModelConfig

    return ModelConfig(
        vocab_size=preset.vocab,
        hidden_size=preset.width,
        intermediate_size=preset.inner,
        num_layers=preset.layers,
        num_heads=preset.heads,
        num_kv_heads=preset.kv_heads,
        rope_theta=500_000.0,
        tie_embeddings=True,
        dtype="bfloat16",
        remat=remat,
    )


def llama(preset: Preset, options: argparse.Namespace) -> Any:
    """The same decoder in `transformers`, float32 parameters, scaled-dot-product attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        vocab_size=preset.vocab,
        hidden_size=preset.width,
        intermediate_size=preset.inner,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        max_position_embeddings=preset.length,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if options.remat == "full":
        model.gradient_checkpointing_enable()
    return model


def hf_trainer(preset: Preset, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    cuda = torch.cuda.is_available()
    liger = cuda and importlib.util.find_spec("liger_kernel") is not None
    times: dict[int, float] = {}
    losses: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step in (preset.warm, preset.steps):
                if cuda:
                    torch.cuda.synchronize()
                times[state.global_step] = time.perf_counter()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any
        ) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for batch in rows(preset, options.documents):
                for i in range(preset.batch):
                    ids = torch.from_numpy(batch["input_ids"][i].astype(np.int64))
                    one = {"input_ids": ids, "labels": ids.clone()}  # the model shifts them
                    if options.documents > 1:
                        one["position_ids"] = torch.from_numpy(
                            batch["position_ids"][i].astype(np.int64)
                        )
                    yield one

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=preset.steps,
            per_device_train_batch_size=preset.batch,
            bf16=True,
            use_cpu=not cuda,
            use_liger_kernel=liger,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            logging_steps=max(1, preset.steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=cuda,
        )
        Trainer(
            model=llama(preset, options), args=settings, train_dataset=Rows(), callbacks=[Clock()]
        ).train()
    note = (
        "Liger's kernels"
        if liger
        else "without Liger: " + ("it is not installed" if cuda else "its kernels need a GPU")
    )
    return {
        "seconds": (times[preset.steps] - times[preset.warm]) / (preset.steps - preset.warm),
        "losses": [losses[0], losses[-1]],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "notes": [note],
    }


def torch_loop(preset: Preset, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    model = llama(preset, options).to(device).train()
    run = torch.compile(model) if cuda else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    losses, unread, began = [], None, 0.0
    for step, batch in zip(
        range(1, preset.steps + 1), rows(preset, options.documents), strict=False
    ):
        ids = torch.from_numpy(batch["input_ids"].astype(np.int64)).to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if unread is not None:
            losses.append(float(unread))  # one step behind, as easypipe reads
        unread = loss.detach()
        if step in (preset.warm, preset.steps):
            if cuda:
                torch.cuda.synchronize()
            elapsed, began = time.perf_counter() - began, time.perf_counter()
    assert unread is not None
    losses.append(float(unread))
    return {
        "seconds": elapsed / (preset.steps - preset.warm),
        "losses": [losses[0], losses[-1]],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "notes": ["torch.compile, SDPA" if cuda else "not compiled, SDPA: a CPU"],
    }


CONTENDERS: dict[str, Callable[[Preset, argparse.Namespace], dict[str, Any]]] = dict(
    zip(NAMES, (easypipe, hf_trainer, torch_loop), strict=True)
)


def child(name: str, preset: Preset, options: argparse.Namespace) -> None:
    try:
        found = CONTENDERS[name](preset, options)
    except ImportError as error:
        found = {"unavailable": f"not installed: {error}"}
    print("RESULT " + json.dumps(found))


def measure(name: str, arguments: list[str]) -> dict[str, Any]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments, "--child", name],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"unavailable": f"ended with {done.returncode}: {done.stderr.strip()[-2000:]}"}
    return json.loads(lines[-1].removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--batch", type=int, help="rows of a batch")
    parser.add_argument("--steps", type=int, help="in all; a quarter of them is not counted")
    parser.add_argument("--documents", type=int, default=1, help="in a row")
    parser.add_argument(
        "--remat",
        choices=["none", "dots", "full"],
        default="dots",
        help="for the peers: full is checkpointing",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(NAMES), help="contenders, by name")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "out")
    options = parser.parse_args()
    if unknown := sorted(set(options.only.split(",")) - set(NAMES)):
        parser.error(f"--only: no contender named {', '.join(unknown)} (have: {', '.join(NAMES)})")
    preset = TINY if options.tiny else LLAMA_1B
    preset = preset._replace(batch=options.batch or preset.batch)
    if options.steps:
        preset = preset._replace(steps=options.steps, warm=max(2, options.steps // 4))
    if options.child:
        return child(options.child, preset, options)

    from easypipe.train.model.flops import palm_flops_per_step

    tokens = preset.batch * preset.length
    report = Report("gpu_train", "tokens/s")
    wanted = [name for name in NAMES if name in options.only.split(",")]
    peak = None
    for turn in range(options.rounds):
        for name in wanted[turn % len(wanted) :] + wanted[: turn % len(wanted)]:
            found = measure(name, sys.argv[1:])
            print(f"  round {turn + 1}: {name}: {found}", file=sys.stderr)
            if "unavailable" in found:
                report.facts[f"{name} did not run"] = found["unavailable"]
                continue
            report.seconds.setdefault(name, []).append(found["seconds"])
            report.work[name] = float(tokens)
            peak = found.get("peak_flops") or peak
            report.facts[f"{name}: loss at first and last, peak memory, notes"] = (
                f"{found['losses'][0]:.3f}, {found['losses'][1]:.3f}, {found['peak_bytes']}, "
                f"{'; '.join(found['notes'])}"
            )
    flops = palm_flops_per_step(model_config(preset, options.remat), tokens, preset.length)
    for name in report.seconds:
        achieved = flops / tokens * report.figure(name)
        if peak is None:
            report.facts[f"{name}: MFU"] = "the device's peak is not known"
        elif name == "easypipe":
            report.target("MFU of easypipe, PaLM convention", achieved / peak, at_least=0.5)
        else:
            report.facts[f"{name}: MFU, PaLM convention"] = achieved / peak
    for name in NAMES[1:]:
        if "easypipe" in report.seconds and name in report.seconds:
            if options.tiny:
                report.facts[f"times the tokens a second of {name}, which means nothing here"] = (
                    report.ratio("easypipe", name)
                )
            else:
                report.target(
                    f"times the tokens a second of {name}",
                    report.ratio("easypipe", name),
                    at_least=1.1,
                )
    report.finish(options.out)


if __name__ == "__main__":
    main()

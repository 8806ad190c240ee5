"""Compares the loss of a language model on a GPU, in bf16, with the peers' kernels: values, memory,
time of the forward pass, and time of forward and backward.

    python benchmarks/gpu_loss.py            # four shapes on a GPU, small ones where there is none
    python benchmarks/gpu_loss.py --only easypipe,naive --shape 4096 4096 128256

Every contender runs in a process of its own, started by this one, so that none sees the memory, the
caches or the compiler of another. Parity is the error of the loss, of 256 rows of d_hidden and of
256 rows of the head's gradient against our float32 program. Memory is what stands beside arguments
and results: the compiler's figure for jax, the allocator's peak for torch.

On a machine that reaches no network, carry the peers as wheels, unpacked by `pip install --no-deps
--no-index --target DIR`, with DIR on PYTHONPATH. Pure Python, below 1 MB each: liger-kernel,
cut-cross-entropy, quack-kernels; tokamax 2.8 MB, with einshape, qwix, immutabledict, tensorboardx
and what of jaxtyping, pydantic, absl-py and tqdm is missing (its xprof is for profiles only). QuACK
and Liger's Hopper kernels want nvidia-cutlass-dsl, apache-tvm-ffi, torch-c-dlpack-ext and einops
besides: look at the sizes before carrying them.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from _common import REPOSITORY, machine, table

# tokens, width, vocabulary
SHAPES = [(4096, 4096, 128256), (16384, 2048, 248320), (32768, 4096, 128256), (8192, 2048, 32768)]
SMALL = [(64, 32, 512), (48, 16, 257)]
SAMPLE = 256  # rows of each gradient that are compared


class Unavailable(Exception):
    """Why a contender does not run here."""


class Steps(NamedTuple):
    """One contender at one shape, ready to run."""

    forward: Callable[[], Any]
    both: Callable[[], tuple[Any, Any, Any]]  # loss, gradient of hidden, gradient of the head
    wait: Callable[[Any], None]
    temporary_bytes: Callable[[], int | None]


def arrays(tokens: int, width: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same for every process: hidden [T, D] and head [V, D] in float32, labels with a tenth
    ignored.
    """
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1_048_573, np.float32)  # a prime, so that no two rows are alike
    labels = np.where(rng.random(tokens) < 0.1, -100, rng.integers(0, vocab, tokens))
    return (
        np.resize(noise, (tokens, width)) / width**0.5,
        np.resize(noise[::-1], (vocab, width)),
        labels,
    )


def in_jax(
    loss: Callable[..., Any], *, dtype: str = "bfloat16", transposed: bool = False
) -> Callable[[int, int, int], Steps]:
    """loss(hidden, head, labels, weights) -> scalar; transposed: it wants the head as [D, V]."""

    def made(tokens: int, width: int, vocab: int) -> Steps:
        import jax
        import jax.numpy as jnp

        hidden, head, labels = arrays(tokens, width, vocab)
        given = (
            jnp.asarray(hidden).astype(dtype),
            (jnp.asarray(head).T if transposed else jnp.asarray(head)).astype(dtype),
            jnp.asarray(labels, jnp.int32),
        )
        forward = jax.jit(loss).lower(*given).compile()
        both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*given).compile()

        def gradients() -> tuple[Any, Any, Any]:
            value, (d_hidden, d_head) = both(*given)
            return value, d_hidden, d_head

        memory: Any = both.memory_analysis()
        return Steps(
            lambda: forward(*given),
            gradients,
            jax.block_until_ready,
            lambda: memory.temp_size_in_bytes,
        )

    return made


def in_torch(loss: Callable[..., Any]) -> Callable[[int, int, int], Steps]:
    """loss(hidden [T, D], head [V, D], labels) -> scalar."""

    def made(tokens: int, width: int, vocab: int) -> Steps:
        torch = _module("torch")
        if not torch.cuda.is_available():
            raise Unavailable("needs a CUDA device")
        hidden, head, labels = (
            torch.from_numpy(np.ascontiguousarray(array)).cuda()
            for array in arrays(tokens, width, vocab)
        )
        hidden, head = (array.bfloat16().requires_grad_() for array in (hidden, head))

        def both() -> tuple[Any, Any, Any]:
            hidden.grad = head.grad = None
            value = loss(hidden, head, labels)
            value.backward()
            return value.detach().float(), hidden.grad, head.grad

        def temporaries() -> int:
            hidden.grad = head.grad = None
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _, d_hidden, d_head = both()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before - d_hidden.nbytes - d_head.nbytes

        return Steps(
            lambda: loss(hidden, head, labels),
            both,
            lambda _: torch.cuda.synchronize(),
            temporaries,
        )

    return made


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"not installed: {error}") from error


def ours(**options: Any) -> Callable[..., Any]:
    def loss(hidden: Any, head: Any, labels: Any) -> Any:
        from easypipe.kernels import fused_linear_cross_entropy

        return fused_linear_cross_entropy(hidden, head, labels, layout="vd", **options)

    return loss


def exact(hidden: Any, head: Any, labels: Any) -> Any:
    import jax

    with jax.default_matmul_precision("highest"):
        return ours(implementation="chunked", rule="strict")(hidden, head, labels)


def naive(hidden: Any, head: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    log_p = jax.nn.log_softmax((hidden @ head.T).astype(jnp.float32))
    kept = labels != -100
    picked = jnp.take_along_axis(log_p, jnp.where(kept, labels, 0)[:, None], axis=1)[:, 0]
    return -jnp.where(kept, picked, 0.0).sum() / kept.sum()


def tokamax(hidden: Any, head: Any, labels: Any) -> Any:
    """It knows no ignored labels: they are given one, so its value differs and its gradients are
    not compared.
    """
    import jax.numpy as jnp

    return _module("tokamax").linear_softmax_cross_entropy_loss(
        hidden, jnp.maximum(labels, 0), head, reduction="mean"
    )


def liger(hidden: Any, head: Any, labels: Any) -> Any:
    return _module(
        "liger_kernel.ops.fused_linear_cross_entropy"
    ).LigerFusedLinearCrossEntropyFunction.apply(hidden, head, labels)[0]


def liger_sm90(hidden: Any, head: Any, labels: Any) -> Any:
    module = _module("liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90")
    loss = module.LigerFusedLinearCrossEntropySM90Function.apply(hidden, head, labels)
    return loss[0] if isinstance(loss, tuple) else loss


def cut_cross_entropy(hidden: Any, head: Any, labels: Any) -> Any:
    return _module("cut_cross_entropy").linear_cross_entropy(hidden, head, labels)


def quack(hidden: Any, head: Any, labels: Any) -> Any:
    return _module("quack.linear_cross_entropy").chunked_linear_cross_entropy(hidden, head, labels)


CONTENDERS: dict[str, Callable[[int, int, int], Steps]] = {
    "exact": in_jax(exact, dtype="float32"),
    "naive": in_jax(naive),
    "easypipe": in_jax(ours()),
    "easypipe fast": in_jax(ours(rule="fast")),
    "easypipe strict": in_jax(ours(rule="strict")),
    "easypipe chunked": in_jax(ours(implementation="chunked")),
    "tokamax": in_jax(tokamax, transposed=True),
    "liger": in_torch(liger),
    "liger sm90": in_torch(liger_sm90),
    "cut-cross-entropy": in_torch(cut_cross_entropy),
    "quack": in_torch(quack),
}


def child(name: str, shapes: Sequence[tuple[int, ...]], rounds: int, result: Path) -> None:
    """Runs one contender at every shape and writes what it found; a shape that fails is written
    down with its error.
    """
    found: list[dict[str, Any]] = []
    for shape in shapes:
        try:
            found.append(_measured(name, shape, rounds))
        except Unavailable as error:
            found.append({"unavailable": str(error)})
        except Exception as error:  # noqa: BLE001  (whatever a peer raises, the others are still measured)
            found.append({"failed": f"{type(error).__name__}: {str(error)[:300]}"})
        gc.collect()
        result.write_text(json.dumps(found), encoding="utf-8")


def _measured(name: str, shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    tokens, width, vocab = shape
    steps = CONTENDERS[name](tokens, width, vocab)
    loss, d_hidden, d_head = steps.both()
    sample = (
        [
            np.asarray(_host(array[:SAMPLE]), np.float64).ravel().tolist()
            for array in (d_hidden, d_head)
        ]
        if name != "tokamax"
        else None
    )
    numbers = {"loss": float(_host(loss)), "sample": sample}
    del loss, d_hidden, d_head
    if name == "exact":
        return numbers
    numbers["temporary_bytes"] = steps.temporary_bytes()
    for what, run in (("forward", steps.forward), ("both", steps.both)):
        steps.wait(run())
        start = time.perf_counter()
        steps.wait(run())
        # a round takes a fifth of a second
        repeats = max(1, min(20, int(0.2 / (time.perf_counter() - start))))
        seconds = []
        for _ in range(rounds):
            last, start = None, time.perf_counter()
            for _ in range(repeats):
                last = run()
            steps.wait(last)
            seconds.append((time.perf_counter() - start) / repeats)
        numbers[f"{what}_s"] = seconds
    return numbers


def _host(array: Any) -> Any:
    return array.float().cpu().numpy() if hasattr(array, "cpu") else np.asarray(array, np.float32)


def device_name() -> str | None:
    """The first GPU's, asked of a process that ends: it must hold no memory here."""
    program = (
        "import jax; print(next((d.device_kind for d in jax.devices() if d.platform == 'gpu'), ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return (
        done.stdout.strip().splitlines()[-1]
        if done.returncode == 0 and done.stdout.strip()
        else None
    )


def measured(name: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> list[dict[str, Any]]:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable,
            __file__,
            "--child",
            name,
            "--rounds",
            str(rounds),
            "--result",
            str(result),
        ]
        for shape in shapes:
            command += ["--shape", *map(str, shape)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else []
    for shape, numbers in zip(shapes, found, strict=False):
        seen = {key: value for key, value in numbers.items() if key != "sample"}
        print(f"  {name}, {' x '.join(map(str, shape))}: {seen}", file=sys.stderr)
    ended = {"failed": f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    return found + [ended] * (len(shapes) - len(found))


def error(ours: list[float], wanted: list[float]) -> float:
    """Of the sampled rows, relative to them."""
    return float(np.linalg.norm(np.subtract(ours, wanted)) / max(1e-30, np.linalg.norm(wanted)))


def row(name: str, found: dict[str, Any], wanted: dict[str, Any], flops: float) -> list[str]:
    why = found.get("unavailable") or found.get("failed")
    if why:
        return [name, why.replace("|", "/").replace("\n", " ")[:100], *[""] * 6]
    errors = ["", ""]
    if found["sample"] and wanted.get("sample"):
        found["errors"] = [
            error(mine, theirs)
            for mine, theirs in zip(found["sample"], wanted["sample"], strict=True)
        ]
        errors = [f"{value:.2e}" for value in found["errors"]]
    forward, both = (1e3 * statistics.median(found[f"{what}_s"]) for what in ("forward", "both"))
    rate = f"{1e-9 * flops / both:.0f}"
    memory = "" if found["temporary_bytes"] is None else f"{found['temporary_bytes'] / 2**20:.0f}"
    return [name, f"{found['loss']:.5f}", f"{forward:.3f}", f"{both:.3f}", rate, memory, *errors]


def targets(
    results: dict[str, list[dict[str, Any]]], shapes: Sequence[tuple[int, ...]]
) -> list[list[str]]:
    """What issue 4 asks of an H200."""

    def both(name: str, at: int) -> float | None:
        found = results.get(name, [{}] * len(shapes))[at]
        return 1e3 * statistics.median(found["both_s"]) if "both_s" in found else None

    rows = []
    for at, shape in enumerate(shapes):
        where = " x ".join(map(str, shape))
        limits = {"easypipe fast": 17.5, "easypipe strict": 23.5} if shape == SHAPES[0] else {}
        for name, limit in limits.items():
            value = both(name, at)
            if value is not None:
                rows.append(
                    [
                        f"{name}, {where}, ms",
                        f"{value:.2f}",
                        f"≤ {limit}",
                        "met" if value <= limit else "MISSED",
                    ]
                )
        for peer, least in (("tokamax", 1.35), ("naive", 1.0)):
            mine, theirs = both("easypipe", at), both(peer, at)
            if mine is not None and theirs is not None:
                ratio = theirs / mine
                rows.append(
                    [
                        f"easypipe against {peer}, {where}",
                        f"{ratio:.2f}",
                        f"≥ {least}",
                        "met" if ratio >= least else "MISSED",
                    ]
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="small shapes, to see that everything runs; the default without a GPU",
    )
    parser.add_argument(
        "--shape", type=int, nargs=3, action="append", metavar=("TOKENS", "WIDTH", "VOCAB")
    )
    parser.add_argument(
        "--only", help="contenders, separated by commas; the float32 program always runs"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed rounds of each; the table shows their medians"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(
            options.child, [tuple(shape) for shape in options.shape], options.rounds, options.result
        )
        return
    names = options.only.split(",") if options.only else list(CONTENDERS)
    if unknown := sorted(set(names) - set(CONTENDERS)):
        parser.error(
            f"--only: no contender named {', '.join(unknown)} (have: {', '.join(CONTENDERS)})"
        )
    device = device_name()
    shapes = [
        tuple(shape)
        for shape in options.shape or (SMALL if options.small or device is None else SHAPES)
    ]
    results = {
        name: measured(name, shapes, options.rounds) for name in dict.fromkeys(["exact", *names])
    }

    lines = [
        "# Loss kernels on "
        f"{device or 'the CPU (small shapes: that everything runs, no figure to quote)'}",
        "",
    ]
    head = [
        "contender",
        "loss",
        "forward, ms",
        "forward + backward, ms",
        "TFLOP/s of 6·T·D·V",
        "temporaries, MiB",
    ]
    head += ["error d_hidden", "error d_head"]
    for at, (tokens, width, vocab) in enumerate(shapes):
        flops = 6.0 * tokens * width * vocab
        rows = [
            row(name, found[at], results["exact"][at], flops)
            for name, found in results.items()
            if name != "exact"
        ]
        lines += [f"## {tokens} tokens x {width} x {vocab}, bf16", "", *_markdown(head, rows), ""]
        print(f"\n{tokens} x {width} x {vocab}")
        table(head, rows)
    judged = targets(results, shapes) if device and "H200" in device else []
    if judged:
        table(["target", "measured", "wanted", ""], judged)
        lines += ["## Targets", "", *_markdown(["target", "measured", "wanted", ""], judged), ""]
    for found in results.values():
        for numbers in found:
            numbers.pop("sample", None)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"gpu_loss_{re.sub(r'[^a-z0-9]+', '_', (device or 'cpu').lower())}"
    stem.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    document = {
        "device": device,
        "shapes": shapes,
        "results": results,
        "targets": judged,
        "machine": machine(),
    }
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {stem}.md and .json")


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()

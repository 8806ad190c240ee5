"""Attention over packed rows on one GPU, forward and backward, bf16: beside XLA's, which holds all
scores, and cuDNN's and torch's, which know no documents and see whole rows. Rates count the
products of slots that see each other, none twice.

    python benchmarks/gpu_attention.py           # on a GPU
    python benchmarks/gpu_attention.py --tiny    # small shapes, any machine: shows that it runs

Errors are those of the result and of its three gradients against XLA's in float32, whichever is
largest; XLA's own in bf16 stands beside them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _common import REPOSITORY, Report, alternate
from easypipe.train.model.attention import attend

# rows, slots, query heads, key heads, head width
SHAPES = [(4, 4096, 32, 8, 64), (4, 4096, 16, 8, 128), (2, 4096, 8, 4, 256)]
TINY = [(2, 256, 2, 1, 32)]
DOCUMENTS = (1, 8)
REPEATS = 10

Step = Callable[..., Any]


def arrays(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    """Query, key, value, and the gradient of the result."""
    rows, slots, heads, key_heads, width = shape
    rng = np.random.default_rng(0)
    counts = (heads, key_heads, key_heads, heads)
    return [
        jnp.asarray(rng.standard_normal((rows, slots, count, width), np.float32), dtype)
        for count in counts
    ]


def segments(shape: tuple[int, ...], documents: int) -> jax.Array:
    """Ids of documents whose lengths differ: the n-th has n parts of the row."""
    ends = np.cumsum(np.arange(1, documents + 1)) / (documents * (documents + 1) / 2)
    row = np.searchsorted(ends, (np.arange(shape[1]) + 0.5) / shape[1]) + 1
    return jnp.asarray(np.broadcast_to(row, shape[:2]), jnp.int32)


def both(mix: Step) -> Step:
    """The result and the gradients of query, key and value."""

    def run(query: Any, key: Any, value: Any, pull: Any) -> Any:
        mixed, back = jax.vjp(mix, query, key, value)
        return mixed, *back(pull)

    return run


def in_torch(given: list[jax.Array]) -> Step:
    """Returns a function of nothing that computes the same by torch's own choice of kernel."""
    import torch

    query, key, value, pull = (torch.from_dlpack(array).transpose(1, 2) for array in given)
    needed = [array.requires_grad_() for array in (query, key, value)]
    mix = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True
    )

    def run() -> None:
        torch.autograd.grad(mix(*needed), needed, pull)
        torch.cuda.synchronize()

    return run


def error(found: Any, wanted: Any) -> float:
    pairs = zip(found, wanted, strict=True)
    norms = ((jnp.linalg.norm(a.astype(jnp.float32) - b), jnp.linalg.norm(b)) for a, b in pairs)
    return max(float(difference / of) for difference, of in norms)


def measure(report: Report, shape: tuple[int, ...], documents: int, rounds: int) -> None:
    ids, given = segments(shape, documents), arrays(shape, "bfloat16")
    where = f"{' x '.join(map(str, shape))}, {documents} documents"
    gpu = jax.default_backend() == "gpu"
    ours = {
        name: both(lambda *a, backend=backend: attend(*a, ids, backend=backend))
        for name, backend in (("easypipe", "triton"), ("xla", "xla"))
    }
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(ours["xla"])(*(array.astype(jnp.float32) for array in given))
    steps: dict[str, Step] = {}
    if documents == 1 and gpu:
        cudnn = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
        ours["cudnn"] = both(cudnn)
        steps["torch"] = in_torch(given)
    for name, function in ours.items():
        try:
            program = jax.jit(function).lower(*given).compile()
            found = program(*given)
        except Exception as failed:  # noqa: BLE001  (what a peer cannot do is said)
            report.facts[f"{name}, {where}"] = f"does not run: {str(failed)[:120]}"
            continue
        report.facts[f"error of {name}, {where}"] = error(found, exact)
        memory: Any = program.memory_analysis()
        report.facts[f"temporaries of {name}, {where}, MiB"] = memory.temp_size_in_bytes >> 20
        steps[name] = functools.partial(program, *given)
    del exact

    # two products forward and five backward, over the pairs of slots that see each other
    pairs = sum(int(n) ** 2 for n in np.unique(np.asarray(ids[0]), return_counts=True)[1]) / 2
    rows, _, heads, _, width = shape
    work = REPEATS * 7 * 2 * pairs * rows * heads * width * 1e-12

    def repeated(step: Step) -> float:
        for _ in range(REPEATS):
            last = step()
        jax.block_until_ready(last)
        return work

    timed: dict[str, Callable[[], float]] = {
        f"{name}, {where}": functools.partial(repeated, step) for name, step in steps.items()
    }
    alternate(report, timed, rounds)
    for name in steps:
        if name != "easypipe":
            ratio = report.ratio(f"easypipe, {where}", f"{name}, {where}")
            report.facts[f"easypipe is faster than {name}, {where}, times"] = ratio


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "benchmarks" / "out")
    options = parser.parse_args()
    report = Report("gpu_attention", "TFLOP/s", {"device": jax.devices()[0].device_kind})
    for shape in TINY if options.tiny else SHAPES:
        for documents in DOCUMENTS:
            measure(report, shape, documents, options.rounds)
    report.finish(options.out)


if __name__ == "__main__":
    main()

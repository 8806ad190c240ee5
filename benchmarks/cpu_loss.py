"""The loss of a language model on CPU, forward and backward: our default, its two rules, and the
naive program, in time and in memory.

Memory is what the compiler sets aside beyond arguments and results (`memory_analysis`), and what
the process really held, sampled.
"""

from __future__ import annotations

import functools
from typing import Any

from _common import AnonymousMemory, Report, alternate, anonymous_bytes, arguments


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=3,
        default=(4096, 1024, 50257),
        metavar=("TOKENS", "WIDTH", "VOCAB"),
    )
    options = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np

    from easypipe.kernels import fused_linear_cross_entropy

    tokens, width, vocab = options.shape
    rng = np.random.Generator(np.random.PCG64(0))
    hidden = jnp.asarray(rng.standard_normal((tokens, width), np.float32) / width**0.5)
    head = jnp.asarray(rng.standard_normal((width, vocab), np.float32))
    labels = jnp.asarray(
        np.where(rng.random(tokens) < 0.1, -100, rng.integers(0, vocab, tokens)), jnp.int32
    )

    def naive(hidden: Any, head: Any, labels: Any) -> Any:
        log_p = jax.nn.log_softmax(hidden @ head)
        kept = labels != -100
        picked = jnp.take_along_axis(log_p, jnp.where(kept, labels, 0)[:, None], axis=1)[:, 0]
        return -jnp.where(kept, picked, 0.0).sum() / kept.sum()

    losses = {
        "naive": naive,
        "easypipe": fused_linear_cross_entropy,
        "easypipe, strict": functools.partial(fused_linear_cross_entropy, rule="strict"),
    }
    programs = {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        .lower(hidden, head, labels)
        .compile()
        for name, loss in losses.items()
    }
    report = Report(
        "cpu_loss",
        "s",
        facts={"tokens": tokens, "width": width, "vocabulary": vocab, "dtype": "float32"},
    )
    held: dict[str, int] = {}
    values: dict[str, float] = {}

    def run(name: str) -> float:
        before = anonymous_bytes()
        with AnonymousMemory(every_s=0.02) as memory:
            loss, grads = jax.block_until_ready(programs[name](hidden, head, labels))
        results = sum(grad.nbytes for grad in grads)
        held[name] = max(0, memory.peak - before - results)
        values[name] = float(loss)
        return 1.0

    alternate(report, {name: functools.partial(run, name) for name in losses}, options.rounds)
    analyses: dict[str, Any] = {
        name: program.memory_analysis() for name, program in programs.items()
    }
    temporaries = {name: analysis.temp_size_in_bytes for name, analysis in analyses.items()}
    for name in losses:
        report.facts[f"{name}: loss"] = values[name]
        report.facts[f"{name}: temporaries, MiB"] = temporaries[name] / 2**20
        report.facts[f"{name}: held, MiB"] = held[name] / 2**20
    report.facts["naive: 6·T·D·V, GFLOP/s"] = 6e-9 * tokens * width * vocab / report.figure("naive")
    report.target(
        "temporaries, of the naive program's",
        temporaries["easypipe"] / temporaries["naive"],
        below=0.15,
    )
    report.target(
        "time, of the naive program's",
        report.figure("easypipe") / report.figure("naive"),
        below=1.1,
    )
    report.finish(options.out)


if __name__ == "__main__":
    main()

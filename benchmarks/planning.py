"""Planning alone: mix, order and pack from lengths, in documents per second of processor time, on
one thread.

Lengths are log-normal with a median of 400 tokens, rows hold 2,048. "ramp" changes its weights all
the time, in windows of 1/64 of it, along a line by rows and along half a cosine wave by tokens. A
rate is the best of all rounds, without compiling; the targets are of the slowest modes.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from _common import Report, arguments
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.pack import PackSpec
from easypipe.plan.windows import Plan, PlanDataset, PlanSpec


def dataset(name: str, seed: int, documents: int) -> PlanDataset:
    lengths = (
        np.random.default_rng(seed)
        .lognormal(np.log(400), 1.0, documents)
        .clip(1, 100_000)
        .astype(np.int32)
    )
    return PlanDataset(
        name, documents, int(lengths.sum(dtype=np.int64)), name, lambda docs: lengths[docs]
    )


AT_LEAST = 5.0  # million documents per CPU second, in every mode


def rate(datasets: list[PlanDataset], spec: PlanSpec, windows: int, rounds: int) -> float:
    """Documents per second, the best of some runs over so many windows; compiling is left out."""
    rates = []
    for _ in range(rounds):
        plan = Plan(datasets, spec)
        state = plan.state_at(0)
        after, documents = state, 0
        began = time.process_time()
        for _ in range(windows):
            window = plan._planner.window(after)
            after, documents = window.after, documents + window.dataset.size
        rates.append(documents / (time.process_time() - began))
    return max(rates)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--windows", type=int, default=10)
    options = parser.parse_args()
    report = Report("planning", "million documents per CPU second")
    print(f"{'':<28}{'2 datasets':>14}{'60 datasets':>14}   million documents per CPU second")
    for strategy in ("greedy", "pool", "first_fit", "stream", None):
        pack = None if strategy is None else PackSpec(2048, strategy)  # pyright: ignore[reportArgumentType]
        lines: dict[str, list[float]] = {}
        for count in (2, 60):
            datasets = [dataset(f"d{i}", i, 20_000) for i in range(count)]
            some, others = (tuple(1 + (i * k) % 7 for i in range(count)) for k in (1, 3))
            static = PlanSpec(
                seed=0, weights=some, stop="restart", window_docs=65_536, num_epochs=None, pack=pack
            )
            flat = Schedule(((0, some),), "step", ((0, 64),))
            ramp = Schedule(((0, some), (40_000, others)), "linear", ((0, 64),))
            specs = {
                "static weights": static,
                "schedule, between points": dataclasses.replace(static, schedule=flat),
                "schedule, on a ramp": dataclasses.replace(static, schedule=ramp),
                "shares of tokens": dataclasses.replace(static, unit="tokens"),
                "tokens, on a ramp": dataclasses.replace(
                    static, unit="tokens", schedule=dataclasses.replace(ramp, kind="cosine")
                ),
            }
            for name, spec in specs.items():
                made = rate(datasets, spec, options.windows, options.rounds)
                lines.setdefault(name, []).append(made / 1e6)
        packed = strategy or "not packed"
        print(packed)
        for name, values in lines.items():
            print(f"  {name:<26}" + "".join(f"{value:>14.2f}" for value in values))
            report.facts[f"{packed}, {name}: of 2 and of 60 datasets"] = values
        slowest = min(min(values) for values in lines.values())
        report.target(f"{packed}: slowest mode, {report.unit}", slowest, at_least=AT_LEAST)
    report.finish(options.out)


if __name__ == "__main__":
    main()

"""Options of the optimizer, its schedule and parameter groups; their defaults and conflicts.

This file imports no jax; optimizers.py makes the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

from easypipe.core.config import ListOf, check_at_least, check_number, config
from easypipe.core.errors import require
from easypipe.core.values import JsonObject

OptimizerName = Literal[
    "adamw",
    "nadamw",
    "lion",
    "sophia",
    "muon",
    "adafactor",
    "schedule_free",
    "ademamix",
    "adan",
    "prodigy",
    "lamb",
    "soap",
]
ScheduleName = Literal[
    "cosine", "linear", "wsd", "polynomial", "inverse_sqrt", "constant", "one_cycle"
]

_ADAM = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
# The options that each optimizer has, with their defaults.
DEFAULTS: dict[str, dict[str, float]] = {
    "adamw": {"learning_rate": 3e-4, **_ADAM},
    "nadamw": {"learning_rate": 3e-4, **_ADAM},
    "lion": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.3},
    "sophia": {
        "learning_rate": 3e-4,
        "beta1": 0.965,
        "beta2": 0.99,
        "epsilon": 1e-12,
        "weight_decay": 0.2,
        "gamma": 0.01,
        "update_interval": 10,
    },
    "muon": {"learning_rate": 3e-4, "momentum": 0.95, "newton_schulz_steps": 5, **_ADAM},
    "adafactor": {"learning_rate": 1e-2, "decay_rate": 0.8, "epsilon": 1e-30, "weight_decay": 0.0},
    "schedule_free": {"learning_rate": 1e-3, **_ADAM},
    "ademamix": {"learning_rate": 3e-4, **_ADAM, "beta2": 0.999, "beta3": 0.9999, "alpha": 5.0},
    "adan": {
        "learning_rate": 1e-3,
        "beta1": 0.98,
        "beta2": 0.92,
        "beta3": 0.99,
        "epsilon": 1e-8,
        "weight_decay": 0.02,
    },
    "prodigy": {"learning_rate": 1.0, **_ADAM, "beta2": 0.999},
    "lamb": {"learning_rate": 1e-3, **_ADAM, "beta2": 0.999, "epsilon": 1e-6},
    "soap": {
        "learning_rate": 1e-3,
        **_ADAM,
        "beta1": 0.95,
        "update_interval": 10,
        "max_precondition_dim": 8192,
    },
}
# schedules that fall to final_fraction by themselves
_ENDS = ("cosine", "linear", "polynomial", "one_cycle")
_FLAT = ("wsd", "constant", "inverse_sqrt")  # schedules that may have a cool-down


# options · the check of a value · the problem of a value that fails it, and its fix
_LIMITS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str, str], ...] = (
    (
        ("beta1", "beta2", "beta3", "momentum", "ema_decay"),
        lambda value: 0 <= value < 1,
        "is outside [0, 1)",
        "0.9 and 0.95 are usual.",
    ),
    (
        ("final_fraction",),
        lambda value: 0 <= value <= 1,
        "is outside [0, 1]",
        "0.0 ends at nothing.",
    ),
    (("decay_rate",), lambda value: 0 < value < 1, "is outside (0, 1)", "0.8 is usual."),
)


@config
class ParameterGroup:
    """Parameters with training options of their own.

    A parameter belongs to the first group whose `match` fits its name. `match` is a shell pattern
    (`*` and `?`) over dotted names such as `layers.query.kernel`; a group that matches no parameter
    is refused.
    """

    match: str  # a shell pattern over dotted names, such as "layers.query.*"
    learning_rate_scale: float = 1.0  # factor on the schedule; 0.0 freezes the parameters
    # weight decay of the group; None takes the optimizer's, for matrices
    weight_decay: float | None = None

    def check(self) -> None:
        check_number(self, None, "learning_rate_scale", "weight_decay", zero=True)


@config
class OptimizerConfig:
    """The optimizer and its schedule.

    None means the optimizer's own value (docs/training.md lists them); an option that the chosen
    optimizer or schedule does not have is refused.

    Weight decay is decoupled and multiplied by the learning rate (Loshchilov and Hutter, 2019, as
    in PyTorch), for every optimizer.
    """

    name: OptimizerName = "adamw"  # the optimizer
    # the peak of the schedule; for prodigy, a factor on the rate that it finds
    learning_rate: float | None = None
    # how the rate changes after the warm-up; None means cosine, or constant for schedule_free,
    # which has no other
    schedule: ScheduleName | None = None
    # steps of the warm-up. Step k of them (from 0) has the rate learning_rate * (k + 1) /
    # (warmup_steps + 1); one_cycle rises along half a cosine from a 25th of learning_rate
    warmup_steps: int = 0
    # last steps, in which the rate of wsd, constant and inverse_sqrt falls; None means a tenth of
    # all steps for wsd, else 0
    cooldown_steps: int | None = None
    # how the rate falls in the cool-down: `sqrt` by 1 - sqrt(progress) (Haegele et al., 2024); None
    # means linear
    cooldown_shape: Literal["linear", "cosine", "sqrt"] | None = None
    # the schedule ends at learning_rate * final_fraction; None means 0.1
    final_fraction: float | None = None
    power: float | None = None  # exponent of the polynomial schedule; None means 2
    beta1: float | None = None  # how much of the first moment is kept at each step
    beta2: float | None = None  # how much of the second moment is kept at each step
    # for ademamix, how much of the slow average is kept at each step; for adan, of the squares
    beta3: float | None = None
    # a small number, added when an update is divided by the second moment
    epsilon: float | None = None
    weight_decay: float | None = None  # decay of matrices only, multiplied by the learning rate
    momentum: float | None = None  # for muon, how much of the momentum is kept at each step
    # for muon, the iterations that make an update orthogonal
    newton_schulz_steps: int | None = None
    # for adafactor: second moments at step t keep 1 - t^-decay_rate
    decay_rate: float | None = None
    gamma: float | None = None  # for sophia, the scale of the curvature; a larger one clips less
    alpha: float | None = None  # for ademamix, the weight of the slow average
    # for sophia, the steps between estimates of the curvature; for soap, between new bases
    update_interval: int | None = None
    # for soap, the longest side of a matrix that is rotated
    max_precondition_dim: int | None = None
    # the largest norm of the gradient, over all parameters together; a larger gradient is scaled
    # down to it. None does not scale
    clip_norm: float | None = 1.0
    # evaluate, save and export a running average of the weights, whose decay at step k (from 0) is
    # min(ema_decay, (1 + k) / (10 + k)); None uses the weights themselves
    ema_decay: float | None = None
    groups: ListOf[ParameterGroup] = ()

    def check(self) -> None:
        values = asdict(self)
        for names, fits, problem, fix in _LIMITS:
            for name in names:
                value = values[name]
                require(value is None or fits(value), name, f"{value} {problem}", fix)
        check_number(
            self,
            "Give one, or leave it out.",
            "learning_rate",
            "epsilon",
            "clip_norm",
            "gamma",
            "alpha",
            "power",
        )
        check_number(self, "0.0 turns it off.", "weight_decay", zero=True)
        check_at_least(self, 0, "warmup_steps", "cooldown_steps")
        check_at_least(self, 1, "update_interval", "newton_schulz_steps")
        check_at_least(self, 2, "max_precondition_dim")
        for option in sorted({key for options in DEFAULTS.values() for key in options}):
            takers = [name for name, options in DEFAULTS.items() if option in options]
            require(
                values[option] is None or self.name in takers,
                option,
                f"{self.name} has no {option}",
                f"Remove it, or choose one of {', '.join(takers)}.",
            )
        require(
            self.ema_decay is None or self.name != "schedule_free",
            "ema_decay",
            "schedule_free is evaluated at an average of its own",
            "Remove it, or choose another optimizer.",
        )
        self._check_schedule(self.chosen_schedule)

    def _check_schedule(self, schedule: str) -> None:
        """Checks that the schedule has the options that are given."""
        cooling, averages = self.cooldown_steps, self.name == "schedule_free"
        cools = schedule == "wsd" if cooling is None else cooling > 0
        require(
            self.beta1 != 0 or not averages,
            "beta1",
            "schedule_free divides by it",
            "0.9 is usual.",
        )
        require(
            schedule == "constant" or not averages,
            "schedule",
            f"schedule_free runs at a constant rate, not {schedule}",
            "Remove schedule: it averages instead of decaying; warmup_steps remains.",
        )
        require(
            self.power is None or schedule == "polynomial",
            "power",
            f"the {schedule} schedule has none",
            "Remove it, or set schedule: polynomial.",
        )
        require(
            self.cooldown_steps is None or schedule in _FLAT,
            "cooldown_steps",
            f"{schedule} falls all along: it has no cool-down",
            f"Remove it, or set schedule to one of {', '.join(_FLAT)}.",
        )
        require(
            self.cooldown_shape is None or cools,
            "cooldown_shape",
            "there is no cool-down",
            "Set cooldown_steps, or remove it.",
        )
        require(
            self.final_fraction is None or schedule in _ENDS or cools,
            "final_fraction",
            f"the {schedule} schedule does not have an end value",
            "Set cooldown_steps, or remove it.",
        )
        require(
            schedule != "one_cycle" or self.warmup_steps >= 1,
            "warmup_steps",
            "one_cycle rises over its warm-up, which is missing",
            "Three tenths of the steps are usual.",
        )

    @property
    def chosen_schedule(self) -> str:
        return self.schedule or ("constant" if self.name == "schedule_free" else "cosine")

    @property
    def averages(self) -> bool:
        """Whether the weights that are evaluated differ from those that are trained."""
        return self.name == "schedule_free" or self.ema_decay is not None

    @property
    def end_fraction(self) -> float:
        return 0.1 if self.final_fraction is None else self.final_fraction

    @property
    def chosen_power(self) -> float:
        return 2.0 if self.power is None else self.power

    def numbers(self) -> dict[str, float]:
        """Returns every option that this optimizer has: the given value, or its default."""
        given = asdict(self)
        own = DEFAULTS[self.name].items()
        return {name: value if given[name] is None else given[name] for name, value in own}

    def resolved(self) -> JsonObject:
        """Returns every setting that this optimizer uses; resuming compares them."""
        schedule = self.chosen_schedule
        own: JsonObject = {
            "name": self.name,
            "schedule": schedule,
            "warmup_steps": self.warmup_steps,
            "clip_norm": self.clip_norm,
        }
        if schedule in _FLAT:
            own["cooldown_steps"] = self.cooldown_steps
            own["cooldown_shape"] = self.cooldown_shape or "linear"
        if schedule == "polynomial":
            own["power"] = self.chosen_power
        own["final_fraction"] = self.end_fraction
        if self.ema_decay is not None:
            own["ema_decay"] = self.ema_decay
        return own | self.numbers() | {"groups": [asdict(group) for group in self.groups]}


def cooldown_steps(config: OptimizerConfig, steps: int) -> int:
    """Returns the number of cool-down steps in a run of `steps`."""
    if config.cooldown_steps is not None:
        return config.cooldown_steps
    return max(1, steps // 10) if config.chosen_schedule == "wsd" else 0


def check_warmup(optimizer: OptimizerConfig, steps: int) -> None:
    """Checks that warm-up and cool-down leave at least one step between them.

    Raises:
        ConfigError: They leave none.
    """
    cooling = cooldown_steps(optimizer, steps)
    require(
        cooling < steps,
        "optimizer.cooldown_steps",
        f"{cooling} steps of cool-down do not begin after the first of {steps} steps",
        f"Give at most {steps - 1}.",
    )
    cool = f" and {cooling} of cool-down" if cooling else ""
    require(
        optimizer.warmup_steps + cooling < steps,
        "optimizer.warmup_steps",
        f"{optimizer.warmup_steps} warm-up steps{cool} do not end before the last of {steps} steps",
        f"Give at most {steps - 1 - cooling}.",
    )

"""TrainingConfig: steps, loss, preferences, distillation, checkpoints, spikes; and their checks.

This file imports no jax: a configuration is read and checked on machines that only prepare data.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from easypipe.core.config import (
    ListOf,
    check_at_least,
    check_number,
    config,
    fields_of,
    was_given,
)
from easypipe.core.errors import require
from easypipe.train.callbacks.config import CallbacksConfig
from easypipe.train.model.config import LoraConfig
from easypipe.train.optim.config import OptimizerConfig, check_warmup
from easypipe.train.parallel.config import DistributedConfig, MeshConfig, mesh_config

log = logging.getLogger("easypipe")


@config
class LossConfig:
    """Cross entropy over packed rows, with z-loss, label smoothing and the size of its pieces."""

    z_loss: float = 0.0  # weight of the squared log-partition (PaLM); keeps logits near zero
    # share of every target that is spread evenly over the vocabulary; the metric `nll` is measured
    # without it
    label_smoothing: float = 0.0
    # None takes the fastest one that is tested on the device
    implementation: Literal["reference", "chunked", "pallas_tpu", "pallas_gpu"] | None = None
    # `fast` computes the logits of chunk_size tokens at a time; `strict` those of one tile at a
    # time, with more work
    rule: Literal["fast", "strict"] | None = None
    # tokens whose logits exist at a time, on each device; None means 4096 on TPU and CUDA, 1024
    # elsewhere
    chunk_size: int | None = None

    def check(self) -> None:
        check_number(self, "0.0 for none; 1e-4 is usual.", "z_loss", zero=True)
        require(
            0 <= self.label_smoothing < 1,
            "label_smoothing",
            f"{self.label_smoothing} is outside [0, 1)",
            "0.0 for none; 0.1 is usual.",
        )
        require(
            self.implementation != "reference" or not (self.rule or self.chunk_size),
            "rule" if self.rule else "chunk_size",
            "the reference implementation does not use it",
            "Leave it out, or choose implementation 'chunked'.",
        )
        check_at_least(self, 1, "chunk_size")


# What a run can measure besides its loss.
Measure = Literal["sources", "bits_per_byte", "token_accuracy", "entropy"]

# Losses of pairs, with the names and formulas of TRL.
PreferenceLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
    "orpo",
    "simpo",
    "reward",
    "kto",
    "apo_zero_unpaired",
]
UNPAIRED = ("kto", "apo_zero_unpaired")  # losses of answers that are judged one by one
WITHOUT_REFERENCE = ("orpo", "simpo", "reward")
SMOOTHED = ("sigmoid", "robust", "exo_pair", "simpo")


@config
class PreferenceConfig:
    """Training on pairs of answers: direct preference optimization and related losses.

    The data must have pairs (`DatasetConfig(prompt=PromptConfig(rejected_column=...))`). The losses
    kto and apo_zero_unpaired need a verdict on each answer instead (`desirable_column`).
    """

    # the loss, by its name in TRL: `sigmoid` is DPO; `reward` trains a reward model (a head of one
    # number)
    loss: PreferenceLoss = "sigmoid"
    # how closely the model is held to its reference: a smaller value lets it go further; for orpo,
    # the weight of the odds ratio, which is added to the loss of the chosen answer
    beta: float = 0.1
    label_smoothing: float = 0.0  # the share of preferences that are assumed to be wrong
    margin: float | None = None  # for simpo, by how much the chosen answer must win; None means 0.5
    desirable_weight: float = 1.0  # for kto and apo_zero_unpaired, the weight of desirable answers
    # for kto and apo_zero_unpaired, the weight of undesirable answers
    undesirable_weight: float = 1.0
    # what answers are compared to: `initial` is the model before training, and keeps a second copy
    # of its trained parameters; `cached` computes that model's log-probabilities of all data before
    # the first step, and caches them; `none` compares to no model
    reference: Literal["initial", "cached", "none"] = "initial"

    @property
    def scores(self) -> bool:
        """Whether the model gets a head that scores answers."""
        return self.loss == "reward"

    @property
    def compares(self) -> bool:
        """Whether the loss needs the answers' log-probabilities before training."""
        return self.reference != "none" and self.loss not in WITHOUT_REFERENCE

    @property
    def tells(self) -> tuple[str, ...]:
        """The names of the metrics that the loss reports besides its value."""
        if self.loss not in UNPAIRED:
            return "reward_margin", "reward_accuracy"
        return "reward_desirable", "reward_undesirable", *(("kl",) if self.loss == "kto" else ())

    def check(self) -> None:
        effects = (
            ("label_smoothing", self.label_smoothing == 0 or self.loss in SMOOTHED),
            ("margin", self.margin is None or self.loss == "simpo"),
            ("beta", self.beta == PreferenceConfig.beta or self.loss != "reward"),
            ("desirable_weight", self.desirable_weight == 1 or self.loss in UNPAIRED),
            ("undesirable_weight", self.undesirable_weight == 1 or self.loss in UNPAIRED),
            ("reference", self.reference == "initial" or self.loss not in WITHOUT_REFERENCE),
        )
        for key, has_effect in effects:
            require(has_effect, key, f"has no effect on the loss {self.loss}", "Leave it out.")
        require(
            self.loss != "exo_pair" or self.label_smoothing > 0,
            "label_smoothing",
            "0.0, but exo_pair takes its logarithm",
            "0.001 is usual.",
        )
        require(
            self.loss != "kto" or self.reference == "initial",
            "reference",
            f"{self.reference}, and kto compares answers under other prompts, which change with "
            "the rows, to the model before training",
            "Leave it out, or take the loss apo_zero_unpaired.",
        )
        usual = "1.0 is usual; use more for the rarer kind."
        check_number(self, usual, "desirable_weight", "undesirable_weight", zero=True)
        check_number(self, "0.5 is usual.", "margin", zero=True)
        check_number(self, "0.1 is usual.", "beta")
        require(
            0 <= self.label_smoothing < 0.5,
            "label_smoothing",
            f"{self.label_smoothing} is outside [0, 0.5)",
            "0.0 is usual.",
        )


@config
class DistillConfig:
    """Distillation: the model is trained towards a teacher's distribution at every target.

    The data holds the teacher's k likeliest tokens for every token, and their log-probs
    (`aligned_columns`). A token whose log-probs are all 0 has no teacher, and only its label counts
    in the loss.
    """

    # weight of the divergence from the teacher; the label's loss has the weight 1 - weight
    weight: float = 0.5
    ids: str = "teacher_ids"  # the column of the teacher's tokens
    # the column of the teacher's log-probabilities of these tokens, in nats
    log_probs: str = "teacher_log_probs"

    def check(self) -> None:
        require(
            0 < self.weight <= 1,
            "weight",
            f"{self.weight} is outside (0, 1]",
            "0.5 is usual; with 1 labels are not trained.",
        )
        require(
            self.ids != self.log_probs,
            "log_probs",
            f"{self.log_probs!r} is the column of the ids too",
            "Name the column of the teacher's log-probs.",
        )


@config
class CheckpointConfig:
    """How often checkpoints are saved, and how many are kept.

    A checkpoint commits model, optimizer, loader state and configuration together. The last step is
    always saved.
    """

    # steps between checkpoints; None saves only at the end, and when a signal stops the run
    every: int | None = 500
    keep: int = 2  # how many of the newest checkpoints are kept; older ones are deleted

    def check(self) -> None:
        check_at_least(self, 1, "every", "keep")


@config
class SpikeConfig:
    """When a run goes back to its last good checkpoint: after `patience` bad steps in succession.

    A step is bad if its loss, gradient or update is not finite, or if its loss is more than
    `threshold` standard deviations above the median of the last `window` good ones. The standard
    deviation is estimated by the median absolute deviation. The batches since that checkpoint are
    skipped; rollbacks.jsonl names their documents.
    """

    # how many good steps define the usual loss; no loss is called a spike before there are that
    # many
    window: int = 128
    # a step is bad if its loss is this many standard deviations above the median
    threshold: float = 10.0
    patience: int = 3  # how many bad steps in succession make the run go back
    max_rollbacks: int = 5  # how often the run may go back; the next time, it stops instead

    def check(self) -> None:
        check_at_least(self, 2, "window")
        check_at_least(self, 1, "patience", "max_rollbacks")
        check_number(self, "10.0 is usual.", "threshold")


@config
class TrainingConfig:
    """One training run.

    `output_dir` holds checkpoints/, metrics.jsonl, run.yaml, versions.json, fingerprints.json and
    the plots; `easypipe report` makes a page of them. `learning_rate` and `random_seed` are aliases
    of optimizer.learning_rate and seed.
    """

    output_dir: str | Path = "run"  # the folder that the run writes to
    # optimizer steps; None takes the number of batches of the loader, or of `epochs`
    steps: int | None = None
    # passes over the data, in place of the loader's own number; None keeps the loader's
    epochs: int | None = None
    # rows of a batch, in place of the loader's own number; None keeps the loader's
    batch_size: int | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    preference: PreferenceConfig | None = None  # train on pairs of answers instead of next tokens
    # also train on a teacher's distribution, whose log-probabilities the data holds
    distill: DistillConfig | None = None
    # a weight for each class of a classifier, in the order of the class numbers: loss and nll are
    # means by these weights, as in torch's CrossEntropyLoss(weight=...); None weighs all classes
    # alike
    class_weights: ListOf[float] | None = None
    # add noise to the embeddings while training (NEFTune). Its largest value is neftune_alpha
    # divided by the root of (tokens of the document x width); 5 is usual, None adds none
    neftune_alpha: float | None = None
    # train only low-rank adapters; None trains the model's own parameters
    lora: LoraConfig | None = None
    # a preset (dp, fsdp, zero1, tp, hybrid), or the devices along data, fsdp, sequence and tensor,
    # as in MeshConfig
    mesh: str | MeshConfig = "dp"
    # an alias of data.load.accumulation_steps, for loaders of your own: every batch is cut into
    # this many micro-batches, which takes less memory and leaves the update the same
    accumulate_steps: int = 1
    seed: int = 0  # seed of the initial parameters, and of dropout if the model has any
    log_every: int = 1  # steps between lines of metrics.jsonl
    # steps between evaluations; None evaluates only after the last step
    eval_every: int | None = None
    eval_batches: int | None = None  # batches of each held-out loader; None takes all
    # what each step and evaluation measures besides the loss: `sources` (each metric by dataset),
    # `bits_per_byte`, `token_accuracy`, `entropy`
    measure: ListOf[Measure] = ()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    # callbacks by name; in Python, others can be added
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    # what happens at a step whose loss or gradient is not finite: `skip` leaves the step out and
    # continues, `stop` ends the run
    on_nonfinite: Literal["skip", "stop"] = "skip"
    # the run stops after this many skipped steps in succession; with spikes it goes back instead
    max_nonfinite: int = 10
    # go back to the last good checkpoint after spikes of the loss; None never goes back
    spikes: SpikeConfig | None = None
    # the processes of a run on several hosts
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    # continue from the newest checkpoint in output_dir; False refuses a folder that has one
    resume: bool = True
    # key paths that may differ from the checkpoint's, such as "train.steps", or loader.sources,
    # loader.tokenizer, loader.config and loader.plan; "ended" continues a run that early_stopping
    # ended
    resume_changes: ListOf[str] = ()

    ELSEWHERE: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "num_epochs": "Did you mean 'epochs'?",
            "lr": "Did you mean 'optimizer.learning_rate'?",
        }
    )

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"learning_rate": "optimizer.learning_rate", "random_seed": "seed"}
    )

    if TYPE_CHECKING:
        learning_rate: float | None = None
        random_seed: int | None = None
    else:
        learning_rate = property(lambda self: self.optimizer.numbers()["learning_rate"])
        random_seed = property(lambda self: self.seed)

    def check(self) -> None:
        check_at_least(self, 1, "epochs", "batch_size")
        require(
            self.epochs is None or self.steps is None,
            "epochs",
            f"{self.epochs}, and steps say how long the run is too",
            "Give one of them.",
        )
        counts = "accumulate_steps", "log_every", "eval_every", "eval_batches", "max_nonfinite"
        check_at_least(self, 1, "steps", *counts)
        require(0 <= self.seed < 2**32, "seed", f"{self.seed} is outside [0, 2^32)")
        weights = self.class_weights
        require(
            weights is None or (all(0 <= one < math.inf for one in weights) and any(weights)),
            "class_weights",
            f"{list(weights or ())} are not weights: each must be at least 0, and one positive",
            "Give a weight for each class; all 1 weigh alike.",
        )
        check_number(self, "5 is usual; leave it out for no noise.", "neftune_alpha")
        if self.steps is not None:
            check_warmup(self.optimizer, self.steps)
        mesh_config(self.mesh)
        for key, given, why in (
            ("class_weights", weights is not None, "have a loss of their own"),
            ("loss", self.loss != LossConfig(), "have a loss of their own"),
            ("distill", self.distill is not None, "have a loss of their own"),
            ("measure", self.measure, "measure their own"),
        ):
            require(
                self.preference is None or not given,
                key,
                f"has no effect on preferences, which {why}",
                "Leave it out.",
            )
        require(
            self.max_nonfinite == TrainingConfig.max_nonfinite or self.on_nonfinite == "skip",
            "max_nonfinite",
            "has no effect with on_nonfinite: stop, which ends the run at the first step",
            "Leave one of them out.",
        )
        if self.spikes is not None and self.on_nonfinite == "skip":
            patience, most = self.spikes.patience, self.max_nonfinite
            fits = patience <= most
            require(
                fits or was_given(self.spikes, "patience") or not was_given(self, "max_nonfinite"),
                "max_nonfinite",
                f"{most} steps, but spikes.patience waits for {patience} bad ones",
                f"Give at least {patience}, or lower spikes.patience.",
            )
            require(
                fits,
                "spikes.patience",
                f"{patience} bad steps, but the run stops after {most} that are not finite",
                f"Give at most {most}, or raise max_nonfinite.",
            )


def told(data: Any, config: TrainingConfig, at: str) -> dict[str, int]:
    """Returns the fields of a data config that the `batch_size` and `epochs` of `config` change.

    Args:
        data: A config that has batch_size and num_epochs.
        config: The options of the run.
        at: The key path of `data`, for error messages.

    Raises:
        ConfigError: `data` was given another number.
    """
    changes = {}
    for key, value, name in (
        ("batch_size", config.batch_size, "batch_size"),
        ("epochs", config.epochs, "num_epochs"),
    ):
        if value is not None:
            own = fields_of(data)[name]
            require(
                own == value or not was_given(data, name),
                f"train.{key}",
                f"{value}, but {at}.{name} is {own}",
                "Give one of them.",
            )
            changes[name] = value
    return changes


def accumulating(config: TrainingConfig, pieces: int) -> TrainingConfig:
    """Returns the config with data.load.accumulation_steps as its number of micro-batches.

    Args:
        config: The options of the run.
        pieces: data.load.accumulation_steps; accumulate_steps is an alias of it.

    Raises:
        ConfigError: accumulate_steps is a different number.
    """
    own = config.accumulate_steps
    require(
        own in (1, pieces) or pieces == 1,
        "train.accumulate_steps",
        f"{own}, but data.load.accumulation_steps is {pieces}",
        "Give data.load.accumulation_steps alone.",
    )
    if own > pieces:
        log.warning(
            "train.accumulate_steps=%d is another name of data.load.accumulation_steps: write that",
            own,
        )
    return dataclasses.replace(config, accumulate_steps=pieces) if own < pieces else config

"""Callbacks by name (heartbeat, early stopping, best checkpoints ...), and which metrics exist."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from easypipe.core.config import fields_of
from easypipe.core.errors import (
    ConfigError,
    StorageError,
    did_you_mean,
    raising,
    require,
    require_known,
)
from easypipe.core.values import Arguments, Json
from easypipe.train.callbacks.config import (
    BestConfig,
    CallbacksConfig,
    EarlyStoppingConfig,
    HeartbeatConfig,
    LmEvalConfig,
    Mode,
    ProfileConfig,
    SamplesConfig,
    TensorBoardConfig,
)
from easypipe.train.callbacks.trackers import Mlflow, Trackio, Wandb, flat, installed
from easypipe.train.events import Callback, StatefulListener, TrainEvent
from easypipe.train.metrics.log import LM_EVAL, SAMPLES, MetricsFile
from easypipe.train.record import BEST, write_kept
from easypipe.transforms.chat.conversations import conversations_of

if TYPE_CHECKING:
    from easypipe.train.model.decoder import Decoder
    from easypipe.train.model.pretrained.save import Seen  # loads jax
    from easypipe.train.model.writing import Writer

# Numbers of each line of metrics.jsonl that are the same in all processes of a run.
TRAINING = ("loss", "grad_norm", "param_norm")
HELD_OUT = ("loss",)  # numbers of each held-out loader
NLL = ("nll", "ppl")  # of each step and evaluation if the loss reports them


@dataclass(frozen=True)
class Known:
    """The metrics that a run will measure.

    Attributes:
        evals: For each held-out loader, by name, what the loss reports besides HELD_OUT.
        eval_every: Steps between evaluations; None evaluates only after the last step.
        steps: The number of steps of the run.
        told: What the loss reports of each step besides TRAINING.
        asked: Whether these names are certain. False for a loss from Python that was not traced
            yet, for which any name is possible.
        tokenizer: The name or path of the tokenizer of the data, if it is known.
        seen: Returns the record of the data that the run has seen so far.
    """

    evals: Mapping[str, Sequence[str]]
    eval_every: int | None
    steps: int
    told: Sequence[str] = NLL
    asked: bool = True
    tokenizer: str | None = None
    seen: Callable[[], Seen] | None = None

    def of(self, metric: str) -> str | None:
        """Returns the held-out loader of a metric; None for a metric of the training steps."""
        return _loader_of(metric, self.evals)

    def check(self, config: CallbacksConfig) -> None:
        """Checks the metrics that callbacks watch.

        Raises:
            ConfigError: A metric will not be measured, or only after the last step.
        """
        if config.early_stopping is not None:
            self._check(f"{_AT}.early_stopping.metric", config.early_stopping.metric, training=True)
        if config.best is not None:
            self._check(f"{_AT}.best.metric", config.best.metric, training=False)

    def _check(self, at: str, metric: str, *, training: bool) -> None:
        """Checks one metric; `training` says whether metrics of the training steps are allowed."""
        of, known = self.of(metric), [*TRAINING, *self.told] if training else []
        known += [
            f"eval.{name}.{key}" for name, told in self.evals.items() for key in (*HELD_OUT, *told)
        ]
        open_ = of is not None or (training and not metric.startswith("eval."))
        if metric not in known and (self.asked or not open_):
            fix = did_you_mean(metric, known) or (
                "Give the run held-out data, under `eval`." if not known else None
            )
            what = "metric" if training else "held-out metric"
            raise ConfigError(at=at, problem=f"no {what} named {metric!r}", have=known, fix=fix)
        require(
            of is None or self.eval_every is not None,
            at,
            f"{metric} is measured once, after the last step",
            "Set train.eval_every.",
        )


def value_of(record: Json, metric: str, at: str) -> float | None:
    """Returns the value of `metric` in a line of metrics.jsonl.

    It is None if it is not finite, or belongs to an evaluation that the line does not have.

    Args:
        record: The line.
        metric: The name of the metric.
        at: The key path where the metric was named.

    Raises:
        ConfigError: The line has the numbers of that loader or step, but not this name.
    """
    group: Json = record
    under = ""
    if metric.startswith("eval."):
        name = _loader_of(metric, record.get("eval", {}))
        if name is None:
            return None
        group, under = record["eval"][name], f"eval.{name}."
    known = [f"{under}{key}" for key, value in group.items() if not isinstance(value, Mapping)]
    fix = did_you_mean(metric, known)
    require(
        metric.removeprefix(under) in group, at, f"the loss does not return {metric!r}", fix, known
    )
    value = flat(record).get(metric)
    return value if value is not None and math.isfinite(value) else None


def _loader_of(metric: str, names: Iterable[str]) -> str | None:
    """Returns the held-out loader of a metric: of "a" and "a.b" the longer one, if both fit."""
    fitting = (name for name in names if metric.startswith(f"eval.{name}."))
    return max(fitting, key=len, default=None)


def judged_alike(config: EarlyStoppingConfig | BestConfig, state: Json, at: str) -> bool:
    """Returns whether the values in a callback's state are of the metric and mode of `config`.

    Otherwise a warning is logged, because the callback begins without them.
    """
    now = _judged(config)
    before = {key: state.get(key, value) for key, value in now.items()}  # older states lack them
    if before != now:
        texts = (f"{metric} ({mode})" for metric, mode in (before.values(), now.values()))
        logger.warning("%s: values of %s in the checkpoint are not compared to %s", at, *texts)
    return before == now


def _judged(config: EarlyStoppingConfig | BestConfig) -> Json:
    return {"metric": config.metric, "mode": config.mode}


def better(value: float, than: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Returns whether `value` beats `than` by more than min_delta; any value beats None."""
    return than is None or (than - value if mode == "min" else value - than) > min_delta


class EarlyStopping(Callback):
    """Stops the run when a metric no longer improves.

    It keeps its best value and its count with every checkpoint, so that a killed run stops at the
    same step as one that was not killed. A run that continues after its end has its full patience
    again.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.since = 0

    def on_step(self, event: TrainEvent) -> None:
        value = value_of(event.record, self.config.metric, "train.callbacks.early_stopping.metric")
        if value is None:
            return
        if better(value, self.best, self.config.mode, self.config.min_delta):
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.config.patience and event.step < event.steps:
            reason = (
                f"{self.config.metric} is {value:.6g}, and did not get better than "
                f"{self.best:.6g} {self.since} times"
            )
            event.control.stop(reason, for_good=True)

    def state(self) -> Json:
        return {"best": self.best, "since": self.since, **_judged(self.config)}

    def restore(self, state: Json) -> None:
        if not judged_alike(self.config, state, f"{_AT}.early_stopping"):
            return
        self.best, self.since = state["best"], state["since"]
        if self.since >= self.config.patience:
            self.since = 0


logger = logging.getLogger("easypipe")


class BestCheckpoints(Callback):
    """Keeps the checkpoints with the best value of a metric; of equal values the earlier is better.

    Args:
        config: The options.
        folder: The run's output folder.
        write: Whether this process writes best.json; True in one process of a run.

    Attributes:
        config: The options.
        ranking: (step, value) of the best steps, the best first.
    """

    def __init__(self, config: BestConfig, folder: Path, *, write: bool = True) -> None:
        self.config, self._folder, self._write = config, folder, write
        self.ranking: list[tuple[int, float]] = []
        # All steps that were ever among the best, while their checkpoints exist or are being
        # written.
        self._ranked: list[tuple[int, float]] = []
        self._listed: list[tuple[int, float]] = []  # the content of best.json

    def on_init(self, event: TrainEvent) -> None:
        there = [one for one in self.ranking if self._is_whole(one)]
        for step, _ in set(self.ranking) - set(there):
            logger.warning(
                "%s: the checkpoint of step %d, one of the best, is gone", self._folder, step
            )
        self.ranking, self._ranked = there, list(there)
        event.control.kept.update(step for step, _ in there)
        if self._write:
            # It may list steps after the one from which the run continues.
            (self._folder / BEST).unlink(missing_ok=True)
        self._list()

    def on_step(self, event: TrainEvent) -> None:
        value = value_of(event.record, self.config.metric, "train.callbacks.best.metric")
        if value is None or self._place(value, self.ranking) >= self.config.keep:
            return
        for ranking in (self.ranking, self._ranked):
            ranking.insert(self._place(value, ranking), (event.step, value))
        event.control.kept.difference_update(step for step, _ in self.ranking[self.config.keep :])
        event.control.kept.add(event.step)
        event.control.save()
        del self.ranking[self.config.keep :]

    def on_dispatch(self, event: TrainEvent) -> None:
        # A save is complete some steps after it began.
        if self._write and self._ranked and self._listed != self.ranking:
            self._list()

    # By now the save before this one is complete, and an older checkpoint was deleted for it.
    def on_save(self, event: TrainEvent) -> None:
        self._list()

    def on_end(self, event: TrainEvent) -> None:
        self._list()

    def _list(self) -> None:
        """Writes best.json with the best checkpoints that exist.

        The file is read during the run, or after a kill.
        """
        there = [one for one in self._ranked if self._is_whole(one)]
        newest = max((step for step, _ in there), default=0)
        self._ranked = [one for one in self._ranked if one in there or one[0] > newest]
        best = there[: self.config.keep]
        if self._write and best and best != self._listed:
            self._listed = best
            lines = [
                {"step": step, self.config.metric: value, "checkpoint": f"checkpoints/{step}"}
                for step, value in best
            ]
            write_kept(self._folder / BEST, lines)

    def _place(self, value: float, ranking: list[tuple[int, float]]) -> int:
        """Returns the place of a value in a ranking; the best is 0."""
        worse = (i for i, one in enumerate(ranking) if better(value, one[1], self.config.mode))
        return next(worse, len(ranking))

    def _is_whole(self, one: tuple[int, float]) -> bool:
        """Returns whether a step has a checkpoint, which gets its name when it is complete."""
        return (self._folder / "checkpoints" / str(one[0])).is_dir()

    def state(self) -> Json:
        return {"ranking": [list(one) for one in self.ranking], **_judged(self.config)}

    def restore(self, state: Json) -> None:
        if not judged_alike(self.config, state, f"{_AT}.best"):
            return
        self.ranking = [(int(step), float(value)) for step, value in state["ranking"]]


class TensorBoard(Callback):
    """Writes the numbers of each logged step as TensorBoard scalars.

    A run that continues from step n hides later steps of an earlier process.

    Raises:
        ConfigError: The package tensorboardX is not installed.
    """

    def __init__(self, config: TensorBoardConfig, folder: Path) -> None:
        self.folder = (
            folder / "tensorboard"
            if config.folder is None
            else Path(os.path.expanduser(config.folder))
        )
        self._make = installed("tensorboard", "tensorboardX").SummaryWriter
        self._flush_s, self._writer = config.flush_s, None

    def on_init(self, event: TrainEvent) -> None:
        hidden_from = event.step + 1 if event.step else None
        # Its files are named by the second: a run that is resumed immediately would overwrite its
        # own.
        suffix = f".{event.step}.{os.getpid()}"
        self._writer: Any = self._make(
            str(self.folder),
            purge_step=hidden_from,
            flush_secs=self._flush_s,
            filename_suffix=suffix,
        )

    def on_step(self, event: TrainEvent) -> None:
        if self._writer is None:
            return
        for name, value in flat(event.record).items():
            if name != "step":
                tag = name.replace(".", "/") if name.startswith("eval.") else f"train/{name}"
                self._writer.add_scalar(tag, value, event.step)

    def on_end(self, event: TrainEvent) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    on_exception = on_end


class ProfilerWindow(Callback):
    """Traces the configured steps with JAX's profiler.

    The window ends two dispatches after its last step, when that step is known to be finished.
    """

    def __init__(self, config: ProfileConfig, folder: Path) -> None:
        self.folder = folder / "profile"
        self._first, self._last = config.start, config.start + config.steps - 1
        self._tracing = False

    def on_dispatch(self, event: TrainEvent) -> None:
        import jax

        if self._tracing and event.step > self._last + 1:
            self._stop()
        elif not self._tracing and self._first <= event.step <= self._last:
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.folder))
            self._tracing = True

    def on_end(self, event: TrainEvent) -> None:
        self._stop()

    on_exception = on_end

    def _stop(self) -> None:
        if self._tracing:
            import jax

            self._tracing = False
            jax.profiler.stop_trace()
            logger.info("profile of steps %d to %d: %s", self._first, self._last, self.folder)


class Heartbeat(Callback):
    """Writes a file that shows that the run is alive.

    The file is complete at any moment, because a new one is written next to it and renamed. It is
    not synced: after a crash of the machine it may be old.
    """

    def __init__(
        self,
        config: HeartbeatConfig,
        folder: Path,
        *,
        process: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = folder / f"heartbeat-{process}.json"
        self._every_s, self._clock, self._last = config.every_s, clock, float("-inf")

    def __call__(self, event: TrainEvent) -> None:
        if event.kind == "end":
            self._beat(event, "ended")
        elif event.kind == "exception":
            self._beat(
                event,
                "stopped" if str(event.record["error"]).startswith("Interrupted:") else "failed",
            )
        elif event.kind == "start" or self._clock() - self._last >= self._every_s:
            self._beat(event, "running")

    def _beat(self, event: TrainEvent, status: str) -> None:
        self._last = self._clock()
        told = {"step": event.step, "steps": event.steps, "status": status, "time": self._last}
        beside = self.path.with_suffix(".tmp")
        told |= {"host": socket.gethostname(), "pid": os.getpid()}
        fix = "Check space and permissions."
        with raising(StorageError, self.path, "cannot be written", fix):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(told), encoding="utf-8")
            os.replace(beside, self.path)


class LmEval(Callback):
    """Evaluates the model on tasks of lm-eval at every checkpoint.

    Its lines are the results of lm-eval, with the step of the checkpoint.

    Raises:
        ConfigError: lm-eval is not installed, or the run has several processes.
    """

    def __init__(self, config: LmEvalConfig, folder: Path, known: Known) -> None:
        from easypipe.train.model.harness import check_needed

        check_needed()
        _check_alone(f"{_AT}.lm_eval", "asks", "eval")
        self.config, self._path = config, folder / LM_EVAL
        self._tokenizer, self._seen = known.tokenizer or "", known.seen

    def on_init(self, event: TrainEvent) -> None:
        at = f"{_AT}.lm_eval"
        require(self._tokenizer, at, *_NO_TOKENIZER)
        _decoder_of(event, at, "ask")
        self._lines = MetricsFile(self._path, after_step=event.step)

    def on_save(self, event: TrainEvent) -> None:
        from easypipe.train.model.harness import scores

        assert event.model is not None
        assert self._seen is not None
        found = scores(self.config, event.model(), self._tokenizer, self._seen())
        self._lines.append({"step": event.step, "results": found})
        self._lines.sync()

    def on_end(self, event: TrainEvent) -> None:
        self._lines.close()


class Samples(Callback):
    """Writes texts that the model generates every few steps.

    Its lines have the step and, for each text, its prompt and the continuation.

    Raises:
        ConfigError: The data names no tokenizer, or the run has several processes.
        SourceError: The file holds no conversations.
    """

    def __init__(self, config: SamplesConfig, folder: Path, known: Known) -> None:
        at = f"{_AT}.samples"
        _check_alone(at, "writes with", "generate")
        require(known.tokenizer, at, *_NO_TOKENIZER)
        self._conversations = []
        if config.messages is not None:
            path = Path(os.path.expanduser(config.messages))
            require(path.is_file(), f"{at}.messages", f"{path} is not a file", "Give one of JSON.")
            self._conversations = conversations_of(path)
        self.config, self._path, self._known = config, folder / SAMPLES, known
        self._prompts: list[str] = []
        self._writer: Writer | None = None

    def on_init(self, event: TrainEvent) -> None:
        from easypipe.train.model.writing import Loaded, Writer

        config, known = self.config, self._known
        assert known.seen is not None
        model = _decoder_of(event, f"{_AT}.samples", "write with")
        options: Arguments = {
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "stop": (),
        }
        self._writer = Writer(Loaded(model, known.tokenizer or "", known.seen()), options)
        conversations = self._conversations
        self._prompts = [
            *config.prompts,
            *(self._writer.opened(conversations) if conversations else ()),
        ]
        self._writer.decoder = None  # the first step consumes its arrays
        self._lines = MetricsFile(self._path, after_step=event.step)

    def on_dispatch(self, event: TrainEvent) -> None:
        last = event.step == event.steps or event.control.reason is not None
        if last or event.step % self.config.every == 0:
            event.control.look()

    def on_step(self, event: TrainEvent) -> None:
        if event.control.reason is not None:  # the newest step is the last
            event.control.look()

    def on_look(self, event: TrainEvent) -> None:
        assert self._writer is not None
        assert event.model is not None
        self._writer.decoder = event.model()
        texts = self._writer.written(self._prompts, whole=False)
        self._writer.decoder = None
        both = zip(self._prompts, texts, strict=True)
        samples = [{"prompt": prompt, "text": text} for prompt, text in both]
        self._lines.append({"step": event.step, "samples": samples})
        self._lines.sync()

    def on_end(self, event: TrainEvent) -> None:
        self._lines.close()


_AT = "train.callbacks"
_NO_TOKENIZER = "the run's data names no tokenizer", "Name the one that made its tokens."


def _check_alone(at: str, uses: str, command: str) -> None:
    """Checks that the run has one process.

    Args:
        at: The key path of the callback.
        uses: The callback's use of the model, for the message.
        command: The command to run instead.

    Raises:
        ConfigError: The run has several processes.
    """
    import jax

    fix = f"Leave it out, and run `easypipe {command}` on the run's folder."
    require(jax.process_count() == 1, at, f"{uses} a model that lies on one host", fix)


def _decoder_of(event: TrainEvent, at: str, use: str) -> Decoder:
    """Returns the model of an event.

    Raises:
        ConfigError: It is not a Decoder.
    """
    from easypipe.train.model.decoder import Decoder

    model = None if event.model is None else event.model()
    if not isinstance(model, Decoder):
        problem = f"cannot {use} a {type(model).__name__}"
        raise ConfigError(at=at, problem=problem, fix="Train a ModelConfig.")
    return model


def checked_callbacks(given: object) -> tuple[StatefulListener, ...]:
    """Returns the callbacks that the user gave, as a tuple.

    Raises:
        ConfigError: One is not a callback, or has a method on_... that is not called at any event.
    """
    several: Iterable[object] = (given,)
    if isinstance(given, Iterable) and not isinstance(given, StatefulListener | str):
        several = given
    callbacks: list[StatefulListener] = []
    for i, one in enumerate(several):
        if isinstance(one, type) or not isinstance(one, StatefulListener):
            fix = (
                "Make an object of a class that extends easypipe.train.events.Callback; "
                "named ones are given as a mapping: {best: {}}."
            )
            raise ConfigError(at=f"callbacks[{i}]", problem=f"{one!r} is not a Callback", fix=fix)
        if isinstance(one, Callback):
            heard = [name for name in dir(Callback) if name.startswith("on_")]
            at, problem = f"callbacks[{i}] {type(one).__name__}", "is not called at any event"
            for name in dir(one):
                if name.startswith("on_"):
                    require_known(name, heard, at, f"{name} {problem}", "Rename the method.")
        callbacks.append(one)
    return tuple(callbacks)


def make_callbacks(
    config: CallbacksConfig,
    folder: Path,
    known: Known,
    *,
    run_config: Json,
    process: int,
) -> dict[str, Callback]:
    """Makes the named callbacks of this process.

    Those that only write are made in the first process. No file is touched.

    Args:
        config: Which callbacks, and their options.
        folder: The run's output folder.
        known: The metrics that the run will measure.
        run_config: The resolved configuration of the run, for trackers.
        process: The number of this process.

    Raises:
        ConfigError: The run will not measure a metric, the profile starts after its end, or a
            package is not installed.
    """
    known.check(config)
    if config.profile is not None and config.profile.start > known.steps:
        problem = f"{config.profile.start}, but the run ends after {known.steps} steps"
        raise ConfigError(
            at=f"{_AT}.profile.start", problem=problem, fix=f"Give at most {known.steps}."
        )
    makers: dict[str, Callable[..., Callback]] = {
        "early_stopping": EarlyStopping,
        "best": lambda own: BestCheckpoints(own, folder, write=process == 0),
        "heartbeat": lambda own: Heartbeat(own, folder, process=process),
        "lm_eval": lambda own: LmEval(own, folder, known),
        "samples": lambda own: Samples(own, folder, known),
    }
    if process == 0:
        makers |= {
            "tensorboard": lambda own: TensorBoard(own, folder),
            "wandb": lambda own: Wandb(own, folder, run_config),
            "trackio": lambda own: Trackio(own, folder, run_config),
            "mlflow": lambda own: Mlflow(own, folder, run_config),
            "profile": lambda own: ProfilerWindow(own, folder),
        }
    given = fields_of(config)
    return {name: make(given[name]) for name, make in makers.items() if given[name] is not None}

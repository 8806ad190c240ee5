"""The callbacks that a run may have: options of each and their checks. This file imports no jax."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from easypipe.core.config import ListOf, check_at_least, check_number, config
from easypipe.core.errors import require

Mode = Literal["min", "max"]


@config
class EarlyStoppingConfig:
    """Stops the run if `metric` has not improved for `patience` of its values in succession.

    The last step is saved, and the run has ended: starting it again does nothing, unless
    `train.resume_changes: [ended]` lets it continue.
    """

    # a metric of held-out data (eval.held_out.loss), one of each logged step (loss), or one that
    # your own loss returns
    metric: str
    mode: Mode = "min"  # whether lower or higher is better
    # how many values of the metric, not steps, may come in succession without an improvement
    patience: int = 3
    min_delta: float = 0.0  # a difference of at most this does not count as an improvement

    def check(self) -> None:
        check_at_least(self, 1, "patience")
        check_number(self, "0.0 takes any gain.", "min_delta", zero=True)


@config
class BestConfig:
    """Keeps the checkpoints of the evaluations that are among the `keep` best so far.

    They are kept in addition to those that `checkpoint.keep` keeps. best.json in the output folder
    lists them, the best first.
    """

    metric: str  # a metric of held-out data, such as eval.held_out.loss
    mode: Mode = "min"  # whether lower or higher is better
    keep: int = 1  # how many checkpoints to keep

    def check(self) -> None:
        check_at_least(self, 1, "keep")


@config
class TensorBoardConfig:
    """Writes every number of metrics.jsonl as a scalar. Needs the extra [tensorboard].

    Scalars are named `train/loss`, `eval/held_out/loss` and so on.
    """

    # the folder of the event files; None means tensorboard/ in the output folder
    folder: str | None = None
    flush_s: int = 30  # values are on the disk after this many seconds

    def check(self) -> None:
        check_at_least(self, 1, "flush_s")


@config
class WandbConfig:
    """Sends every number of metrics.jsonl, and the resolved configuration, to Weights & Biases.

    Needs the extra [wandb].

    The API key is not part of this configuration: log in with `wandb login`, or set WANDB_API_KEY.
    It is neither logged nor saved.
    """

    project: str = "easypipe"  # the project of Weights & Biases that the run appears in
    entity: str | None = None  # the account or team; None takes the account's default
    name: str | None = None  # name of the run; None lets W&B choose one
    # `offline` keeps the run in wandb/ in the output folder, for `wandb sync`
    mode: Literal["online", "offline"] = "online"


@config
class TrackioConfig:
    """Sends every number of metrics.jsonl, and the resolved configuration, to trackio.

    The runs are in trackio's folder on this machine (TRACKIO_DIR), which `trackio show` displays.

    Needs the extra [trackio].
    """

    project: str = "easypipe"  # the project of trackio that the run appears in
    name: str | None = None  # name of the run; None lets trackio choose one


@config
class MlflowConfig:
    """Sends every number of metrics.jsonl, and the resolved configuration, to MLflow.

    A character that MLflow refuses in a name, such as + in a dataset's, is sent as _.

    Needs the extra [mlflow].
    """

    experiment: str = "easypipe"  # the experiment of MLflow that the run appears in
    name: str | None = None  # name of the run; None lets MLflow choose one
    # address of a server or database; None takes MLFLOW_TRACKING_URI, else mlflow.db in the output
    # folder
    tracking_uri: str | None = None

    def check(self) -> None:
        require(
            urlsplit(self.tracking_uri or "").password is None,
            "tracking_uri",
            "holds a password, and a run's configuration is saved with it",
            "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI.",
        )


@config
class ProfileConfig:
    """Traces host and devices from the dispatch of step `start` until `steps` steps have ended.

    The traces are in `profile/` in the output folder (one process of a run writes them);
    `tensorboard --logdir` shows them, with the plugin of the package xprof.
    """

    start: int = 10  # the first step that is traced; step 1 includes the compilation
    steps: int = 3  # how many steps are traced

    def check(self) -> None:
        check_at_least(self, 1, "start", "steps")


@config
class HeartbeatConfig:
    """Each process renews heartbeat-<process>.json in the output folder while it trains.

    The file has step, steps, status (running, ended, stopped by a signal, failed), time (UNIX
    seconds), host and pid. The training thread writes the file, so a run that hangs does not renew
    it.
    """

    every_s: float = 10.0  # the file is renewed at most once in this many seconds

    def check(self) -> None:
        check_number(self, "10.0 is usual; 0.0 writes at every step.", "every_s", zero=True)


@config
class LmEvalConfig:
    """The tasks of lm-eval, the Language Model Evaluation Harness, that score the model.

    As a callback it runs the tasks at every checkpoint, on one host, and writes a line with `step`
    and `results` to lm_eval.jsonl in the output folder. Needs the extra [eval].
    """

    tasks: ListOf[str]  # names of tasks that lm-eval knows
    include_path: str | None = None  # a folder with more tasks, as YAML files of lm-eval
    limit: int | None = None  # documents of each task; None takes all
    # examples before each question; None takes the task's own number
    num_fewshot: int | None = None
    chat: bool = False  # ask through the chat template
    batch_size: int = 16  # most rows that the model reads at once
    # tokens that the model sees; None takes the larger of max_position_embeddings in its
    # config.json and the longest row of the run, or 2048 if neither is known
    max_length: int | None = None

    def check(self) -> None:
        require(self.tasks, "tasks", "names no task", "Give names of tasks that lm-eval knows.")
        check_at_least(self, 1, "limit", "batch_size")
        check_at_least(self, 0, "num_fewshot")
        check_at_least(self, 2, "max_length")


@config
class SamplesConfig:
    """Texts that the model writes during training: continued `prompts`, and answers.

    Conversations are answered through the chat template of the run.

    Texts are generated every `every` steps and after the last one, on one host, and written to
    samples.jsonl in the output folder, which `easypipe report` shows.
    """

    prompts: ListOf[str] = ()  # beginnings of texts; an empty one begins as documents do
    # a file of conversations to answer, as JSON or JSON lines, as for `easypipe generate`
    messages: str | None = None
    every: int = 500  # steps between samples
    max_new_tokens: int = 64  # the most tokens of each text
    # 0 always takes the most probable token; 1 samples by the model's own probabilities
    temperature: float = 0.8
    seed: int = 0  # seed of the sampling, the same at every step

    def check(self) -> None:
        require(
            self.prompts or self.messages is not None,
            "prompts",
            "no prompts are given, and no file of messages",
            "Give texts to begin with, or messages: FILE.",
        )
        check_at_least(self, 1, "every", "max_new_tokens")
        check_number(self, "0.8 is usual; 0 takes the likeliest token.", "temperature", zero=True)


@config
class CallbacksConfig:
    """Callbacks by name; each one that is named, even as `{}`, is on.

    Others come from Python: `Trainer(..., callbacks=[...])`.
    """

    # end the run when a metric no longer improves
    early_stopping: EarlyStoppingConfig | None = None
    best: BestConfig | None = None  # keep the best checkpoints on held-out data
    tensorboard: TensorBoardConfig | None = None  # write event files for TensorBoard
    wandb: WandbConfig | None = None  # log to Weights & Biases
    trackio: TrackioConfig | None = None  # log to trackio
    mlflow: MlflowConfig | None = None  # log to MLflow
    profile: ProfileConfig | None = None  # trace a few steps
    heartbeat: HeartbeatConfig | None = None  # write a file that shows that the run is alive
    lm_eval: LmEvalConfig | None = None  # score tasks of lm-eval at every checkpoint
    samples: SamplesConfig | None = None  # generate texts every few steps

"""The Pipeline: a lazy chain, a method for each stage; `build()`, prepare, plan, write, repair.

pipeline = Pipeline.from_config(config)
loader = pipeline.source().tokenize().mix().pack().load().build()
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from easypipe.cache.location import cache_folder
from easypipe.cache.repair import place_of
from easypipe.cache.verify import Verification
from easypipe.cache.writer import CacheWriter
from easypipe.core.config import fields_of, from_dict, load_yaml
from easypipe.core.errors import ConfigError, StageOrderError, require
from easypipe.core.ledger import Ledger
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ProgressListener,
    Sources,
    Transform,
    silent,
)
from easypipe.core.random import draw_seed
from easypipe.core.values import Arguments, Settings
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.steps import Begin
from easypipe.save.config import SaveStageConfig
from easypipe.sources.external.objects import is_dataset_object, open_object
from easypipe.stages.build_record import Chain
from easypipe.stages.config import PipelineConfig, datasets_of, settings_of
from easypipe.stages.load.stage import DocumentsStage, LoadStage
from easypipe.stages.mix.config import MixStageConfig
from easypipe.stages.mix.stage import MixStage
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.pack.stage import PackStage
from easypipe.stages.prepare import prepare_sources, repair
from easypipe.stages.reports.ledger import ledger_of
from easypipe.stages.reports.plan_report import Asked, PlanReport, is_prepared, plan_report
from easypipe.stages.reports.shares import warning_of_weights
from easypipe.stages.save import SaveReport, SaveStage
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.source.stage import SourceStage
from easypipe.stages.source.transform import TransformStage
from easypipe.stages.streamable import no_plan, require_streamable
from easypipe.stages.tokenize.config import TokenizeStageConfig
from easypipe.stages.tokenize.documents import (
    TokenizedShardedSource,
    tokenized_of,
    warn_of_left_columns,
)
from easypipe.stages.tokenize.encoders import PromptRows
from easypipe.stages.tokenize.stage import TokenizeStage
from easypipe.transforms.tokenizer.config import TokenizerConfig

log = logging.getLogger("easypipe")
T = TypeVar("T")


class _Step(NamedTuple):
    """A stage of the chain, and the sources that it returned."""

    stage: BaseStage
    data: Sources


class Pipeline:
    """A chain of stages. A stage call opens files and checks configs; only `build()` moves rows.

    The chain is one tuple that stage calls replace; everything in it is frozen, so `copy()` is free
    and copies are independent.
    """

    __slots__ = ("__weakref__", "_context", "_plan", "_reminder")

    def __init__(
        self, config: PipelineConfig | Settings, *, progress: ProgressListener = silent
    ) -> None:
        """Begins a chain.

        Args:
            config: A PipelineConfig, or the same as a dict.
            progress: Called as the work goes on.

        Raises:
            ConfigError: The first problem of `config.validate()`; the others are its notes.
        """
        if not isinstance(config, PipelineConfig):
            config = from_dict(PipelineConfig, config)
        # a config without datasets is valid here: source() may be given some
        problems = [problem for problem in config.problems() if problem.at != "datasets"]
        if problems:
            for other in problems[1:]:
                problems[0].add_note(str(other))
            raise problems[0]
        config = config.named()
        if config.seed is None:
            seed = draw_seed()
            log.warning("seed: not given, drew %d; set seed=%d to repeat this run", seed, seed)
            config = dataclasses.replace(config, seed=seed)
        assert config.seed is not None
        folder = cache_folder(config.cache_dir, config.cache)
        self._context = PipelineContext(
            config=config,
            seed=config.seed,
            cache_dir=folder.local,
            progress=progress,
            cache=folder if folder.remote else None,
        )
        self._plan: tuple[_Step, ...] = ()
        self._reminder: weakref.finalize[[list[str]], Pipeline] | None = None

    @classmethod
    def from_config(
        cls,
        config: PipelineConfig | Settings | str | Path,
        *,
        progress: ProgressListener = silent,
    ) -> Self:
        """Makes a Pipeline.

        Args:
            config: A PipelineConfig, the same as a dict, or the path of a YAML file.
            progress: Called as the work goes on.

        Raises:
            ConfigError: The config is wrong; the message names the key.
        """
        if isinstance(config, str | Path):
            config = load_yaml(config)
        return cls(config, progress=progress)

    def copy(self) -> Self:
        """Returns a pipeline with the same chain; stages added to one do not change the other."""
        clone = object.__new__(type(self))
        clone._context, clone._plan, clone._reminder = self._context, self._plan, None
        return clone

    def source(self, data: Any = None) -> Self:
        """Opens the datasets of the config and those of `data`.

        Args:
            data: A DatasetConfig, or whatever `DatasetConfig.data_files` takes; or a dict of these
                by name. A single one is named by its position.

        Raises:
            StageOrderError: source() was already called.
        """
        if any(not _is_own(step.stage) for step in self._plan):
            raise StageOrderError(
                at="",
                problem="source() was called already",
                fix="Each pipeline starts with it once.",
            )
        if data is not None:
            self._context = dataclasses.replace(self._context, config=_with(self._config, data))
        return self._add(SourceStage())

    def transform(
        self,
        transform: Transform | Sequence[Transform],
        datasets: str | Sequence[str] | None = None,
    ) -> Self:
        """Changes columns and rows of text by easypipe.transforms, between source() and tokenize().

        Args:
            transform: One transform, or several in order.
            datasets: The datasets to change; None means all.

        Raises:
            StageOrderError: tokenize(), mix() or pack() was already called.
        """
        stage = TransformStage(transform, datasets)
        late = next(
            (
                step.stage.name
                for step in self._plan
                if isinstance(step.stage, TokenizeStage | MixStage | PackStage)
            ),
            None,
        )
        if late is not None:
            raise StageOrderError(
                at="",
                problem=f"transform() cannot follow {late}()",
                fix="Call it between source() and tokenize().",
            )
        return self._add(stage)

    def tokenize(self, config: TokenizeStageConfig | Settings | None = None) -> Self:
        """Tokenizes text with the tokenizer of the dataset, else of the stage or the pipeline."""
        chosen = self._choose(config, TokenizeStageConfig, "tokenize")
        if chosen.default_tokenizer is not None:  # also of rows that are tokens already
            self._context = dataclasses.replace(
                self._context, config=dataclasses.replace(self._config, tokenize=chosen)
            )
        return self._add(TokenizeStage(chosen))

    def mix(self, config: MixStageConfig | Settings | None = None) -> Self:
        """Mixes all datasets into one, named "mixed"."""
        chosen = self._choose(config, MixStageConfig, "mix")
        if self._plan:
            chosen.check_names(list(self._plan[-1].data))
        return self._add(MixStage(chosen))

    def pack(self, config: PackStageConfig | Settings | None = None) -> Self:
        """Packs documents into rows of `seq_length` tokens."""
        chosen = self._choose(config, PackStageConfig, "pack")
        self._cut_for(chosen)
        return self._add(PackStage(chosen))

    def save(self, config: SaveStageConfig | Settings | None = None) -> Self:
        """Writes the data at this point of the chain when the pipeline is built."""
        stage = SaveStage(self._choose(config, SaveStageConfig, "save"))
        self._add(stage)
        if stage.config.enabled and self._reminder is None:
            self._reminder = weakref.finalize(self, _never_built, list(self._plan[-1].data))
        return self

    def load(self, config: LoadStageConfig | Settings | None = None) -> Self:
        """Ends the chain with a loader of batches."""
        return self._add(LoadStage(self._choose(config, LoadStageConfig, "load")))

    def add_stage(self, stage: BaseStage) -> Self:
        """Adds a user's stage.

        The first stage of a chain is given {} and returns its own sources.

        Raises:
            ConfigError: `stage` is not a BaseStage.
        """
        if not isinstance(stage, BaseStage):
            raise ConfigError(
                at="add_stage",
                problem=f"{stage!r} is not a BaseStage",
                fix="Subclass easypipe.core.protocols.BaseStage.",
            )
        return self._add(stage)

    def get_data(self) -> Sources:
        """Returns the chain's current sources by name; {} before `source()`."""
        return dict(self._plan[-1].data) if self._plan else {}

    def get_context(self) -> PipelineContext:
        return self._context

    @property
    def _config(self) -> PipelineConfig:
        return settings_of(self._context)

    def get_stages(self) -> list[str]:
        return [step.stage.name for step in self._plan]

    def build(self) -> Any:
        """Writes every `save()` of the chain and opens its `load()`.

        Returns:
            The Loader if there is a `load()`, else the SaveReport.

        Raises:
            StageOrderError: There is neither `save()` nor `load()`, or several datasets are not
                mixed before `load()`.
        """
        saves = [step for step in self._plan if isinstance(step.stage, SaveStage)]
        last = self._last_step()
        loads = isinstance(last.stage, LoadStage)
        if not saves and not loads:
            raise StageOrderError(
                at="",
                problem="there is nothing to build",
                fix="Call load() for batches or save() for files before build().",
            )
        if loads:
            self._only(last)
        report = self.write() if saves else None
        return self.loader() if loads else report

    @property
    def stages(self) -> tuple[BaseStage, ...]:
        """The chain's stages, in order."""
        return tuple(step.stage for step in self._plan)

    def pending(self) -> dict[str, tuple[int, int]]:
        """Returns how much of every tokenize() dataset is not tokenized yet.

        It reads no text.

        Returns:
            For each dataset, (ranges of rows that are not tokenized yet, all ranges).

        Raises:
            ConfigError: The config streams.
        """
        self._require_cache()
        waiting = {name: source.writer.missing() for name, source in self.tokenized().items()}
        return {name: (len(missing), total) for name, (missing, total) in waiting.items()}

    def prepared(self) -> bool:
        """Returns whether every token cache of the chain is complete, or the chain needs none.

        Saved rows and streaming need none. It reads no text.
        """
        last = self._last_step()
        return self._config.streaming or all(map(is_prepared, last.data.values()))

    def prepare(self) -> None:
        """Tokenizes what is not tokenized yet and plans what the chain describes.

        Building the chain is then immediate. Only the token caches and the plan are written; what
        already exists is reused.

        Raises:
            ConfigError: The config streams, which stores neither.
        """
        last = self._last_step()
        self._require_cache()
        self._spread()
        epochs = last.stage.config.num_epochs if isinstance(last.stage, LoadStage) else 1
        prepare_sources(last.data, self._context, epochs)

    def prepare_part(self, number: int, count: int) -> int:
        """Tokenizes part `number` (from 0) of `count` and nothing else.

        This is for jobs on machines that share cache_dir. A later build of the pipeline uses the
        finished parts, and tokenizes the rest.

        Returns:
            The number of rows of the part.

        Raises:
            ConfigError: There is no such part, or the config streams.
        """
        require(
            0 <= number < count,
            "number",
            f"there is no part {number} of {count}",
            f"Parts count from 0 to {count - 1}.",
        )
        self._require_cache()
        self._build_is_under_way()
        rows = 0
        for source in self.tokenized().values():
            missing, _ = source.writer.missing()
            rows += source.writer.fill_part([i for i in missing if i % count == number])
        return rows

    def tokenized(self) -> dict[str, TokenizedShardedSource]:
        """Returns the sources that the last tokenize() tokenizes, by dataset."""
        self._last_step()
        data = next(
            (step.data for step in reversed(self._plan) if isinstance(step.stage, TokenizeStage)),
            {},
        )
        found = {name: tokenized_of(source) for name, source in data.items()}
        return {name: source for name, source in found.items() if source is not None}

    def _chain(self, last: BaseStage) -> tuple[BaseStage, ...]:
        """Returns the stages up to `last`, without source(), which the config describes."""
        return tuple(
            stage
            for stage in self.stages[: self.stages.index(last) + 1]
            if not isinstance(stage, SourceStage)
        )

    def _build_is_under_way(self) -> None:
        if self._reminder is not None:
            self._reminder.detach()
            self._reminder = None

    def _spread(self) -> None:
        """Tokenizes on other machines if the config says so."""
        sources = {
            name: source.writer
            for name, source in self.tokenized().items()
            if not source.writer.folder.temporary
        }
        if self._config.executor == "local" or not sources:
            return
        from easypipe.executors.ray import prepare_on_ray

        remade = _Remade.of(self._context, [step.stage for step in self._plan])
        prepare_on_ray(
            sources, remade, cpus_per_task=remade.workers, progress=self._context.progress
        )

    def loader(self) -> Loader:
        """Returns the loader that `build()` returns, but saves nothing.

        Raises:
            StageOrderError: load() was not called, or several datasets are not mixed.
        """
        last = self._last_step()
        self._spread()
        if not isinstance(last.stage, LoadStage):
            raise StageOrderError(at="", problem="Call load() before loader()")
        [(name, source)] = self._only(last).items()
        return last.stage.open(name, source, self._context)

    def as_grain(self) -> Any:
        """Returns a `grain.MapDataset` of the chain's rows, or after `load()` of its batches.

        They are NumPy arrays in the plan's order, read by index. It needs the extra `[grain]`.

        Raises:
            ConfigError: The data never ends; `interop.grain.LoaderDataset` can iterate over it. Or
                weights follow the training step, and its number of rows is unknown.
        """
        from easypipe.interop.grain import BatchesByNumber, RowsByNumber, map_dataset

        last = self._last_step()
        if isinstance(last.stage, LoadStage):
            return map_dataset(BatchesByNumber(self.loader()))
        self._spread()
        [(name, source)] = self._only(last).items()
        # not load(), whose batch_size would be the rows of a training step
        stage = LoadStage(LoadStageConfig(batch_size=1))
        return map_dataset(RowsByNumber(stage.open(name, source, self._context)))

    def write(self) -> SaveReport:
        """Prepares all data and writes every `save()`, without a loader.

        The report's ledger covers the whole chain.

        Raises:
            ConfigError: Two datasets, or two save() stages, write into one folder.
        """
        last = self._last_step()
        saves = [
            (step.stage, step.data) for step in self._plan if isinstance(step.stage, SaveStage)
        ]
        places: set[str] = set()
        for target in (one for stage, data in saves for one in stage.targets(data, self._context)):
            place = place_of(target.folder)
            require(
                place not in places,
                f"save.output_dir={target.folder}",
                f"dataset {target.dataset!r} would replace what this pipeline saves there before",
                "Give every dataset and every save() a folder of its own.",
            )
            places.add(place)
        self._spread()
        self._build_is_under_way()
        folders, pushed = [], []
        for stage, data in saves:
            written = stage.write(data, self._context)
            folders += written
            chain = Chain(self._chain(stage), self._context)
            for folder in written:
                chain.remember(folder.manifest.fingerprint)
            if (publication := stage.publication(written)) is not None:
                from easypipe.interop.hub import push

                options = stage.config
                pushed.append(
                    push(
                        publication,
                        str(options.hub_repo_id),
                        private=options.hub_private,
                        token=options.hub_token,
                        revision=options.hub_revision,
                        progress=self._context.progress,
                    )
                )
        # in streaming the loader keeps the ledger, while it reads
        ledger = Ledger() if self._config.streaming else self.ledger()
        for folder in folders:
            folder.enter(ledger)
        ledger.check()
        if not self._config.streaming:
            for source in last.data.values():
                if (said := warning_of_weights(source)) is not None:
                    log.warning("mix.weights: %s", said)
        return SaveReport(folders=tuple(folders), ledger=ledger, pushed=tuple(pushed))

    def plan(
        self,
        steps: int | None = None,
        *,
        prepare: bool = True,
        by_step: bool = False,
        begin: tuple[int, int] = (0, 0),
    ) -> PlanReport:
        """Returns what a run over this chain would do: steps, shares, epochs, fill, drops, disk.

        It is computed from lengths and reads no tokens. Batches are those of `load()`, or of the
        config's `load` if the chain has no load() yet.

        Args:
            steps: The steps of the run; None: as many as the data has.
            prepare: Whether to tokenize what is not tokenized yet (`report.prepared` names it);
                False raises CacheError instead.
            by_step: Whether to report also what each part of the run draws from each dataset.
            begin: The step and the row at which a run continues with this chain; earlier steps are
                not counted.

        Raises:
            CacheError: Something is not tokenized, and `prepare` is False.
            StageOrderError: Several datasets are not mixed.
        """
        last, context = self._last_step(), self._context
        [(name, source)] = self._only(last).items()
        load = (
            last.stage.config
            if isinstance(last.stage, LoadStage)
            else self._config.load or LoadStageConfig()
        )
        saves = any(isinstance(step.stage, SaveStage) for step in self._plan) or (
            self._config.save is not None and self._config.save.enabled
        )
        asked = Asked(steps, prepare, saves, by_step, Begin(*begin))
        return plan_report(name, source, load, context, asked)

    def repair(self, path: str | Path) -> tuple[Verification, ...]:
        """Rebuilds the broken files of a token cache or saved folder that this chain made.

        Returns:
            What verification finds afterwards.
        """
        self._build_is_under_way()
        return repair(path, [(step.stage, step.data) for step in self._plan], self._context)

    def ledger(self) -> Ledger:
        """Returns where every row and token went, up to the last stage.

        It prepares what is not prepared yet.

        Raises:
            LedgerError: The counts do not balance.
            ConfigError: The config streams.
        """
        last, ledger = self._last_step(), Ledger()
        self._require_cache()
        for name, source in last.data.items():
            ledger.extend(ledger_of(name, source))
        return ledger

    @staticmethod
    def _only(step: _Step) -> Sources:
        if len(step.data) != 1:
            names = ", ".join(repr(name) for name in step.data)
            raise StageOrderError(
                at="",
                problem=f"build() cannot load {len(step.data)} unmixed datasets: {names}",
                fix="Call mix() first.",
            )
        return step.data

    def _add(self, stage: BaseStage) -> Self:
        """Runs a stage on the data of the chain, and adds it.

        Raises:
            StageOrderError: source() was not called before, or load() was already called.
        """
        if not isinstance(stage, SourceStage) and not _is_own(stage):
            self._last_step()
        if self._plan and isinstance(self._plan[-1].stage, LoadStage):
            raise StageOrderError(
                at="",
                problem=f"{stage.name}() cannot follow load()",
                fix="load() ends the chain; call it last.",
            )
        before = self.get_data()
        if isinstance(stage, MixStage | PackStage | LoadStage):
            warn_of_left_columns(stage.name, before)
        made = stage.process(before, self._context)
        self._plan = (
            *self._plan,
            _Step(stage, self._sources(stage, made) if _is_own(stage) else made),
        )
        if isinstance(stage, TokenizeStage):
            chain = Chain(self._chain(stage), self._context)
            datasets = datasets_of(self._context)
            for name, source in self.tokenized().items():
                source.writer.when_made = functools.partial(
                    chain.remember, folder=source.writer.folder, dataset=datasets.get(name)
                )
        return self

    def _cut_for(self, pack: PackStageConfig) -> None:
        """Makes tokenize() cut conversations for the rows of `pack`, if it cuts for other rows.

        Stages move no rows, so those after tokenize() are added again; a user's stage is not run
        twice.
        """
        at = max(
            (i for i, step in enumerate(self._plan) if isinstance(step.stage, TokenizeStage)),
            default=len(self._plan),
        )
        steps = self._plan[at:]
        room = pack.seq_length if pack.holds else None
        forms = [source.form for source in self.tokenized().values()] if steps else []
        told = all(
            form.room == room for form in forms if isinstance(form, PromptRows) and form.splits
        )
        if told or any(_is_own(step.stage) for step in steps):
            return
        self._context = dataclasses.replace(
            self._context, config=dataclasses.replace(self._config, pack=pack)
        )
        self._plan = self._plan[:at]
        for step in steps:
            self._add(step.stage)

    def _sources(self, stage: BaseStage, made: Any) -> Sources:
        """Returns what a user's stage returned, each source in a form that every stage can read.

        Raises:
            ConfigError: The stage did not return a dict of sources.
            StageOrderError: It is the first stage and returned no source.
        """
        require(
            isinstance(made, Mapping),
            "add_stage",
            f"process() of {stage.name!r} returned {type(made).__name__}, not a dict of sources",
            "Return {name: source}.",
        )
        if not made:
            problem = f"stage {stage.name!r} is the first, but returns no source"
            raise StageOrderError(
                at="", problem=problem, fix="Call source() before it, or return {name: source}."
            )
        context = self._context
        options: Arguments = {
            "counted": not context.config.streaming,
            "folder": context.cache_dir / "indexes",
        }
        for name, source in made.items():
            # A source may have many rows, so its text is made only for the error.
            if not is_dataset_object(source):
                problem = f"stage {stage.name!r} gave {source!r:.80} for {name!r}"
                raise ConfigError(at="add_stage", problem=problem, fix="Return {name: source}.")
        return {name: open_object(source, name=name, **options) for name, source in made.items()}

    def _last_step(self) -> _Step:
        """Returns the last step of the chain.

        Raises:
            StageOrderError: The chain is empty.
        """
        if not self._plan:
            raise StageOrderError(at="", problem="Call source() before other pipeline stages")
        return self._plan[-1]

    def _require_cache(self) -> None:
        if self._config.streaming:
            raise no_plan()

    def _choose(self, given: Any, kind: type[T], at: str) -> T:
        own = fields_of(self._config)[at]
        if given is None:
            given = own if own is not None else {}
        if isinstance(given, Mapping):
            given = from_dict(kind, given, at)
        require(
            isinstance(given, kind), at, f"expected {kind.__name__}, got {type(given).__name__}"
        )
        if self._config.streaming:
            require_streamable(at, given)
        return given


@dataclasses.dataclass(frozen=True)
class _Remade:
    """A pipeline up to tokenize(), made again in another process.

    Its description is pickled, not its open files.
    """

    config: PipelineConfig
    stages: tuple[BaseStage, ...]
    workers: int

    @classmethod
    def of(cls, context: PipelineContext, stages: Sequence[BaseStage]) -> _Remade:
        last = max(i for i, stage in enumerate(stages) if isinstance(stage, TokenizeStage))
        options: TokenizeStageConfig = stages[last].config
        workers = options.num_workers or 1
        tokenize = TokenizeStage(dataclasses.replace(options, num_workers=workers))
        folder = context.cache_dir if context.cache is None else context.cache.url
        config = dataclasses.replace(settings_of(context), cache_dir=folder, executor="local")
        return cls(config, (*stages[:last], tokenize), workers)

    def __call__(self) -> dict[str, CacheWriter[Any]]:
        pipeline = Pipeline(self.config)
        for stage in self.stages:
            pipeline.add_stage(stage)
        return {name: source.writer for name, source in pipeline.tokenized().items()}


HOUSE = (
    SourceStage, TransformStage, TokenizeStage, MixStage, PackStage, SaveStage, DocumentsStage,
    LoadStage,
)  # fmt: skip


def _is_own(stage: BaseStage) -> bool:
    """Returns whether a stage is a user's."""
    return not isinstance(stage, HOUSE)


def _with(config: PipelineConfig, data: Any) -> PipelineConfig:
    """Returns the config with the datasets that source() is given.

    Raises:
        ConfigError: A name is already used, or a dataset is wrong.
    """
    given = (
        data
        if isinstance(data, Mapping)
        else {
            (data.name if isinstance(data, DatasetConfig) else None)
            or f"dataset{len(config.datasets) + 1}": data
        }
    )
    made = [
        dataclasses.replace(one, name=name)
        if isinstance(one, DatasetConfig)
        else DatasetConfig(name=name, data_files=one)
        for name, one in given.items()
    ]
    config = dataclasses.replace(config, datasets=(*config.datasets, *made))
    for problem in config.problems():
        raise problem
    return config


def create_pipeline(
    datasets: Sequence[DatasetConfig | Settings],
    default_tokenizer: TokenizerConfig | str | None = None,
    *,
    progress: ProgressListener = silent,
    **options: Any,
) -> Pipeline:
    """Returns a Pipeline over `datasets`; `options` are the other fields of PipelineConfig.

    Raises:
        ConfigError: An option is wrong, or `datasets` are no list; the message names the key.
    """
    require(
        not isinstance(datasets, str | Path | Mapping | DatasetConfig | PipelineConfig),
        "datasets",
        f"wants a list of datasets, got {type(datasets).__name__}",
        "Give [DatasetConfig(...)]; Pipeline.from_config takes a whole config or its path.",
    )
    values = {"datasets": list(datasets), "default_tokenizer": default_tokenizer, **options}
    return Pipeline(from_dict(PipelineConfig, values), progress=progress)


def _never_built(names: list[str]) -> None:
    log.warning(
        "save() was called on %s, but build() never was: nothing was written", ", ".join(names)
    )

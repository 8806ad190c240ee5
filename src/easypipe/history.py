"""The history of a run whose data was changed: its spans of steps, the loader and plan of each.

span  the steps of a run that read the data of one config; a run that was never changed is one span
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from easypipe.core.config import allowing_code, from_dict, load_yaml, require_harmless
from easypipe.core.errors import EasypipeError, StateError
from easypipe.core.protocols import ProgressListener, silent
from easypipe.core.values import Settings
from easypipe.jobs import chain
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from easypipe.loader.state import COMPONENTS, LoaderState
from easypipe.loader.steps import Begin
from easypipe.pipeline import Pipeline
from easypipe.stages.config import PipelineConfig
from easypipe.stages.reports.plan_report import PlanReport, joined
from easypipe.train.record import FINGERPRINTS, RECORD, read_changes, read_kept

log = logging.getLogger("easypipe")

# Changed keys with this prefix decide which rows are in a batch.
OF_DATA = "loader."


@dataclass(frozen=True)
class Span:
    """Steps `first` to `stop` of a run; their rows are counted from `row`.

    Args:
        first: The first step, counted from 0.
        stop: The step after the last; None up to the end of the run.
        row: The first row of the first step.
        config: The config of the whole run; None if the folder has none.
        components: Digests of its data; None if the folder has none.
        changed: The changes that were allowed, from `first` on.
    """

    first: int
    stop: int | None
    row: int
    config: Settings | None
    components: Mapping[str, str] | None
    changed: Mapping[str, str]

    @property
    def steps(self) -> str:
        """The steps as text, counted as in metrics.jsonl."""
        return (
            f"from step {self.first + 1:,}"
            if self.stop is None
            else f"steps {self.first + 1:,} to {self.stop:,}"
        )

    def built(self, progress: ProgressListener = silent) -> Pipeline:
        """Returns the chain of the span's data, up to load().

        Raises:
            StateError: The data was not recorded, or has changed since it was read.
        """
        if self.config is None or self.components is None:
            problem = f"does not record what data was read in {self.steps}"
            raise StateError(
                at=RECORD, problem=problem, fix="Only a run that records its changes can tell."
            )
        require_harmless(self.config["data"], "data")
        data = from_dict(PipelineConfig, self.config["data"], "data")
        pipeline = chain(data, save=False, progress=progress).load(host_load(data))
        apart = self.differs(_components(pipeline))
        if apart:
            problem = (
                f"{self.steps} read other data than there is now: {' and '.join(apart)} "
                "changed since"
            )
            raise StateError(
                at=RECORD, problem=problem, fix="Bring back the files that the run read."
            )
        log.info("%s: the data of the configuration that the run recorded for them", self.steps)
        return pipeline

    def differs(self, components: Mapping[str, str]) -> list[str]:
        return [
            name for name in COMPONENTS if (self.components or {}).get(name) != components.get(name)
        ]


def host_load(data: PipelineConfig) -> LoadStageConfig:
    """Returns the config of batches without the options that only decide where they are placed."""
    return dataclasses.replace(
        data.load or LoadStageConfig(), mesh=None, partition_spec=None, prefetch_to_device=False
    )


def spans_of(folder: str | Path) -> tuple[Span, ...]:
    """Returns the spans of the run in `folder`, in order.

    It is () if the folder records no data that can be planned.

    Raises:
        StateError: The folder holds files that are not easypipe's.
    """
    folder = Path(os.path.expanduser(folder))
    kept, record = read_kept(folder / FINGERPRINTS), folder / RECORD
    if not kept or not kept.get("train") or not record.exists():
        return ()
    changes = [
        one
        for one in read_changes(folder)
        if any(key.startswith(OF_DATA) for key in one["changed"])
    ]
    befores = [one["before"] or {} for one in changes]
    with allowing_code():  # the record may name functions; reading them runs none
        configs = [*(before.get("config") for before in befores), load_yaml(record)]
    components = [*(before.get("components") for before in befores), kept["train"]]
    begins = [(0, 0, {}), *((one["step"], one["row"], one["changed"]) for one in changes)]
    stops = [*(one["step"] for one in changes), None]
    return tuple(
        Span(first, stop, row, config if config and "data" in config else None, digests, changed)
        for (first, row, changed), stop, config, digests in zip(
            begins, stops, configs, components, strict=True
        )
    )


def loader_at(
    folder: str | Path | None,
    pipeline: Callable[[], Pipeline],
    step: int,
    progress: ProgressListener = silent,
) -> Loader:
    """Returns the loader that made batch `step` of the run in `folder`, with its counting of rows.

    Args:
        folder: The folder of the run. Without a run the loader is that of `pipeline`.
        pipeline: Returns the chain of the current config, up to load().
        step: The step, counted from 0.
        progress: Called as the work goes on.

    Raises:
        StateError: The data of `pipeline` is not that of any span of the run, or the data of that
            step is unknown or no longer there.
    """
    spans = () if folder is None else spans_of(folder)
    own = pipeline()
    if not spans:
        return own.loader()
    here = _components(own)
    if all(span.differs(here) for span in spans):
        apart = " and ".join(spans[-1].differs(here))
        problem = f"the run in it read other data than this config describes: {apart} differ"
        fix = f"Give its {RECORD}; if the files that it read have changed since, bring them back."
        raise StateError(at=str(folder), problem=problem, fix=fix)
    span = next(span for span in spans if span.stop is None or step < span.stop)
    try:
        loader = (own if not span.differs(here) else span.built(progress)).loader()
    except StateError as error:
        error.at = str(folder)
        raise
    if span.first:
        state = loader.state()
        change = {"batch": span.first, "row": span.row}
        loader.restore(
            dataclasses.replace(state, batch=span.first, row=span.row, hint=None, changes=(change,))
        )
    return loader


def plan_of_run(
    folder: str | Path | None,
    pipeline: Pipeline,
    steps: int | None,
    *,
    prepare: bool = True,
    by_step: bool = False,
    progress: ProgressListener = silent,
) -> PlanReport:
    """Plans the run in `folder`, each span with its own data, as `Pipeline.plan` does.

    The report's notes say what is not known. `pipeline` is the chain of the current config, with
    load(). If its data is not that of any span, it is planned as a new run; so is a run that was
    never changed.

    Raises:
        StateError: None of the spans can be planned.
    """
    spans = () if folder is None else spans_of(folder)
    if len(spans) < 2 or (not prepare and not pipeline.prepared()):
        return pipeline.plan(steps, prepare=prepare, by_step=by_step)
    here = _components(pipeline)
    if all(span.differs(here) for span in spans):
        report = pipeline.plan(steps, prepare=prepare, by_step=by_step)
        note = (
            f"{folder} holds a run that used different data "
            f"({' and '.join(spans[-1].differs(here))} differ): this is the plan of a new run"
        )
        return dataclasses.replace(report, notes=(note, *report.notes))
    reports: list[tuple[Span, PlanReport]] = []
    notes: list[str] = []
    for span in spans:
        if steps is not None and span.first >= steps:
            break
        stop = steps if span.stop is None else span.stop if steps is None else min(steps, span.stop)
        if span.changed:
            what = (
                f"{key} {text}"
                for key, text in span.changed.items()
                if (part := key.removeprefix(OF_DATA)) not in COMPONENTS
                # a key of the config that says the same is left to that key
                and (part == key or f"data.load.{part}" not in span.changed)
            )
            notes.append(f"changed {span.steps}: {'; '.join(what) or ', '.join(span.changed)}")
        try:
            own = pipeline if not span.differs(here) else span.built(progress)
            begin = Begin(span.first, span.row)
            planned = own.plan(stop, prepare=prepare, by_step=by_step, begin=begin)
            reports.append((span, planned))
        except EasypipeError as error:
            notes.append(f"{span.steps} are not counted: {error}")
    if not reports:
        raise StateError(
            at=str(folder), problem="; ".join(notes), fix="Bring back the files that the run read."
        )
    return joined([report for _, report in reports], [span.steps for span, _ in reports], notes)


def _components(pipeline: Pipeline) -> Mapping[str, str]:
    state: LoaderState = pipeline.loader().state()
    return state.components

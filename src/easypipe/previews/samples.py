"""`preview`: makes the first samples of a config: what is trained on, cut, or left out.

The pipeline itself makes them from the first rows of each dataset, and `Loader.explain` explains
them. Nothing is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from easypipe.core.aligned import DESIRABLE
from easypipe.core.config import from_dict, load_yaml
from easypipe.core.errors import require
from easypipe.core.protocols import ProgressListener, silent
from easypipe.core.values import Arguments, Json, Settings
from easypipe.jobs import chain, with_hold_outs, with_tokenizer_of
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.explain import Segment, Span
from easypipe.pipeline import Pipeline
from easypipe.previews.preview import Piece, Preview, Sample, SampleSegment
from easypipe.stages.config import PipelineConfig, settings_of
from easypipe.stages.load.stage import LoadStage
from easypipe.stages.mix.mixture import planned_of
from easypipe.stages.reports.ledger import ledger_of
from easypipe.stages.save import SaveStage
from easypipe.stages.source.stage import SourceStage
from easypipe.stages.tokenize.documents import TokenizedShardedSource, prompts_of, trained_turns
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.transforms.chat.columns import plain_of
from easypipe.transforms.prompt.formats import ChatFormat

FIRST_ROWS = 200  # samples are made from this many rows of each dataset
KEPT = ("written", "stored", "targets", "masked", "with")  # outcomes that lose nothing


def preview(
    config: Pipeline | PipelineConfig | Settings | str | Path,
    n: int = 5,
    *,
    first_rows: int = FIRST_ROWS,
    progress: ProgressListener = silent,
) -> Preview:
    """Returns the first `n` samples of a config, or of a Pipeline with its own stages.

    Only the beginning of each dataset is read, and nothing is kept. The samples show what rows look
    like, not which come first in training.

    Args:
        config: A PipelineConfig, a dict, or a YAML file, also that of a run.
        n: The number of samples.
        first_rows: This many rows of each dataset are read, tokenized, mixed and packed as the
            config says.
        progress: Called as the work goes on.

    Raises:
        ConfigError: `n` or `first_rows` is not valid. The pipeline may raise other errors.
    """
    require(
        n >= 1 and first_rows >= 1,
        "n" if n < 1 else "first_rows",
        f"{min(n, first_rows)} is too few",
        "Give at least 1.",
    )
    with tempfile.TemporaryDirectory(prefix="easypipe-preview-") as folder:
        if isinstance(config, Pipeline):
            pipeline = Pipeline(
                looked_at(settings_of(config.get_context()), folder), progress=progress
            )
            for stage in config.stages:
                if not isinstance(stage, SaveStage | LoadStage):
                    pipeline.add_stage(
                        SourceStage(first_rows=first_rows)
                        if isinstance(stage, SourceStage)
                        else stage
                    )
        else:
            pipeline = chain(
                looked_at(_read(config), folder),
                progress=progress,
                save=False,
                first_rows=first_rows,
            )
        return _preview(pipeline, n, first_rows)


def _preview(pipeline: Pipeline, n: int, first_rows: int) -> Preview:
    """Returns the first `n` samples of a pipeline, with notes on what happened to other rows."""
    planned = [planned_of(source) for source in pipeline.get_data().values()]
    step = next((one.mixture.batch_size for one in planned if one is not None), None) or n
    loader = pipeline.copy().load(LoadStageConfig(batch_size=step, drop_last=False)).loader()
    steps = [loader.explain(0)]
    while sum(len(one.rows) for one in steps) < n and loader.rows_of(len(steps)):
        steps.append(loader.explain(len(steps)))
    tokenized = pipeline.tokenized()
    only = next(iter(tokenized), "") if len(tokenized) == 1 else ""
    samples = [
        Sample(
            row=row,
            segments=tuple(
                _segment(one, row.segments, tokenized.get(one.dataset or only))
                for one in row.segments
            ),
        )
        for row in [row for one in steps for row in one.rows][:n]
    ]
    notes = [f"made of the first {first_rows:,} rows of each dataset, at most"]
    notes += dict.fromkeys(note for one in steps for note in one.notes)
    for name, source in tokenized.items():
        notes += [*_what_became(name, source), *_verdicts(name, source)]
        trained_turns(source)  # warns if nothing ends a turn
    return Preview(samples=tuple(samples), notes=tuple(notes))


def _read(config: PipelineConfig | Settings | str | Path) -> PipelineConfig:
    if isinstance(config, PipelineConfig):
        return config
    values = load_yaml(config) if isinstance(config, str | Path) else config
    if "data" not in values:
        return from_dict(PipelineConfig, values)
    values = with_hold_outs(values)
    data, model = from_dict(PipelineConfig, values["data"], "data"), values.get("model")
    if isinstance(model, Mapping) and "pretrained" in model:
        return with_tokenizer_of(data, from_dict(PretrainedConfig, model, "model"))
    return data


def looked_at(config: PipelineConfig, folder: str | Path) -> PipelineConfig:
    """Returns a config of the same data that writes only into the local `folder`."""
    datasets = tuple(
        dataclasses.replace(dataset, cache_path=None, cache_enabled=True)
        for dataset in config.datasets
    )
    changes: Arguments = {
        "datasets": datasets,
        "seed": 0 if config.seed is None else config.seed,
        "cache_dir": str(folder),
        "cache": None,
        "streaming": False,
        "num_streams": None,
        "executor": "local",
        "save": None,
        "load": None,
    }
    return dataclasses.replace(config, **changes)


def _cut(source: TokenizedShardedSource, shard: int, segment: Segment) -> list[str]:
    """Returns what max_length left out of a document, in words."""
    options, left = source.tokenizer.config, segment.document_tokens
    if options.max_length is None or not options.truncation or left is None:
        return []
    for text in source.form.read(source.source, shard, segment.row, segment.row + 1).texts:
        [(ids, _, _)] = source.tokenizer.encode_with_characters([text.as_py()])
        if len(ids) > left:
            return [
                f"the row has {len(ids)} tokens, and max_length {options.max_length} leaves {left} "
                "of them in this document"
            ]
    return []


def _turns(source: TokenizedShardedSource, shard: int, row: int) -> list[tuple[str, str]]:
    """Returns (role, text) of the row that a document was made from, in order.

    It is empty if the row names no speakers.
    """
    batch, prompts = source.source.read(shard, row, row + 1), prompts_of(source)
    format = None if prompts is None else prompts.engine.format
    columns = [name for name in source.form.columns if name in batch.schema.names]
    if not batch.num_rows:
        return []
    for name in columns:
        [value] = plain_of(batch.column(name), objects=True)
        if isinstance(format, ChatFormat) and (found := _said(format.messages_of(value))):
            return found
    texts = {name: batch.column(name)[0].as_py() for name in columns if len(columns) > 1}
    return [(name, text) for name, text in texts.items() if isinstance(text, str)]


def _said(talk: Json) -> list[tuple[str, str]]:
    """Returns (role, text) of each message; [] if these are no messages."""
    found: list[tuple[str, str]] = []
    for message in talk if isinstance(talk, list) else []:
        if isinstance(message, Mapping):
            content = message.get("content")
            if not isinstance(content, str):
                parts = content if isinstance(content, list) else []
                content = "".join(str(p.get("text", "")) for p in parts if isinstance(p, Mapping))
            found.append((str(message.get("role")), content))
    return found


def _segment(
    segment: Segment, beside: Sequence[Segment], source: TokenizedShardedSource | None
) -> SampleSegment:
    """Returns a segment with its text, speakers and cuts.

    Args:
        segment: The segment.
        beside: The segments of its row; the other answer of a pair is the rest of its document.
        source: The source that its dataset was made from.
    """
    turns, cuts = [], []
    for shard, one in enumerate([] if source is None else source.source.shards):
        if source is not None and one.name == segment.file:
            turns, cuts = _turns(source, shard, segment.row), _cut(source, shard, segment)
    start, stop, total = segment.token_start, segment.token_stop, segment.document_tokens
    if total is not None:
        own = (segment.dataset, segment.document)
        rest = [other for other in beside if (other.dataset, other.document) == own]
        if start and all(other.token_stop != start for other in rest):
            cuts.append(f"tokens 0:{start} of the document come before")
        if stop < total and all(other.token_start != stop for other in rest):
            cuts.append(f"tokens {stop}:{total} of the document are not here")
    return SampleSegment(
        segment=segment,
        pieces=None if segment.spans is None else tuple(_pieces(segment.spans, turns)),
        roles=tuple(role for role, _ in turns),
        cuts=tuple(cuts),
    )


def _pieces(spans: Sequence[Span], turns: Sequence[tuple[str, str]]) -> Iterator[Piece]:
    """Yields the spans, cut where a speaker begins.

    If the template changed the text of a turn, the turn is not found and makes no cut.
    """
    whole = "".join(span.text for span in spans)
    begins: dict[int, str] = {}
    at = 0
    for role, text in turns:
        found = whole.find(text.strip(), at) if text.strip() else -1
        if found >= 0:
            begins[found] = role
            at = found + len(text.strip())
    start = 0
    for span in spans:
        stop = start + len(span.text)
        edges = [start, *(place for place in sorted(begins) if start < place < stop), stop]
        for a, b in itertools.pairwise(edges):
            yield Piece(text=whole[a:b], masked=span.masked, role=begins.get(a))
        start = stop


def _what_became(name: str, source: TokenizedShardedSource) -> Iterator[str]:
    """Yields notes on rows that did not become documents, and on tokens that were cut.

    They count only the rows that were read.
    """
    for entry in ledger_of(name, source).entries:
        lost = {key: count for key, count in entry.out.items() if count and key not in KEPT}
        if lost:
            yield (
                f"{name}: {sum(entry.into.values()):,} {entry.unit}, of which "
                f"{', '.join(f'{count:,} {key}' for key, count in lost.items())}"
            )


def _verdicts(name: str, source: TokenizedShardedSource) -> Iterator[str]:
    """Yields how many answers were read and how many are desirable, if they are judged."""
    if DESIRABLE.name in source.info.aligned:
        cache = source.materialize()
        answers = good = 0
        for i, shard in enumerate(cache.shards):
            lists = cache.read(i, 0, shard.num_rows or 0).column(DESIRABLE.name)
            answers += len(lists)
            good += int(lists.values.to_numpy()[lists.offsets.to_numpy()[:-1]].sum())
        yield f"{name}: {answers:,} answers, {good:,} of them desirable"

"""Pipeline.plan and `easypipe plan`: what is told beforehand is what the loader then does."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from chat_support import MARKED, chat_tokenizer, talk
from easypipe import (
    CacheError,
    ConfigError,
    DatasetConfig,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PromptConfig,
    StageOrderError,
    train_bpe,
)
from easypipe.cli import main
from easypipe.core.config import to_dict
from easypipe.core.pages import page_of
from easypipe.core.schema import SEGMENT_IDS
from easypipe.loader.config import MOST_EPOCHS
from easypipe.stages.reports import plan_report
from easypipe.stages.reports.cuts import length_beyond
from easypipe.stages.reports.plan_page import plan_sections
from easypipe.stages.reports.plan_report import DatasetPlan, PlanReport, joined
from easypipe.stages.reports.shares import StepShares
from easypipe.stages.tokenize.documents import cached_of
from easypipe.train.report import pictures as plot
from page_cells import cells
from pipelines import config, jsonl, texts
from told import assert_told


def chain(pipeline: Pipeline, *names: str) -> Pipeline:
    for name in names:
        getattr(pipeline, name)()
    return pipeline


def mixed(tmp_path: Path, **options: Any) -> Pipeline:
    values = {
        "mix": {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "first_exhausted"},
        "pack": {"seq_length": 64},
    } | options
    return chain(
        Pipeline.from_config(to_dict(config(tmp_path)) | values),
        "source",
        "tokenize",
        "mix",
        "pack",
    )


def made_report(**changes: Any) -> PlanReport:
    """A report in which no two numbers are alike."""
    long = DatasetPlan(
        name="long",
        documents=1_234,
        tokens=56_789,
        requested=0.25,
        realised=0.5,
        document_share=0.125,
        token_share=0.0625,
        drawn=2_468,
        epochs=2.0,
        tokens_placed=3_333,
        tokens_truncated=7,
        tokens_dropped=20,
        documents_truncated=5,
        documents_dropped=6,
        documents_empty=8,
        rejected={"null": 9},
        tokens_cut=1_000,
        cache_bytes=4_500_000,
    )
    short = DatasetPlan(
        name="s",
        documents=3,
        tokens=4,
        requested=0.75,
        realised=0.4,
        document_share=0.875,
        token_share=0.9375,
        drawn=11,
        epochs=0.5,
        tokens_placed=667,
    )
    values: dict[str, Any] = {
        "name": "mixed",
        "unit": "tokens",
        "datasets": (long, short),
        "steps": 70,
        "steps_available": 9_000,
        "batch_size": 16,
        "sizes": ((30, 12), (40, 16)),
        "rows": 1_000,
        "rows_left_over": 2,
        "seq_length": 2_048,
        "slots": 5_000,
        "padding": 1_001,
        "fill": 0.7998,
        "cache_bytes": 4_600_000,
        "saved_bytes": 9_900_000,
        "notes": ("one", "two"),
    }
    return PlanReport(**(values | changes))


def test_every_number_of_a_report_stands_in_its_table() -> None:
    assert str(made_report()).splitlines() == [
        "dataset  documents  tokens  asked (tokens)  realised  of tokens  drawn  epochs   cache",
        "long         1,234  56,789        25.0000%  50.0000%    6.2500%  2,468   2.000  4.5 MB",
        "s                3       4        75.0000%  40.0000%   93.7500%     11   0.500  0.0 MB",
        "steps   70: 30 of 12 rows, 40 of 16 rows (the data gives 9,000)",
        "rows    1,000 of 2,048 slots, 79.980% filled; 2 left over at the end",
        "tokens  3,999, and 1,001 slots of padding",
        "disk    4.6 MB of token cache, 9.9 MB to save, before compression",
        "note    one",
        "note    two",
    ]
    plain = made_report(
        sizes=((70, 16),), steps_available=None, seq_length=None, saved_bytes=None, notes=()
    )
    assert str(plain).splitlines()[3:] == [
        "steps   70 of 16 rows (never ends)",
        "rows    1,000 documents as rows; 2 left over at the end",
        "tokens  3,999, and 1,001 slots of padding",
        "disk    4.6 MB of token cache",
    ]


def test_every_number_of_a_report_stands_on_its_page() -> None:
    head = ["dataset", "documents", "tokens", "asked (tokens)", "realised", "of tokens", "drawn"]
    head += ["epochs", "tokens cut or dropped", "token cache"]
    text = page_of("plan", plan_sections(made_report()))
    assert cells(text) == [
        ["steps", "70"],
        ["the data ends", "after 9,000 steps"],
        ["rows of a step", "12 in 30 steps, 16 in 40 steps"],
        ["rows", "1,000"],
        ["rows left over at the end", "2"],
        ["slots of a row", "2,048"],
        ["slots filled", "79.980%"],
        ["tokens", "3,999"],
        ["slots of padding", "1,001"],
        ["token cache", "4.6 MB"],
        ["to save, before compression", "9.9 MB"],
        head,
        ["long", "1,234", "56,789", "25.0000%", "50.0000%", "6.2500%", "2,468", "2.000", "1,027", "4.5 MB"],
        ["s", "3", "4", "75.0000%", "40.0000%", "93.7500%", "11", "0.500", "0", "0.0 MB"],
    ]  # fmt: skip
    assert re.findall(r"<p>(.*?)</p>", text) == ["one", "two"]
    plain = made_report(
        sizes=((70, 16),), steps_available=None, seq_length=None, saved_bytes=None, notes=()
    )
    text = page_of("plan", plan_sections(plain))
    told = cells(text)
    assert [told[i] for i in (1, 2, 5, 10)] == [
        ["the data ends", "never"],
        ["rows of a step", "16"],
        ["slots of a row", "as many as its document has"],
        head,
    ]
    assert re.findall(r"<p>(.*?)</p>", text) == ["Nothing stands out."]


def shares(step: int) -> StepShares:
    return StepShares(step=step, requested={}, realised={}, tokens={})


def test_the_parts_of_a_run_add_up() -> None:
    """Counts add up, and what is asked for is the mean over rows; the rest is the last part's."""
    first, last = made_report().datasets
    before = made_report(
        datasets=(dataclasses.replace(first, requested=1.0, cache_bytes=1, documents=1),),
        unit="rows",
        steps=7,
        steps_available=8,
        sizes=((3, 8), (4, 12)),
        rows=250,
        slots=600,
        padding=400,
        prepared=("long",),
        notes=("two", "three"),
        seconds=1.0,
        by_step=(shares(7),),
    )
    behind = made_report(prepared=("s", "long"), seconds=2.0, by_step=(shares(77),))
    drawn, placed = 2 * 2_468 + 11, 2 * 3_333 + 667
    assert joined([before, behind], ["steps 1 to 7", "from step 8"], ["zero"]) == made_report(
        datasets=(
            dataclasses.replace(
                first,
                requested=(250 * 1.0 + 1_000 * 0.25) / 1_250,
                realised=2 * 3_333 / placed,
                document_share=2 * 2_468 / drawn,
                token_share=2 * 3_333 / placed,
                drawn=2 * 2_468,
                epochs=4.0,
                tokens_placed=2 * 3_333,
                tokens_truncated=14,
                tokens_dropped=40,
                documents_truncated=10,
                documents_dropped=12,
                documents_empty=16,
            ),
            dataclasses.replace(
                last,
                requested=1_000 * 0.75 / 1_250,
                realised=667 / placed,
                document_share=11 / drawn,
                token_share=667 / placed,
            ),
        ),
        steps=77,
        steps_available=9_007,
        sizes=((3, 8), (34, 12), (40, 16)),
        rows=1_250,
        slots=5_600,
        padding=1_401,
        fill=1 - 1_401 / 5_600,
        cache_bytes=4_500_000,
        prepared=("long", "s"),
        notes=("zero", "two", "steps 1 to 7: three", "from step 8: one"),
        seconds=3.0,
        by_step=(*before.by_step, *behind.by_step),
    )
    shorter = joined([dataclasses.replace(before, seq_length=1_024), behind], ["a", "b"])
    assert shorter.seq_lengths == (1_024, 2_048)
    assert "rows    1,250 of 1,024 or 2,048 slots, 74.982% filled; 2 left" in str(shorter)
    page = cells(page_of("plan", plan_sections(shorter)))
    assert ["slots of a row", "1,024 or 2,048"] in page
    other = dataclasses.replace(before, datasets=(last,))
    assert [one.name for one in joined([other, behind], ["a", "b"]).datasets] == ["long", "s"]
    by_rows = joined([before, dataclasses.replace(behind, unit="rows")], ["a", "b"])
    assert [one.realised for one in by_rows.datasets] == [2 * 2_468 / drawn, 11 / drawn]


@pytest.mark.parametrize(
    ("stop", "epochs"), [("first_exhausted", 1), ("first_exhausted", 3), ("all_exhausted", 2)]
)
@pytest.mark.parametrize(
    "pack", [None, {"seq_length": 64}, {"seq_length": 32, "strategy": "first_fit"}]
)
def test_the_report_is_what_the_loader_does(
    tmp_path: Path, stop: str, epochs: int, pack: dict | None
) -> None:
    load = {"batch_size": 4, "num_epochs": epochs}
    pipeline = Pipeline.from_config(
        to_dict(config(tmp_path))
        | {
            "mix": {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": stop},
            "pack": pack,
            "load": load,
            "seed": 5,
        }
    )
    chain(pipeline, "source", "tokenize", "mix", *(["pack"] if pack else []), "load")
    report = pipeline.plan()
    loader = pipeline.build()
    batches = list(loader)
    assert report.steps == report.steps_available == len(loader) == len(batches)
    assert report.rows == len(batches) * 4
    assert report.rows_left_over == loader.rows.num_rows - report.rows
    tokens = sum(int((batch[SEGMENT_IDS] > 0).sum()) for batch in batches)
    assert report.slots - report.padding == tokens
    if pack:
        assert report.slots == sum(batch[SEGMENT_IDS].size for batch in batches)
    assert sum(d.tokens_placed for d in report.datasets) == tokens
    if not pack:  # a row is a document
        assert sum(d.drawn for d in report.datasets) == report.rows
    assert sum(d.realised for d in report.datasets) == pytest.approx(1)


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_count_only_what_they_read(tmp_path: Path, steps: int) -> None:
    pipeline = chain(mixed(tmp_path, load={"batch_size": 2}), "load")
    report = pipeline.plan(steps)
    assert (report.steps, report.rows) == (steps, 2 * steps)
    seen = Counter()
    for step in range(steps):
        for row in pipeline.loader().rows_of(step):
            for piece in pipeline.loader().rows.plan.locate(row).pieces.length:
                seen["tokens"] += int(piece)
    assert report.slots - report.padding == seen["tokens"]


@pytest.mark.parametrize("unit", ["rows", "tokens"])
@pytest.mark.parametrize("pack", [None, {"seq_length": 24}])
@pytest.mark.parametrize("steps", [3, 130])
def test_shares_by_step_are_those_of_the_rows_of_these_steps(
    tmp_path: Path, unit: str, pack: dict | None, steps: int
) -> None:
    mix = {"weights": {"code": 0.7, "docs": 0.3}, "unit": unit, "stop_strategy": "restart"}
    load = {"batch_size": 2, "num_epochs": None, "batch_size_schedule": [[2, 4]]}
    pipeline = Pipeline.from_config(
        to_dict(config(tmp_path)) | {"mix": mix, "pack": pack, "load": load, "seed": 5}
    )
    chain(pipeline, "source", "tokenize", "mix", *(["pack"] if pack else []), "load")
    report = pipeline.plan(steps, by_step=True)
    loader = pipeline.build()
    assert report.sizes == ((2, 2), (steps - 2, 4))
    names, begin = [dataset.name for dataset in report.datasets], 0
    assert [one.step for one in report.by_step] == (
        list(range(1, 4)) if steps == 3 else [round(1.3 * i) for i in range(1, 101)]
    )
    for one in report.by_step:
        seen, tokens = Counter(), Counter()
        for step in range(begin, one.step):
            for row in loader.rows_of(step):
                pieces = loader.rows.plan.locate(row).pieces
                for dataset, start, length in zip(
                    pieces.dataset, pieces.start, pieces.length, strict=True
                ):
                    seen[names[dataset]] += int(length) if unit == "tokens" else int(start == 0)
                    tokens[names[dataset]] += int(length)
        assert one.tokens == {name: tokens[name] for name in names}
        assert one.realised == pytest.approx(
            {name: seen[name] / max(1, seen.total()) for name in names}
        )
        assert one.requested == pytest.approx({"code": 0.7, "docs": 0.3})
        begin = one.step
    assert not pipeline.plan(steps).by_step, "only where it is asked for"


def test_what_is_asked_for_follows_a_schedule_of_weights(tmp_path: Path) -> None:
    schedule = [
        {"step": 0, "weights": {"code": 0.8, "docs": 0.2}},
        {"step": 4, "weights": {"code": 0.1, "docs": 0.9}},
    ]
    mix = {"weight_schedule": schedule, "stop_strategy": "restart"}
    pipeline = mixed(tmp_path, mix=mix, load={"batch_size": 2, "num_epochs": None})
    asked = [one.requested["docs"] for one in pipeline.plan(8, by_step=True).by_step]
    assert asked == pytest.approx([0.2] * 4 + [0.9] * 4)


def test_an_endless_mixture_needs_steps_and_tells_epochs(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path, mix={"weights": {"code": 0.5, "docs": 0.5}})
    with pytest.raises(ConfigError, match="steps: this data never ends"):
        pipeline.plan()
    report = pipeline.plan(200)
    code, docs = report.datasets
    assert code.document_share == code.realised == pytest.approx(0.5, abs=0.02)
    assert docs.requested == 0.5
    assert code.epochs == code.drawn / 60 > 1
    assert report.steps_available is None
    assert any("code is read" in note for note in report.notes)
    assert not any("once a step" in note for note in report.notes)
    load = {"batch_size": 256, "num_epochs": None}
    wide = mixed(tmp_path, mix={"weights": {"code": 0.5, "docs": 0.5}}, load=load).plan(2)
    assert wide.datasets[0].epochs > 2
    assert any("code is read" in note and "more than once a step" in note for note in wide.notes)
    with pytest.raises(ConfigError, match="steps: 0 steps are not a run"):
        pipeline.plan(0)
    rows = pipeline.get_data()["mixed"]
    tokens = sum(cache.total_tokens for cache in rows.mixture.prepare())
    most = MOST_EPOCHS * tokens // 64
    plan_report._require_few_passes(rows.mixture, rows.plan(), most)
    with pytest.raises(ConfigError, match=r"steps: .* too many to plan and count"):
        plan_report._require_few_passes(rows.mixture, rows.plan(), most + 1)
    alone = rows.mixture.plan(None)  # a row is a document, so the bound is met exactly
    most = MOST_EPOCHS * sum(cache.num_docs for cache in rows.mixture.prepare())
    plan_report._require_few_passes(rows.mixture, alone, most)
    with pytest.raises(ConfigError, match=r"steps: .* too many to plan and count"):
        plan_report._require_few_passes(rows.mixture, alone, most + 1)


def test_a_dataset_that_is_never_drawn_is_named(tmp_path: Path) -> None:
    report = mixed(tmp_path, mix={"weights": {"code": 1.0, "docs": 1e-6}}).plan(2)
    assert [d.name for d in report.datasets if d.never_drawn] == ["docs"]
    assert any(
        note.startswith("docs is never drawn in this run, its share is 1e-06")
        for note in report.notes
    )


def uneven(tmp_path: Path, *, long: int = 20, words: int = 900, **options: Any) -> Pipeline:
    """Few long documents beside many short ones, half and half."""
    rows = [" ".join(f"{i} {j}" for j in range(words)) for i in range(long)]
    parts = {"long": rows, "short": texts(400, 3, 6)}
    datasets = tuple(
        DatasetConfig(
            name=name,
            data_files=str(jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in part])),
        )
        for name, part in parts.items()
    )
    values = to_dict(config(tmp_path, datasets=datasets)) | {
        "pack": {"seq_length": 32},
        "load": {"batch_size": 8, "num_epochs": None},
    }
    values |= {"mix": {"weights": {"long": 0.5, "short": 0.5}, "unit": "tokens"}} | options
    return chain(Pipeline.from_config(values), "source", "tokenize", "mix", "pack", "load")


@pytest.mark.parametrize("unit", ["tokens", "rows"])
@pytest.mark.parametrize("steps", [1, 5, 40])
def test_documents_longer_than_the_run_are_drawn_where_a_part_of_them_stands(
    tmp_path: Path, unit: str, steps: int
) -> None:
    pipeline = uneven(tmp_path, mix={"weights": {"long": 0.5, "short": 0.5}, "unit": unit})
    report, loader = pipeline.plan(steps), pipeline.build()
    seen, parts = Counter(), Counter()
    for step in range(steps):
        for row in loader.explain(step).rows:
            for segment in row.segments:
                own = segment.token_stop - segment.token_start + segment.ends_with_eos
                seen[segment.dataset] += own
                parts[segment.dataset] += own / (segment.document_tokens + 1)
    for dataset in report.datasets:
        assert dataset.tokens_placed == seen[dataset.name]
        assert dataset.token_share == pytest.approx(seen[dataset.name] / seen.total())
        assert (
            dataset.never_drawn
            == (seen[dataset.name] == 0)
            == any(f"{dataset.name} is never drawn" in note for note in report.notes)
        )
        assert dataset.drawn == max(round(parts[dataset.name]), seen[dataset.name] > 0)
        assert dataset.document_share == pytest.approx(parts[dataset.name] / parts.total())
    assert not any("go on with" in note for note in report.notes), "text has no prompt"


def test_a_dataset_whose_drawn_documents_are_all_dropped_is_not_said_to_be_undrawn(
    tmp_path: Path,
) -> None:
    pack = {"seq_length": 32, "oversize": "drop"}
    notes = uneven(tmp_path, pack=pack, mix={"weights": {"long": 0.5, "short": 0.5}}).plan(2).notes
    assert not [note for note in notes if "never drawn" in note]
    assert "no document of long has a place in this run: all that are drawn are dropped" in notes


def test_a_stage_that_is_short_against_its_documents_is_named_and_the_advice_helps(
    tmp_path: Path,
) -> None:
    points = [
        {"step": 0, "weights": {"long": 0.5, "short": 0.5}},
        {"step": 4, "weights": {"long": 0.2, "short": 0.8}},
    ]
    mix = {"weight_schedule": points, "unit": "tokens"}
    note, *_ = [
        note for note in uneven(tmp_path, mix=mix).plan(60).notes if "are long against" in note
    ]
    assert re.match(
        r"steps 1 to 4: (long|short) has \d+\.\d+% of the tokens where 50\.00% is asked for: "
        r"documents of long \(mean ",
        note,
    )
    assert "Cut them (tokenize.max_length, pack.oversize: truncate), or give more steps" in note
    for advice in (
        {"pack": {"seq_length": 32, "oversize": "truncate"}},
        {"tokenize": {"max_length": 40}},
    ):
        cut = uneven(tmp_path, mix=mix, **advice)
        assert not [note for note in cut.plan(60).notes if "are long against" in note]
        assert cut.plan(4).datasets[0].token_share == pytest.approx(0.5, abs=0.05)
    more = [points[0], points[1] | {"step": 500}]
    assert not [
        note
        for note in uneven(tmp_path, mix=mix | {"weight_schedule": more}).plan(1000).notes
        if "are long against" in note
    ]
    rows = uneven(tmp_path, mix={"weights": {"long": 0.5, "short": 0.5}}).plan(4)
    [note] = [note for note in rows.notes if "are long against" in note]
    assert "of the documents where 50.00% is asked for" in note
    assert "Set mix.unit: tokens." in note


@pytest.mark.parametrize("prompt", [False, True])
def test_the_eos_of_documents_is_counted_once_whoever_adds_it(tmp_path: Path, prompt: bool) -> None:
    jsonl(
        tmp_path / "a.jsonl", [{"text": text, "question": "", "answer": text} for text in texts(30)]
    )
    own = (
        {
            "prompt": PromptConfig(
                format_type="prompt_completion", input_columns=("question",), label_column="answer"
            )
        }
        if prompt
        else {}
    )
    tokenizer = str(train_bpe(texts(60), 300, ["<|endoftext|>"], tmp_path / "tokenizer"))
    dataset = DatasetConfig(name="a", data_files=str(tmp_path / "a.jsonl"), **own)
    made = config(
        tmp_path,
        datasets=(dataset,),
        default_tokenizer=tokenizer,
        pack=PackStageConfig(seq_length=64),
        load=LoadStageConfig(batch_size=1),
    )
    report = chain(Pipeline.from_config(made), "source", "tokenize", "pack").plan()
    assert (
        report.datasets[0].tokens
        == report.slots - report.padding
        == report.datasets[0].tokens_placed
    )


def test_weights_that_give_other_shares_of_tokens_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_rows = {"weights": {"long": 0.5, "short": 0.5}, "stop_strategy": "first_exhausted"}
    pipeline = uneven(tmp_path, mix=by_rows)
    [note] = [note for note in pipeline.plan(3).notes if "mix.unit: tokens to make" in note]
    shares = {
        name: float(share) / 100
        for name, share in re.findall(
            r"(\w+) has (\S+)% of the tokens for a weight of 50\.00%", note
        )
    }
    caches = pipeline.get_data()["mixed"].mixture.prepare()
    means = [(cache.total_tokens + cache.num_docs) / cache.num_docs for cache in caches]
    assert shares == pytest.approx(
        {"long": means[0] / sum(means), "short": means[1] / sum(means)}, abs=1e-4
    )
    caplog.clear()
    pipeline.copy().write()
    assert note in caplog.text, "prepare says the same"
    caplog.clear()
    points = [{"step": step, "weights": by_rows["weights"]} for step in (0, 4)]
    uneven(tmp_path, mix={"weight_schedule": points}).write()
    assert note in caplog.text, "whatever the weights follow"
    caplog.clear()
    advised = uneven(tmp_path, mix=by_rows | {"unit": "tokens"})
    advised.copy().write()
    near = mixed(tmp_path, load={"batch_size": 2})  # the mean lengths are within a factor of 1.5
    near.write()
    assert "mix.unit" not in caplog.text
    assert not [
        note
        for report in (advised.plan(3), near.plan(3))
        for note in report.notes
        if "mix.unit" in note
    ]


def test_legends_have_every_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib leaves out names that begin with "_", and fails on dollars that are not formula."""
    names = ["_web", r"$\frac$", "a_b^c", "plain"]
    each = dict.fromkeys(names, 1)
    step = {"step": 1, "tokens": each, "realised": each, "requested": each}
    plan = {"unit": "rows", "datasets": [{"name": name} for name in names], "by_step": [step]}
    figures: list[Any] = []
    png = plot._png
    monkeypatch.setattr(plot, "_png", lambda figure: figures.append(figure) or png(figure))
    assert plot.mixture_picture(plan)
    told = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert [text.strip().replace(r"\$", "$") for text in told] == names


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_the_plot_of_the_mixture_shows_shares_of_tokens_that_end_in_those_of_the_ledger(
    tmp_path: Path, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are read from the figure that is drawn. Half of the batches hold one document."""
    mix = {"weights": {"long": 0.6, "short": 0.4}, "unit": unit, "stop_strategy": "first_exhausted"}
    load = {"batch_size": 2, "num_epochs": 1, "drop_last": False}
    pipeline = uneven(tmp_path, long=4, words=500, mix=mix, load=load)
    plan = json.loads(json.dumps(pipeline.plan(by_step=True).to_json()))
    figures: list[Any] = []
    png = plot._png
    monkeypatch.setattr(plot, "_png", lambda figure: figures.append(figure) or png(figure))
    picture = plot.mixture_picture(plan)
    assert picture is not None
    (tmp_path / "mixture.png").write_bytes(picture)
    [axes] = figures[0].axes
    thick = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    ledger = pipeline.ledger()
    placed = {name: ledger.find("pack", name, "tokens").out["placed"] for name in ("long", "short")}
    batches = [dict.fromkeys(placed, 0) for _ in range(plan["steps"])]
    loader = pipeline.build()
    for step, batch in enumerate(batches):
        for row in loader.explain(step).rows:
            for segment in row.segments:
                batch[segment.dataset] += segment.slot_stop - segment.slot_start
    assert any(0 in batch.values() for batch in batches), "of which the plot showed ones and zeros"
    assert thick.keys() == placed.keys()
    for name, line in thick.items():
        steps, so_far = line.get_data()
        true = [
            sum(b[name] for b in batches[:step]) / sum(sum(b.values()) for b in batches[:step])
            for step in steps
        ]
        assert so_far == pytest.approx(true, abs=1e-6)
        assert steps[-1] == plan["steps"]
        assert so_far[-1] == pytest.approx(placed[name] / sum(placed.values()), abs=1e-6)
        [lately, asked] = [
            other
            for other in axes.lines
            if other is not line and other.get_color() == line.get_color()
        ]
        border = max(step for step in steps if step <= 0.9 * steps[-1])
        assert lately.get_ydata()[-1] == pytest.approx(
            sum(b[name] for b in batches[border:]) / sum(sum(b.values()) for b in batches[border:]),
            abs=1e-6,
        )
        assert asked.get_ydata() == pytest.approx([mix["weights"][name]] * len(steps))


def test_the_last_tenth_of_a_run_is_no_step_longer() -> None:
    shares = {"requested": {}, "realised": {}}
    seen = [
        {"step": step, "tokens": {"a": int(step == 10), "b": int(step < 10)}, **shares}
        for step in range(1, 11)
    ]
    lines = plot.mixture_lines({"datasets": [{"name": "a"}], "by_step": seen})["a"]
    assert lines["lately"] == [0.0] * 9 + [1.0]
    assert lines["so far"][-1] == 0.1


@pytest.mark.parametrize("oversize", ["truncate", "drop"])
def test_losses_have_reasons(tmp_path: Path, oversize: str) -> None:
    data = jsonl(
        tmp_path / "bad.jsonl",
        [{"text": text} for text in texts(40)] + [{"text": None}, {"text": ""}],
    )
    pipeline = Pipeline.from_config(
        {
            **to_dict(config(tmp_path)),
            "datasets": [{"name": "bad", "data_files": str(data), "on_error": "skip"}],
            "pack": {"seq_length": 24, "oversize": oversize},
            "tokenize": {"max_length": 40},
        }
    )
    report = chain(pipeline, "source", "tokenize", "pack").plan()
    [dataset] = report.datasets
    assert dataset.rejected == {"null": 1, "empty": 1}
    assert dataset.tokens_cut > 0
    lost = dataset.documents_truncated if oversize == "truncate" else dataset.documents_dropped
    assert lost > 0
    said = " ".join(report.notes)
    assert f"{lost:,} documents" in said
    assert "empty 1, null 1" in said
    assert "max_length of the tokenizer cut off" in said
    assert "so it has no effect" not in said


@pytest.mark.parametrize(
    ("limit", "policy", "told"),
    [(40, "split", False), (40, "drop", False), (100_000, "split", True), (None, None, False)],
)
def test_a_length_that_no_document_reaches_is_told(
    tmp_path: Path, limit: int | None, policy: str | None, told: bool
) -> None:
    sets = [
        one | {"length": policy and {"policy": policy}}
        for one in to_dict(config(tmp_path))["datasets"]
    ]
    options = {"datasets": sets, "tokenize": {"max_length": limit}}
    pipeline = mixed(tmp_path, **options)
    report = pipeline.plan(2)
    notes = " ".join(report.notes)
    assert ("docs: no document is longer than max_length (100000), so it has no" in notes) is told
    # a conversation whose last turn alone is longer is none of the documents
    docs = pipeline.get_data()["mixed"].mixture.parts["docs"]
    counts = cached_of(docs).materialize().manifest.counts
    assert length_beyond(docs, dataclasses.replace(counts, rejects={"too_long": 1})) is None


LONG = "the fox and the dog " * 20
CUT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "max_length": (
        {"text": LONG},
        {"tokenizer_kwargs": {"max_length": 40}},
        "max_length of the tokenizer cut off",
    ),
    "policy": (
        {"text": LONG},
        {"tokenizer_kwargs": {"max_length": 40}, "length": {"policy": "keep_end"}},
        "length.policy keep_end left out",
    ),
    "split_turns": (
        {
            "messages": [
                *talk("fox", "Four"),
                *({**one, "train": False} for one in talk(LONG, "No")),
            ]
        },
        {"content_field": "messages", "chat_template": MARKED},
        "cuts of long conversations between turns, where pieces have no target, left out",
    ),
    "budgets": (
        {"question": LONG, "answer": "Four"},
        {
            "prompt": {
                "format_type": "custom",
                "template": "{question}={answer}",
                "input_columns": ["question"],
                "label_column": "answer",
            },
            "length": {"budgets": {"question": 9}},
        },
        "length.budgets left out",
    ),
    "two": (
        {"question": LONG, "answer": LONG},
        {
            "tokenizer_kwargs": {"max_length": 40},
            "prompt": {
                "format_type": "custom",
                "template": "{question}={answer}",
                "input_columns": ["question"],
                "label_column": "answer",
            },
            "length": {"policy": "keep_start", "budgets": {"question": 9}},
        },
        "length.budgets or length.policy keep_start left out",
    ),
}


@pytest.mark.parametrize("case", CUT)
def test_what_left_tokens_out_is_named(case: str, tmp_path: Path) -> None:
    """By max_length alone if there is one, and no policy."""
    row, options, told = CUT[case]
    dataset = {"name": "d", "data_files": [row] * 3, "tokenizer": chat_tokenizer()} | options
    values = {"datasets": [dataset], "pack": {"seq_length": 64}, "cache_dir": str(tmp_path)}
    report = chain(Pipeline.from_config(values | {"seed": 1}), "source", "tokenize", "pack").plan()
    [found] = report.datasets
    assert found.tokens_cut > 0
    assert f"d: {told} {found.tokens_cut:,} tokens when it was prepared" in report.notes


def test_preparing_is_said_and_can_be_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CacheError,
        match=r"dataset 'code': is not tokenized yet, nor are docs\. Run `easypipe prepare` first",
    ):
        mixed(tmp_path).plan(prepare=False)
    # equal files share their tokens
    jsonl(tmp_path / "data" / "code" / "c.jsonl", [{"text": text} for text in texts(60, 3)[:20]])
    assert not mixed(tmp_path).prepared()
    assert mixed(tmp_path).plan().prepared == ("code", "docs")
    assert mixed(tmp_path).prepared()
    again = mixed(tmp_path).plan(prepare=False)
    assert again.prepared == ()
    assert again.cache_bytes == sum(
        path.stat().st_size for path in (tmp_path / "cache" / "tokens").rglob("*.arrow")
    )


def test_saved_rows_and_unmixed_and_text(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path, save={"output_dir": str(tmp_path / "out")})
    first = pipeline.plan()
    assert first.saved_bytes == pipeline.get_data()["mixed"].shards[0].num_bytes
    off = {"output_dir": str(tmp_path / "out"), "enabled": False}
    assert (
        mixed(tmp_path, save=off).plan().saved_bytes is mixed(tmp_path).plan().saved_bytes is None
    )
    pipeline.save().build()
    saved = Pipeline.from_config(
        {
            "datasets": [{"data_files": str(tmp_path / "out"), "name": "out"}],
            "seed": 1,
            "cache_dir": str(tmp_path),
        }
    )
    report = saved.source().plan()
    assert (report.steps, report.rows, report.seq_length) == (first.steps, first.rows, 64)
    assert report.fill == pytest.approx(first.fill, abs=0.02)
    two = saved.plan(2)
    [dataset] = two.datasets
    assert (dataset.drawn, dataset.documents) == (16, first.rows + first.rows_left_over)
    assert dataset.epochs == 16 / dataset.documents
    assert (
        two.slots - two.padding == dataset.tokens_placed == dataset.tokens * 16 // dataset.documents
    )
    assert (two.rows, two.slots) == (16, 16 * 64)
    plain = Pipeline.from_config(config(tmp_path)).source()
    with pytest.raises(StageOrderError, match=r"Call mix\(\) first"):
        plain.plan()
    one = Pipeline.from_config(config(tmp_path, datasets=config(tmp_path).datasets[:1])).source()
    with pytest.raises(StageOrderError, match=r"Call tokenize\(\) before plan\(\)"):
        one.plan()


def test_schedules_and_tokens_are_told_in_their_own_terms(tmp_path: Path) -> None:
    points = [
        {"step": 0, "weights": {"code": 1, "docs": 0}},
        {"step": 20, "weights": {"code": 0, "docs": 1}},
    ]
    mix = {"weight_schedule": points, "unit": "tokens"}
    report = mixed(tmp_path, mix=mix, load={"batch_size": 4}).plan(80)
    code, docs = report.datasets
    assert report.unit == "tokens"
    assert (code.requested, docs.requested) == (0.25, 0.75)
    assert (code.realised, docs.realised) == (code.token_share, docs.token_share)
    assert code.realised == pytest.approx(0.25, abs=0.03)
    early = mixed(tmp_path, mix=mix, load={"batch_size": 4}).plan(10)
    assert [d.name for d in early.datasets if d.never_drawn] == ["docs"]


def test_datasets_that_end_unevenly_are_named(tmp_path: Path) -> None:
    """60 documents of code take 26 of docs with them; of docs 64 of 90 stand behind the end, in
    every epoch.
    """
    pipeline = mixed(tmp_path, load={"batch_size": 4, "num_epochs": 2})
    unreached = pipeline.ledger().find("mix", "docs", "documents").out["unreached"]
    assert pipeline.plan().notes == (
        "3 rows at the end fill no batch of 4 and are left out (load.drop_last)",
        "code is read 1.92 times",
        f"docs: {2 * unreached} of 180 documents are not reached: another dataset ends the "
        "mixture before",
    )
    assert pipeline.plan(3).notes == (), "a run that stops before has not met the end"


def test_a_run_that_ends_inside_shuffled_rows_is_told(tmp_path: Path) -> None:
    pipeline = mixed(tmp_path, load={"batch_size": 4, "shuffle_buffer_size": 16})
    told = "the run ends inside a block of 16 shuffled rows; it is counted as if they were in order"
    assert pipeline.plan(3).notes == ("code, docs: tokenized for this report", told)
    assert pipeline.plan(2).notes == (told,)
    whole = pipeline.plan()
    assert whole.rows % 16
    assert told not in (*whole.notes, *pipeline.plan(whole.steps).notes)
    assert not pipeline.plan(4).notes


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_eos_is_counted_where_it_is_known_how_many_documents_had_it(
    tmp_path: Path, stop: str
) -> None:
    """Of docs every third ends with it already, and some may not be reached."""
    mix = {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": stop}
    rows = [
        {"text": text + "<|endoftext|>" * (i % 3 == 0)} for i, text in enumerate(texts(90, 5, 25))
    ]
    code, docs = to_dict(config(tmp_path))["datasets"]
    docs["data_files"] = str(jsonl(tmp_path / "ended.jsonl", rows))
    ledger = mixed(tmp_path, mix=mix, datasets=[code, docs]).ledger()
    code, docs = (ledger.find("pack", name, "tokens").into for name in ("code", "docs"))
    assert code["EOS"] == 60
    assert list(docs) == (["drawn, with EOS"] if stop == "first_exhausted" else ["drawn", "EOS"])
    assert docs.get("EOS") in (None, 60)


def test_streaming_has_nothing_to_plan_from(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="streaming: streamed data is not counted before it is read"
    ):
        mixed(tmp_path, streaming=True).plan(3, prepare=False)


def of_chat(tmp_path: Path, name: str, rows: list[dict[str, Any]], **options: Any) -> Pipeline:
    """A dataset with a loss mask, packed."""
    path = jsonl(tmp_path / f"{name}.jsonl", rows)
    pack = {"seq_length": 64, **options.pop("pack", {})}
    load = {"batch_size": options.pop("batch_size", 8)}
    dataset = {"name": name, "data_files": str(path), "tokenizer": chat_tokenizer()} | options
    values = to_dict(config(tmp_path)) | {"datasets": [dataset], "pack": pack, "load": load}
    return chain(Pipeline.from_config(values), "source", "tokenize", "pack")


def test_what_is_told_beforehand_and_counted_behind_word_for_word(tmp_path: Path) -> None:
    """A table and its notes, the counts that stand in none of them, and the ledger, of many runs."""
    whole = {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"}
    cut = whole | {"stop_strategy": "first_exhausted"}
    again = {"weights": {"code": 0.25, "docs": 0.75}, "stop_strategy": "restart"}
    points = [
        {"step": 2, "weights": {"code": 1, "docs": 0}},
        {"step": 6, "weights": {"code": 0, "docs": 1}},
    ]
    by_steps = {"weight_schedule": points, "weight_schedule_type": "linear", "unit": "tokens"}
    rows = [{"text": text} for text in texts(30)] + [{"text": None}, {"text": ""}]
    lossy = [
        {"name": name, "data_files": str(jsonl(tmp_path / "bad.jsonl", rows)), "on_error": "skip"}
        | more
        for name, more in (("bad", {"length": {"policy": "drop"}}), ("cut", {}))
    ]
    tight = {"seq_length": 24, "strategy": "first_fit", "oversize": "truncate"}
    talks = [{"messages": talk("one two " * (i % 9), "a b c " * (i % 7 + 1))} for i in range(40)]
    pairs = [
        {"prompt": "a b ", "good": "c d " * (i % 3 + 1), "bad": "e ", "label": i % 2 > 0}
        for i in range(9)
    ]
    own = {"content_field": "messages", "chat_template": MARKED}
    fields = {"prompt_field": "prompt", "completion_field": "good"}
    grouped = {"batch_size": 64, "num_epochs": None, "group_by_length": 2}
    dropping = {"pack": {"oversize": "drop"}, "batch_size": 2}
    out = {"output_dir": str(tmp_path / "out")}
    saved = {"datasets": [{"name": "out", "data_files": str(tmp_path / "out")}], "seed": 1}
    mixed(tmp_path, mix=cut, save=out | {"num_shards": 2}).save().build()
    others = {"datasets": [{"name": "out", "data_files": str(tmp_path / "out" / "*.parquet")}]}
    cases: dict[str, tuple[Pipeline, tuple[Any, ...], dict[str, Any]]] = {
        "two epochs, and an end": (
            mixed(tmp_path, mix=cut, load={"batch_size": 4, "num_epochs": 2}, save=out),
            (),
            {},
        ),
        "more steps than there are": (
            mixed(tmp_path, mix=whole, load={"batch_size": 5, "drop_last": False}),
            (900,),
            {},
        ),
        "goes on": (mixed(tmp_path, mix=whole, load={"batch_size": 4}), (9,), {"begin": (3, 10)}),
        "no batch": (mixed(tmp_path, mix=whole, load={"batch_size": 1_000}), (), {}),
        "again and again": (
            mixed(tmp_path, mix=again, load=grouped, save=out),
            (3,),
            {},
        ),
        "until each has had its passes": (
            mixed(
                tmp_path,
                mix=again | {"max_epochs": {"code": 2, "docs": 3}},
                load={"batch_size": 7},
            ),
            (),
            {},
        ),
        "weights and batches that change": (
            mixed(
                tmp_path,
                mix=by_steps,
                load={
                    "batch_size": 2,
                    "num_epochs": None,
                    "batch_size_schedule": [[3, 4], [5, 8]],
                    "shuffle_buffer_size": 7,
                },
            ),
            (9,),
            {"by_step": True},
        ),
        "losses": (
            mixed(
                tmp_path,
                datasets=lossy,
                mix={"weights": {"bad": 1, "cut": 2}, "stop_strategy": "all_exhausted"},
                tokenize={"max_length": 40},
                pack=tight,
            ),
            (),
            {},
        ),
        "dropped": (mixed(tmp_path, pack=tight | {"oversize": "drop", "seq_length": 12}), (1,), {}),
        "conversations": (of_chat(tmp_path, "talks", talks, **own), (), {}),
        "conversations end to end": (
            of_chat(tmp_path, "talks", talks, **own, pack={"strategy": "concat", "seq_length": 48}),
            (),
            {},
        ),
        "with the prompt of another row": (
            of_chat(tmp_path, "talks", talks, **own, pack={"seq_length": 16}),
            (),
            {},
        ),
        "pairs": (
            of_chat(tmp_path, "pairs", pairs, **fields, **dropping, rejected_field="bad"),
            (),
            {},
        ),
        "verdicts": (
            of_chat(tmp_path, "verdicts", pairs, **fields, **dropping, desirable_field="label"),
            (),
            {},
        ),
        "saved": (Pipeline.from_config(saved | {"load": {"num_epochs": 3}}).source(), (7,), {}),
        "saved by another": (Pipeline.from_config(others).source(), (), {}),
    }
    told = []
    for name, (pipeline, steps, options) in cases.items():
        report = pipeline.plan(*steps, **options)
        told += [f"### {name}", str(report), f"{report.unit}, prepared {report.prepared}"]
        told += [str(dataclasses.replace(one, cache_bytes=0)) for one in report.datasets]
        told += [str(one) for one in report.by_step]
        if not name.startswith("saved"):
            ledger = pipeline.ledger()
            told += [
                f"{one.stage} {one.dataset} {one.unit}: {one.into} -> {one.out}"
                for one in ledger.entries
            ]
            kept = ("epochs", "rows", "fill")
            told += [f"{key} {value}" for key, value in ledger.facts.items() if key.endswith(kept)]
        told.append("")
    digits = re.compile(r"\d+\.\d{7,}(e-\d+)?")
    assert_told("plans", digits.sub(lambda found: f"{float(found[0]):.6g}", "\n".join(told)))


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    values = to_dict(config(tmp_path)) | {
        "mix": {"weights": {"code": 0.7, "docs": 0.3}},
        "pack": {"seq_length": 64},
    }
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump({"data": values, "train": {"output_dir": str(tmp_path / "run"), "steps": 7}})
    )
    return path


def test_tokens_that_are_not_kept_need_no_preparing(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unkept = ["--set", "data.tokenize={cache_tokenized: false}"]
    assert main(["plan", str(run_yaml), "--no-prepare", *unkept]) == 2
    assert "Allow preparing: its tokens are not kept for another" in capsys.readouterr().err
    assert main(["prepare", str(run_yaml), *unkept]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "prepared, and not kept for the next process: the tokens of code, docs; train" in told
    assert main(["prepare", str(run_yaml)]) == 0
    assert "not kept" not in capsys.readouterr().out


def test_the_command(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_yaml), "--no-prepare"]) == 2
    assert "is not tokenized yet" in capsys.readouterr().err
    assert main(["plan", str(run_yaml)]) == 0
    text = capsys.readouterr().out
    assert "steps   7 of 8 rows (never ends)" in text
    assert "code, docs: tokenized for this report" in text
    assert main(["plan", str(run_yaml), "--set", "train.stepz=3"]) == 2
    assert "train.stepz: unknown key" in capsys.readouterr().err
    assert main(["plan", str(run_yaml), "--json", "--steps", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["rows"]) == (3, 24)
    assert [d["name"] for d in report["datasets"]] == ["code", "docs"]
    assert set(report) == set(PlanReport.__dataclass_fields__)
    assert np.isclose(sum(d["token_share"] for d in report["datasets"]), 1)


@pytest.mark.parametrize("command", [["plan", "--steps", "3"], ["explain", "--step", "0"]])
def test_the_hint_names_streaming_as_the_file_spells_it(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list
) -> None:
    values = yaml.safe_load(run_yaml.read_text())
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(values["data"]))
    for path, key in ((run_yaml, "data.streaming"), (tmp_path / "data.yaml", "streaming")):
        given = [command[0], str(path), *command[1:]]
        assert main([*given, "--set", f"{key}=true"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{key}: " in said
        [advice] = re.findall(r"--set \S+=false", said)
        assert advice == f"--set {key}=false"
        assert main([*given, "--set", f"{key}=true", *advice.split()]) == 0

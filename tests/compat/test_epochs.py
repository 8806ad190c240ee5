"""Epoch-style interfaces (documents 000, 001, 003, 004): each `iter` behind a finished pass is the
next one, in an order of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from easypipe import (
    DataLoaderBuilder,
    DataLoaderConfig,
    DataLoaderFactory,
    DataPipeline,
    EpochLoader,
    Loader,
    PreprocessedDataset,
    PromptConfig,
    PromptEngine,
    StreamingPreprocessedDataset,
    UniversalDataModule,
    create_causal_lm_collate,
    create_dataloaders,
    create_masked_lm_collate,
    load_tokenizer,
)
from easypipe.core.errors import ConfigError, StateError
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.rows.items import ItemRows
from laws import assert_same_batches
from pipelines import jsonl, texts, tokenizer
from strategies import examples

NUMBERS = [{"x": np.int32(i)} for i in range(23)]
TOKENS = [{"input_ids": list(range(4, 6 + i % 7))} for i in range(17)]
PROSE = [{"text": text} for text in texts(30)]


def factory(data: Any = NUMBERS, **options: Any) -> EpochLoader:
    return DataLoaderFactory().create_dataloader(
        data, DataLoaderConfig(**{"batch_size": 4, "shuffle": True, "seed": 42, **options})
    )


def module(data: Any = PROSE, **options: Any) -> UniversalDataModule:
    return UniversalDataModule(data, tokenizer=tokenizer(), batch_size=4, seed=42, **options)


def text(**options: Any) -> EpochLoader:
    engine = PromptEngine(tokenizer(), PromptConfig(format_type="custom", template="{text}"))
    return factory(PreprocessedDataset(PROSE, engine), **options)


def yaml(tmp_path: Path, *, streaming: bool = False, num_epochs: int = 1) -> DataPipeline:
    jsonl(tmp_path / "rows.jsonl", PROSE)
    sections = {
        "type": "data_module",
        "version": "1.0",
        "dataset": {"name": str(tmp_path / "rows.jsonl"), "streaming": streaming},
        "tokenizer": {"name_or_path": tokenizer()},
        "prompt_template": {"format_type": "custom", "template": "{text}"},
        "dataloader": {
            "batch_size": 4,
            "seed": 42,
            "drop_last": not streaming,
            "num_epochs": num_epochs,
        },
    }
    return DataPipeline.from_config(sections).unwrap()


def streamed(tmp_path: Path, num_epochs: int = 1) -> EpochLoader:
    pipeline = yaml(tmp_path, streaming=True, num_epochs=num_epochs)
    return pipeline.get_dataloader("train", shuffle=True).unwrap()


def micro(tmp_path: Path) -> EpochLoader:
    path = jsonl(tmp_path / "rows.jsonl", PROSE)
    return create_dataloaders(path, path, tokenizer(), batch_size=2, seq_length=16, seed=42)[0]


MAKERS: dict[str, Callable[[Path], EpochLoader]] = {
    "items": lambda _: factory(),
    "masks": lambda _: factory(
        TOKENS, shuffle=False, collate_fn=create_masked_lm_collate(mask_token_id=3, vocab_size=50)
    ),
    "text": lambda _: text(),
    "grouped": lambda _: text(group_by_length=2),
    "several": lambda _: text(num_epochs=2),
    "rank": lambda _: factory(rank=1, world_size=2),
    "module": lambda _: module().train_dataloader(),
    "yaml": lambda tmp_path: yaml(tmp_path).get_dataloader("train", shuffle=True).unwrap(),
    "micro": micro,
    "stream": streamed,
}


def length_of(loader: Any) -> int:
    """Batches of a pass. A stream does not count its rows, which are those of PROSE."""
    return -(-len(PROSE) // 4) if not loader.rows.by_number else len(loader)


def bits(batches: Any) -> list[bytes]:
    return [
        b"".join(np.ascontiguousarray(batch[name]).tobytes() for name in sorted(batch))
        for batch in batches
    ]


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], EpochLoader]:
    return lambda: MAKERS[request.param](tmp_path)


def test_a_loop_over_epochs_has_an_order_for_each(make: Callable[[], EpochLoader]) -> None:
    loader, again = make(), make()
    passes = [bits(loader) for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3
    assert {len(one) for one in passes} == {length_of(loader)}
    assert [bits(again) for _ in range(3)] == passes


def test_an_abandoned_pass_is_begun_again(make: Callable[[], EpochLoader]) -> None:
    loader = make()
    first = bits(loader)
    second = [bits(itertools.islice(loader, count)) for count in (1, 2, length_of(loader) + 1)]
    assert second[0] == second[2][:1]
    assert second[1] == second[2][:2]
    assert second[2] != first
    assert bits(loader) not in (first, second[2])


def test_law_exact_resume_over_passes(make: Callable[[], EpochLoader]) -> None:
    loader, wanted, states = make(), [], []
    for _ in range(3):
        states.append(loader.state().to_json())
        for batch in loader:
            wanted += bits([batch])
            states.append(loader.state().to_json())
    length = length_of(loader)
    for at in (0, 1, length, length + 1, length + 3, 2 * length + 2, 3 * length + 2):
        other = make()
        other.restore(states[at])
        assert other.state().to_json() == states[at]
        rest = bits(other)  # what is left of the pass: nothing, behind its last batch
        done = at - at // (length + 1)
        assert rest == wanted[done : (at // (length + 1) + 1) * length]
        if at < 2 * length:
            assert bits(other) == wanted[done + len(rest) :][:length]


def test_passes_of_a_stream_in_one_iteration_are_those_of_single_ones(tmp_path: Path) -> None:
    single = streamed(tmp_path)
    wanted = [bits(single) for _ in range(4)]
    loader, states = streamed(tmp_path, 2), []
    seen, entered = [], iter(loader)
    for batch in entered:
        seen += bits([batch])
        states.append(loader.state().to_json())
    assert (seen, bits(loader)) == (wanted[0] + wanted[1], wanted[2] + wanted[3])
    assert bits(streamed(tmp_path, 2)) == seen  # nobody keeps the loader
    assert bits(streamed(tmp_path, 2).copy()) == seen
    for number, state in enumerate(states, 1):
        other = streamed(tmp_path, 2)
        other.restore(state)
        assert bits(other) == seen[number:]
        assert bits(other) == wanted[2] + wanted[3]
    older = iter(loader)  # another iteration begins before it ends
    begun = bits([next(older)])
    newer = bits(loader)
    assert begun + bits(older) == newer
    assert bits(loader) != newer


def test_iterations_that_run_together_stay_in_their_pass() -> None:
    loader = factory()
    wanted = [bits(loader) for _ in range(2)]
    loader = factory()
    old = iter(loader)
    begun = bits([next(old)])
    assert bits(loader) == wanted[0]  # which ends the pass; the older iteration goes on in it
    new = iter(loader)
    assert begun + bits(old) == wanted[0]
    assert bits(new) == wanted[1]


def test_an_older_iteration_does_not_take_the_state_over_at_the_end_of_its_pass(
    tmp_path: Path,
) -> None:
    loader = streamed(tmp_path, 2)
    length = length_of(loader)
    older, newer = iter(loader), iter(loader)
    seen = bits(itertools.islice(newer, length + 1))  # one batch of the second pass
    state = loader.state().to_json()
    assert bits(itertools.islice(older, length + 2))[: length + 1] == seen
    assert loader.state().to_json() == state


def test_next_after_the_end_begins_where_an_iteration_would() -> None:
    loader = factory()
    wanted = [bits(loader) for _ in range(2)]
    loader = factory()
    next(loader)
    state = loader.state()
    loader.restore(state)
    assert bits([next(loader)]) == wanted[0][1:2]
    newest = iter(loader)  # so that the end of the own one moves nothing
    assert bits(next(loader) for _ in range(len(loader) - 2)) == wanted[0][2:]
    with pytest.raises(StopIteration):
        next(loader)
    assert bits([next(loader)]) == wanted[0][:1]
    assert bits([next(newest)]) == wanted[0][1:2]


@examples(25)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_passes_of_any_loader_are_those_of_one_endless_one(
    count: int, batch: int, ranks: int, epochs: int, drop_last: bool
) -> None:
    assume(count * epochs >= batch * ranks)
    rows, options = (
        [{"x": i} for i in range(count)],
        {"batch_size": batch, "num_workers": 0, "drop_last": drop_last, "num_epochs": epochs},
    )
    endless = ItemRows(
        rows,
        lambda items: {"x": np.array([item["x"] for item in items])},
        seed=42,
        shuffle=True,
        num_epochs=None,
    )
    loaders = [factory(rows, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
    size = count * epochs
    for turn in range(2):
        seen = [[int(x) for b in loader for x in b["x"]] for loader in loaders]
        for rank, got in enumerate(seen):
            numbers = np.arange(turn * size + rank, (turn + 1) * size, ranks)
            there = [rows[i]["x"] for i in endless.numbers(numbers)]
            assert got == there[: len(got)]
            assert len(there) - len(got) < (batch + 1 if drop_last else 1)


def test_a_data_module_keeps_its_pass_and_a_new_one_begins_at_the_first() -> None:
    one, other = module(val_split=0.2), module(val_split=0.2)
    passes = [bits(one.train_dataloader()) for _ in range(3)]
    assert len({tuple(batches) for batches in passes}) == 3
    loader, early = other.train_dataloader(), other.train_dataloader()
    assert [bits(loader), bits(loader), bits(other.train_dataloader())] == passes
    assert bits(early) == passes[0]  # each goes its own way from where it was made
    held_out = one.val_dataloader()
    assert held_out is not None
    assert bits(held_out) == bits(held_out) == bits(one.val_dataloader())


def test_a_pass_counts_of_a_loader_that_only_its_loop_has(tmp_path: Path) -> None:
    data, stream = module(), yaml(tmp_path, streaming=True, num_epochs=2)
    for asked in (
        data.train_dataloader,
        lambda: stream.get_dataloader("train", shuffle=True).unwrap(),
    ):
        # each loop's own iterator is all that keeps its loader
        passes = [[bits([batch]) for batch in asked()] for _ in range(3)]
        assert passes[0] != passes[1] != passes[2] != passes[0]


def test_what_is_validated_on_is_masked_alike_every_time() -> None:
    mask = create_masked_lm_collate(mask_token_id=3, vocab_size=50)
    data = UniversalDataModule(TOKENS, collate_fn=mask, batch_size=4, val_split=0.5, seed=1)
    held_out = data.val_dataloader()
    assert held_out is not None
    assert bits(held_out) == bits(held_out)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (TOKENS, {"num_epochs": 3}),
        (TOKENS, {"num_epochs": None}),
        (TOKENS, {"drop_last": True}),
        (PROSE, {"num_epochs": 3, "tokenizer": None}),
        (PROSE, {"group_by_length": 2, "tokenizer": None}),
    ],
)
def test_however_training_reads_validation_reads_every_row_once_and_in_order(
    rows: Any, options: dict[str, Any]
) -> None:
    options = options | ({"tokenizer": tokenizer()} if "tokenizer" in options else {})
    data = UniversalDataModule(rows, batch_size=4, val_split=0.5, seed=1, **options)
    held_out = data.val_dataloader()
    assert held_out is not None
    found = [
        ids[attended == 1].tolist()
        for batch in itertools.islice(held_out, 99)  # it may never end
        for ids, attended in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    known = load_tokenizer(tokenizer())
    wanted = [rows[i] for i in data.splits.val]
    assert found == [row.get("input_ids") or known.reference_encode(row["text"]) for row in wanted]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_yaml_pipeline_keeps_the_pass_of_each_split(streaming: bool, tmp_path: Path) -> None:
    pipeline = yaml(tmp_path, streaming=streaming)
    passes = [bits(pipeline.get_dataloader("train", shuffle=True).unwrap()) for _ in range(2)]
    assert passes[0] != passes[1]
    again = yaml(tmp_path, streaming=streaming).get_dataloader("train", shuffle=True).unwrap()
    assert passes == [bits(loader) for loader in [again] * 2]
    ordered = [bits(pipeline.get_dataloader("train").unwrap()) for _ in range(2)]
    assert ordered[0] == ordered[1]
    third = bits(again)  # shuffled and in order count apart
    assert bits(pipeline.get_dataloader("train", shuffle=True).unwrap()) == third


def test_streams_are_shuffled_anew_in_every_pass() -> None:
    engine = PromptEngine(tokenizer(), PromptConfig(format_type="custom", template="{text}"))

    class Rows:
        def __iter__(self) -> Any:
            return iter(PROSE)

    def made(**options: Any) -> EpochLoader:
        stream = StreamingPreprocessedDataset(Rows(), engine, buffer_size=8, seed=3)
        return (
            DataLoaderBuilder()
            .with_dataset(stream)
            .with_batch_size(4)
            .with_options(**options)
            .build()
        )

    loader = made()
    passes = [bits(loader) for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3
    loader = made()
    bits(loader)
    next(iter(loader))
    state, other = loader.state().to_json(), made()
    other.restore(state)
    assert bits(other) == passes[1][1:]
    assert bits(other) == passes[2]
    shares = [made(rank=rank, world_size=2, drop_last=True) for rank in range(2)]
    assert [bits(share) for share in shares] != [bits(share) for share in shares]
    stream = StreamingPreprocessedDataset(Rows(), engine, buffer_size=8, seed=3)

    def order() -> list[list[int]]:
        return [row["input_ids"].tolist() for row in stream]

    first = order()
    assert order() == first  # by itself it begins again
    stream.set_epoch(1)
    assert order() != first
    assert sorted(order()) == sorted(first)


def test_passes_of_a_stream(tmp_path: Path) -> None:
    def made() -> Any:
        return MAKERS["stream"](tmp_path)

    loader, wanted = made(), made()
    passes = [bits(wanted) for _ in range(3)]

    def rows(batches: Any) -> list[list[int]]:
        ids = [
            batch["input_ids"][i][batch["segment_ids"][i] == 1].tolist()
            for batch in batches
            for i in range(len(batch["input_ids"]))
        ]
        return sorted(row for row in ids if row)

    first = rows(loader)
    assert len(first) == len(PROSE)
    assert rows(loader) == first  # the next pass holds the same rows, in another order
    assert loader.ledger().entries  # of the pass that is finished
    assert len(loader.state().to_json()) < 4096
    old, new = iter(loader), iter(made())
    assert bits([next(old)]) == passes[2][:1]
    assert bits(new) == passes[0]
    loader.set_epoch(1)
    assert bits(loader) == bits(loader.loader(1)) == bits(loader.loader(1)) == passes[1]
    other = made()
    taken = bits(next(other) for _ in range(length_of(other)))
    with pytest.raises(StopIteration):
        next(other)
    assert [taken, bits([next(other)])] == [passes[0], passes[1][:1]]
    assert bits(loader.copy()) == passes[0]
    plain = loader.loader(0)
    with pytest.raises(StateError, match="plan"):
        plain.restore(loader.state())


def test_a_state_of_another_pass_is_for_loaders_that_have_passes(tmp_path: Path) -> None:
    for name in ("items", "text", "micro"):
        loader = MAKERS[name](tmp_path)
        plain = loader.loader(0)
        plain.restore(loader.state())
        before = loader.state().to_json()
        assert before == loader.loader(0).state().to_json()
        list(loader)
        with pytest.raises(StateError, match="plan"):
            plain.restore(loader.state())
        assert bits(loader.loader(1)) == bits(loader)
        with pytest.raises(StateError):
            loader.restore(factory(NUMBERS[:5]).state())
        assert loader.state().epoch == 2


def test_a_pass_can_be_chosen_and_explained() -> None:
    loader = text()
    wanted = [bits(loader) for _ in range(3)]
    loader.set_epoch(1)
    explained = loader.explain(0)
    batch = next(iter(loader))
    assert bits([batch]) == wanted[1][:1]
    for row in explained.rows:
        ids = [token for segment in row.segments for token in segment.ids]
        assert batch["input_ids"][row.row][: len(ids)].tolist() == ids
    assert {row.epoch for row in explained.rows} == {1}
    with pytest.raises(ConfigError, match="there is no pass -1"):
        loader.set_epoch(-1)


def test_loaders_made_of_it_have_passes_too() -> None:
    whole = text(batch_size=8)
    for made in (
        text(batch_size=4).copy(),
        text().map_rows(lambda columns, key: None, version="1"),
    ):
        assert bits(made) != bits(made)
    ranks = [text(batch_size=4).of_rank(rank, 2) for rank in range(2)]
    for _ in range(2):
        together = [
            sorted(a.tolist() + b.tolist())
            for a, b in zip(
                *([x["segment_ids"].sum(1) for x in rank] for rank in ranks), strict=True
            )
        ]
        assert together == [
            sorted(batch["segment_ids"].sum(1).tolist())
            for batch in itertools.islice(whole, len(together))
        ]
        whole.set_epoch(1)


def test_a_plain_loader_begins_at_its_first_batch_every_time() -> None:
    rows = ItemRows(TOKENS, create_causal_lm_collate(), shuffle=True)
    loader = Loader(rows, LoadStageConfig(batch_size=4))
    assert_same_batches(list(loader), loader)


def test_states_tell_passes_and_shares_of_ranks_apart() -> None:
    rows = [{"x": np.full(2, i)} for i in range(9)]

    def plan(epoch: int, *, even: bool) -> str:
        built = DataLoaderBuilder().with_dataset(rows).with_batch_size(2)
        built = built.with_distributed(rank=0, world_size=2)
        loader = built.with_options(shuffle=True, seed=1, drop_last=even).build()
        return json.loads(loader.loader(epoch).state().to_json())["components"]["plan"]

    plans = [plan(0, even=True), plan(1, even=True), plan(0, even=False)]
    assert len(set(plans)) == 3

"""States: what a loader says after each batch, and the batches behind a state that was kept by the
commit which kept these digests.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

from easypipe import DatasetConfig
from golden.batches import CACHED, chain, load, pack
from golden.cases import golden, is_to_be_kept
from golden.data import config, one_dataset, rows_of, texts
from golden.digests import batches, digest, ledger

STATES = Path(__file__).parent / "saved" / "states"
KEPT = (
    "greedy",
    "first_fit",
    "stream",
    "by_tokens",
    "schedule_linear",
    "chat",
    "streaming_first_fit",
    "streaming_stream",
    "streaming_schedule_step",
)
STOP = 3  # batches before a state is kept


def of(folder: Path, name: str) -> Any:
    """A loader of the configuration `name`."""
    made = CACHED[name.removeprefix("streaming_")](folder)
    if name.startswith("streaming_"):
        in_memory = tuple(
            DatasetConfig(name=name, data_files={"text": texts(count, salt)})
            for name, count, salt in (("code", 60, 3), ("docs", 90, 5))
        )  # a stream knows its files by their paths, which are others on each machine
        made = dataclasses.replace(made, datasets=in_memory, streaming=True, num_streams=2)
    return chain(made).build()


@golden(*KEPT)
def kept_states(folder: Path, name: str) -> Any:
    """A state that was saved then is restored now: it must go on with the batches that a whole run
    has there.

    Paths of files are not part of identity, so the data lies elsewhere on each machine.
    """
    path = STATES / f"{name}.json"
    loader = of(folder / "data", name)
    whole = [digest(batch) for batch in itertools.islice(iter(loader), STOP + 6)]
    if is_to_be_kept(path):
        again = of(folder / "data", name)
        for _ in itertools.islice(iter(again), STOP):
            pass
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(again.state().to_json() + "\n", encoding="utf-8")
    restored = of(folder / "data", name)
    restored.restore(path.read_text(encoding="utf-8"))
    rest = [digest(batch) for batch in itertools.islice(iter(restored), 6)]
    assert rest == whole[STOP:], f"{name}: a kept state goes on with other batches"
    components = json.loads(path.read_text(encoding="utf-8"))["components"]
    return {"rest": rest, "components": components}


@golden("cut_document_cached", "cut_document_streaming")
def through_a_cut_document(folder: Path, name: str) -> Any:
    """Resumed after every batch, where one long document lies over many rows."""
    rows = [{"text": "word " * 900}, *rows_of(30, 3)]
    made = config(
        folder,
        datasets=one_dataset(folder / "long.jsonl", rows),
        streaming=name.endswith("streaming"),
        num_streams=2 if name.endswith("streaming") else None,
        pack=pack("first_fit"),
        load=load(batch_size=2),
    )
    return _every_batch(lambda: chain(made).build())


@golden("bad_rows_streaming")
def through_a_budget_of_bad_rows(folder: Path, _: str) -> Any:
    """Resumed after every batch of a stream with bad rows; the budget counts over the resume."""
    folder.mkdir(exist_ok=True)
    lines = [
        '{"text": "good ' + "word " * (i % 9) + f'{i}"}}' if i % 7 else "{broken"
        for i in range(120)
    ]
    (folder / "bad.jsonl").write_text("\n".join(lines) + "\n")
    datasets = (
        DatasetConfig(
            name="bad", data_files=str(folder / "bad.jsonl"), on_error="skip", max_bad_rows=20
        ),
    )
    made = config(
        folder,
        datasets=datasets,
        streaming=True,
        num_streams=1,
        pack=pack("first_fit"),
        load=load(batch_size=2),
    )
    return _every_batch(lambda: chain(made).build())


def _every_batch(make: Any) -> Any:
    loader = make()
    whole, states = [], [loader.state().to_json()]
    for batch in loader:
        whole.append(digest(batch))
        states.append(loader.state().to_json())
    for number, state in enumerate(states):
        resumed = make()
        resumed.restore(state)
        rest = batches(resumed, first=len(whole))["first"]
        assert rest == whole[number:], f"resumed after batch {number}: other batches"
    return {
        "batches": whole,
        "states": len(states),
        "ledger": None if loader.rows.by_number else ledger(loader.ledger()),
    }

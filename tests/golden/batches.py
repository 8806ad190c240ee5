"""Batches, ledgers, token files and saved folders of some fifty configurations, cached and
streaming.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
from easypipe import (
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    MixStageConfig,
    OrderConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    SaveStageConfig,
    TokenizerConfig,
    TokenizeStageConfig,
    WeightSchedulePoint,
    load_saved,
)
from golden.cases import golden
from golden.data import (
    TOKENIZER,
    chats,
    config,
    one_dataset,
    pairs,
    rows_of,
    texts,
    token_files,
    write,
)
from golden.digests import batches, digest, ledger

ROW = 48
CHAT_ROW = 160  # that holds every conversation
HALF = {"code": 0.5, "docs": 0.5}
SCHEDULE = [
    WeightSchedulePoint(step=0, weights={"code": 0.9, "docs": 0.1}),
    WeightSchedulePoint(step=9, weights={"code": 0.2, "docs": 0.8}),
]
SYSTEM = {
    "trimmed": LengthPolicy(policy="trim_oldest_turns"),
    "middle": LengthPolicy(policy="middle"),
}


def pack(strategy: str = "greedy", **options: Any) -> PackStageConfig:
    return PackStageConfig(**({"seq_length": ROW, "strategy": strategy} | options))


def load(**options: Any) -> LoadStageConfig:
    return LoadStageConfig(**({"batch_size": 4} | options))


def mixed(**options: Any) -> MixStageConfig:
    return MixStageConfig(
        **({"weights": {"code": 0.6, "docs": 0.4}, "stop_strategy": "all_exhausted"} | options)
    )


def chain(made: PipelineConfig) -> Pipeline:
    """The chain that the config describes: a stage is called where the config has it."""
    pipeline = Pipeline(made).source().tokenize()
    for name in ("mix", "pack", "save", "load"):
        if getattr(made, name) is not None:
            pipeline = getattr(pipeline, name)()
    return pipeline


Make = Callable[[Path], PipelineConfig]
CACHED: dict[str, Make] = {
    **{
        name: lambda d, name=name: config(d, mix=mixed(), pack=pack(name), load=load())
        for name in ("greedy", "pool", "first_fit", "stream")
    },
    "unpacked": lambda d: config(d, mix=mixed(), load=load()),
    "one_epoch_in_order": lambda d: config(
        d,
        order=OrderConfig(shuffle=False),
        mix=mixed(),
        pack=pack(shuffle_packed=False),
        load=load(),
    ),
    "blocks_of_rows": lambda d: config(
        d, order=OrderConfig(block_rows=7), mix=mixed(), pack=pack("first_fit"), load=load()
    ),
    "two_epochs": lambda d: config(d, mix=mixed(), pack=pack("first_fit"), load=load(num_epochs=2)),
    "short_last_batch": lambda d: config(
        d, mix=mixed(), pack=pack(), load=load(drop_last=False, batch_size=6)
    ),
    "first_exhausted": lambda d: config(
        d, mix=mixed(stop_strategy="first_exhausted"), pack=pack(), load=load()
    ),
    "restart": lambda d: config(
        d,
        mix=mixed(stop_strategy="restart", weights=HALF),
        pack=pack("first_fit"),
        load=load(num_epochs=None),
    ),
    "by_tokens": lambda d: config(
        d, mix=mixed(unit="tokens", weights=HALF), pack=pack(), load=load()
    ),
    "capped": lambda d: config(
        d,
        mix=mixed(max_epochs={"code": 1}, stop_strategy="restart"),
        pack=pack("first_fit"),
        load=load(num_epochs=None),
    ),
    "provenance": lambda d: config(
        d, mix=mixed(provenance=True), pack=pack("first_fit"), load=load()
    ),
    "schedule_step": lambda d: config(
        d,
        mix=mixed(weights=None, weight_schedule=SCHEDULE, batch_size=4, stop_strategy="restart"),
        pack=pack(),
        load=load(num_epochs=None),
    ),
    "schedule_linear": lambda d: config(
        d,
        mix=mixed(
            weights=None,
            weight_schedule=SCHEDULE,
            weight_schedule_type="linear",
            batch_size=4,
            stop_strategy="restart",
        ),
        pack=pack("first_fit"),
        load=load(num_epochs=None),
    ),
    "segments_row": lambda d: config(
        d, mix=mixed(), pack=pack("stream", segments="row"), load=load()
    ),
    "oversize_truncate": lambda d: config(
        d, mix=mixed(), pack=pack("first_fit", oversize="truncate"), load=load()
    ),
    "oversize_drop": lambda d: config(
        d, mix=mixed(), pack=pack("first_fit", oversize="drop"), load=load()
    ),
    "max_length": lambda d: config(
        d, tokenize=TokenizeStageConfig(max_length=20), mix=mixed(), pack=pack(), load=load()
    ),
    "micro_batches": lambda d: config(d, mix=mixed(), pack=pack(), load=load(accumulation_steps=2)),
    "growing_batches": lambda d: config(
        d, mix=mixed(), pack=pack(), load=load(batch_size_schedule=[(3, 8), (6, 12)])
    ),
    "shuffled_blocks": lambda d: config(
        d, mix=mixed(), pack=pack(), load=load(shuffle_buffer_size=16)
    ),
    "grouped": lambda d: config(d, mix=mixed(), load=load(group_by_length=16)),
    "no_segments": lambda d: config(
        d, mix=mixed(), pack=pack(include_segment_ids=False), load=load()
    ),
    "padded_left": lambda d: config(
        d,
        default_tokenizer=TokenizerConfig(
            name_or_path=str(TOKENIZER),
            padding_side="left",
            pad_to_multiple_of=8,
            return_attention_mask=True,
        ),
        mix=mixed(),
        load=load(),
    ),
    "chat": lambda d: config(
        d,
        datasets=one_dataset(
            d / "chat.jsonl", chats(40), content_field="messages", train_on="assistant"
        ),
        pack=pack("first_fit"),
        load=load(),
    ),
    "chat_whole": lambda d: config(
        d,
        datasets=one_dataset(
            d / "chat.jsonl", chats(40), content_field="messages", train_on="assistant"
        ),
        pack=pack("first_fit", seq_length=CHAT_ROW),
        load=load(),
    ),
    "chat_last_answer": lambda d: config(
        d,
        datasets=one_dataset(
            d / "chat.jsonl",
            chats(40),
            content_field="messages",
            train_on="last_assistant",
            length=SYSTEM["trimmed"],
        ),
        tokenize=TokenizeStageConfig(max_length=60),
        load=load(),
    ),
    "alpaca": lambda d: config(
        d,
        datasets=one_dataset(
            d / "rows.jsonl",
            [
                {
                    "instruction": row["prompt"],
                    "input": row["chosen"][:5],
                    "output": row["completion"],
                }
                for row in pairs(30)
            ],
            prompt=PromptConfig(format_type="alpaca"),
        ),
        pack=pack("first_fit"),
        load=load(),
    ),
    "prompt_completion": lambda d: config(
        d,
        datasets=one_dataset(
            d / "rows.jsonl", pairs(40), prompt_field="prompt", completion_field="completion"
        ),
        pack=pack("first_fit"),
        load=load(),
    ),
    "preferences": lambda d: config(
        d,
        datasets=one_dataset(
            d / "pairs.jsonl",
            pairs(40),
            prompt=PromptConfig(
                format_type="prompt_completion",
                input_columns=["prompt"],
                label_column="chosen",
                rejected_column="rejected",
            ),
        ),
        pack=pack("first_fit", oversize="drop"),
        load=load(),
    ),
    "token_files": lambda d: config(
        d, datasets=token_files(d), pack=pack("first_fit"), load=load()
    ),
    "middle_of_long": lambda d: config(
        d,
        datasets=one_dataset(d / "long.jsonl", rows_of(40, 3, 90), length=SYSTEM["middle"]),
        tokenize=TokenizeStageConfig(max_length=40),
        pack=pack(),
        load=load(),
    ),
}

STREAMED = (
    *(
        "greedy",
        "pool",
        "first_fit",
        "stream",
        "unpacked",
        "by_tokens",
        "schedule_step",
        "schedule_linear",
        "capped",
        "restart",
    ),
    *(
        "two_epochs",
        "short_last_batch",
        "oversize_drop",
        "max_length",
        "chat",
        "chat_whole",
        "prompt_completion",
        "micro_batches",
        "growing_batches",
    ),
)
MOST = 30  # batches of a mixture that does not end


@golden(*CACHED)
def cached(folder: Path, name: str) -> Any:
    """Batches, the ledger, and the documents of every token cache."""
    pipeline = chain(CACHED[name](folder))
    found: dict[str, Any] = {
        "batches": batches(pipeline.build(), most=MOST if _endless(pipeline) else 10_000)
    }
    found["ledger"] = ledger(pipeline.ledger())
    found["tokens"] = {
        of: digest(source.read(shard, 0, info.num_rows))
        for of, source in pipeline.tokenized().items()
        for shard, info in enumerate(source.shards)
    }
    return found


@golden(*(f"streaming_{name}" for name in STREAMED))
def streaming(folder: Path, name: str) -> Any:
    made = dataclasses.replace(
        CACHED[name.removeprefix("streaming_")](folder), streaming=True, num_streams=2
    )
    pipeline = chain(made)
    loader = pipeline.build()
    return {"batches": batches(loader, most=MOST), "ledger": ledger(loader.ledger())}


@golden("ranks", "streaming_ranks")
def of_ranks(folder: Path, name: str) -> Any:
    """The batches of each of two ranks: together they have the rows of one that is twice as large."""
    made = CACHED["first_fit"](folder)
    if name == "streaming_ranks":
        made = dataclasses.replace(made, streaming=True, num_streams=2)
    whole = chain(dataclasses.replace(made, load=load(batch_size=8))).build()
    ranks = [list(chain(made).build().of_rank(rank, 2)) for rank in (0, 1)]
    for one, *parts in zip(whole, *ranks, strict=False):
        rows = [sorted(row.tobytes() for row in part["input_ids"]) for part in (one, *parts)]
        assert rows[0] == sorted(rows[1] + rows[2])
    return [batches(rank) for rank in ranks]


@golden()
def streaming_processes(folder: Path) -> Any:
    """The same of two processes, each of which reads the files of its own streams."""
    made = [
        forked.run(
            [
                sys.executable,
                "-c",
                f"from golden import batches; batches.rank({str(folder)!r}, {rank})",
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for rank in (0, 1)
    ]
    return [json.loads(text) for text in made]


def rank(folder: str, rank: int) -> None:
    """Prints what one of two processes gets of a stream."""
    made = dataclasses.replace(CACHED["first_fit"](Path(folder)), streaming=True, num_streams=2)
    print(json.dumps(batches(chain(made).build().of_rank(rank, 2))))


def _endless(pipeline: Pipeline) -> bool:
    load_config = pipeline.get_context().config.load
    return load_config is not None and load_config.num_epochs is None


SAVED: dict[str, Callable[[Path], PipelineConfig]] = {
    "saved_packed": lambda d: config(
        d,
        mix=mixed(),
        pack=pack("first_fit"),
        save=SaveStageConfig(output_dir=d / "out", num_shards=3),
    ),
    "saved_tokens": lambda d: config(
        d, mix=mixed(), save=SaveStageConfig(output_dir=d / "out", format="arrow")
    ),
    "saved_jsonl": lambda d: config(
        d,
        mix=mixed(),
        pack=pack("stream"),
        save=SaveStageConfig(output_dir=d / "out", format="jsonl"),
    ),
    "saved_chat": lambda d: config(
        d,
        datasets=one_dataset(
            d / "chat.jsonl", chats(30), content_field="messages", train_on="assistant"
        ),
        pack=pack("first_fit"),
        save=SaveStageConfig(output_dir=d / "out"),
    ),
}


@golden(*SAVED)
def saved(folder: Path, name: str) -> Any:
    """What stands in a saved folder, shard by shard, and the batches of a pipeline that loads
    it.
    """
    pipeline = chain(SAVED[name](folder))
    report = pipeline.build()
    source = load_saved(folder / "out")
    shards = {}
    for shard, info in enumerate(source.shards):
        shards[Path(info.name).name] = [info.num_rows, digest(source.read(shard, 0, info.num_rows))]
    again = PipelineConfig(
        datasets=[DatasetConfig(name="again", data_files=str(folder / "out"))],
        default_tokenizer=str(TOKENIZER),
        seed=3,
        cache_dir=folder / "cache",
        pack=None if "tokens" not in name else pack("first_fit"),
        load=load(),
    )
    return {
        "rows": report.rows if hasattr(report, "rows") else None,
        "shards": shards,
        "ledger": ledger(pipeline.ledger()),
        "batches": batches(chain(again).build()),
    }


@golden("raw_texts")
def raw(folder: Path, _: str) -> Any:
    """The same text from every format gives the same batches: one digest, and one of the order of
    the files.
    """
    rows = rows_of(40, 3)
    found = {}
    for ending in (
        "jsonl",
        "jsonl.gz",
        "jsonl.zst",
        "jsonl.bz2",
        "json",
        "csv",
        "parquet",
        "arrow",
    ):
        path = write(folder / ending.replace(".", "_") / f"a.{ending}", rows)
        made = config(
            folder,
            datasets=[DatasetConfig(name="data", data_files=str(path))],
            pack=pack("first_fit"),
            load=load(),
        )
        found[ending] = batches(chain(made).build())["all"]
    found["memory"] = batches(
        chain(
            config(
                folder,
                datasets=[DatasetConfig(name="data", data_files={"text": texts(40, 3)})],
                pack=pack("first_fit"),
                load=load(),
            )
        ).build()
    )["all"]
    return found

"""Compares how fast easypipe's token cache and `datasets.map`, called as TRL calls it, tokenize the
same conversations with loss masks, by the same template.

The peer calls `apply_chat_template(tokenize=True, return_dict=True,
return_assistant_tokens_mask=True)` on every row, as TRL's SFTTrainer does with assistant_only_loss,
and writes Arrow. easypipe renders in its worker processes, encodes, and commits a token cache. Both
read Arrow rows that lie in memory, in two processes or threads. The masks of a sample of rows are
compared before anything is timed.

--unmarked: the same template without generation markers for easypipe, which then proves each span;
the peer cannot do that.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from _common import SHARED, Report, alternate, arguments, gpt2_tokenizer

WORKERS = 2


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows of `messages` and `tools` as JSON, and the GSM8K problems as turns, each made unlike the
    others.
    """
    with_tools = [
        json.loads(line)
        for line in (SHARED / "chat" / "openai_messages_tools_150.jsonl").read_text().splitlines()
    ]
    problems = [
        json.loads(line)
        for line in (SHARED / "chat" / "gsm8k_train_3000.jsonl").read_text().splitlines()
    ]
    rows = []
    for i in range(count):
        if i % 4 == 0:
            row = with_tools[i // 4 % len(with_tools)]
            rows.append({"messages": row["messages"], "tools": row.get("tools")})
        else:
            problem = problems[i % len(problems)]
            said = [("user", f"({i}) {problem['question']}"), ("assistant", problem["answer"])]
            rows.append(
                {
                    "messages": [{"role": role, "content": content} for role, content in said],
                    "tools": None,
                }
            )
    return [{name: json.dumps(value) for name, value in row.items()} for row in rows]


def ours(rows: Any, tokenizer: Path, template: str, cache: Path) -> Any:
    from easypipe import DatasetConfig, Pipeline, PipelineConfig, TokenizeStageConfig

    dataset = DatasetConfig(
        name="sft",
        data_files=rows,
        tokenizer=str(tokenizer),
        content_field="messages",
        chat_template=template,
    )
    config = PipelineConfig(
        datasets=[dataset],
        seed=1,
        cache_dir=cache,
        tokenize=TokenizeStageConfig(num_workers=WORKERS),
    )
    return Pipeline.from_config(config).source().tokenize().get_data()["sft"].materialize()


def theirs(rows: Any, tokenizer: Path, template: str, out: Path) -> Any:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    options = {"path": str(tokenizer / "tokenizer.json"), "template": template}
    return rows.map(
        _encode,
        fn_kwargs=options,
        num_proc=WORKERS,
        remove_columns=rows.column_names,
        cache_file_name=str(out / "a.arrow"),
    )


def _encode(row: dict[str, Any], path: str, template: str) -> dict[str, Any]:
    import transformers

    tokenizer = _LOADED.get(path)
    if tokenizer is None:
        tokenizer = _LOADED[path] = transformers.PreTrainedTokenizerFast(tokenizer_file=path)
    found: Any = tokenizer.apply_chat_template(
        json.loads(row["messages"]),
        tools=json.loads(row["tools"]),
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return {"input_ids": found["input_ids"], "assistant_masks": found["assistant_masks"]}


_LOADED: dict[str, Any] = {}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--unmarked", action="store_true")
    options = parser.parse_args()
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    tokenizer = gpt2_tokenizer()
    if tokenizer is None:
        raise SystemExit("needs ../shared/data")
    marked = (SHARED / "templates" / "qwen2_5_training.jinja").read_text(encoding="utf-8")
    template = (
        (SHARED / "templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
        if options.unmarked
        else marked
    )
    table = pa.Table.from_pylist(conversations(options.rows))
    rows = datasets.Dataset(table)
    report = Report("sft_unmarked" if options.unmarked else "sft", "rows/s")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        os.environ["EASYPIPE_CACHE"] = str(scratch / "user")
        cache, made = (
            ours(table, tokenizer, template, scratch / "check"),
            theirs(rows, tokenizer, marked, scratch / "peer"),
        )
        first = cache.read(0, 0, len(rows)).slice(0, 200).to_pylist()
        if not options.unmarked:
            for own in first:
                peer: Any = made[own["__row_number__"]]
                if (own["input_ids"], own["loss_mask"]) != (
                    peer["input_ids"],
                    peer["assistant_masks"],
                ):
                    raise SystemExit(f"row {own['__row_number__']}: other tokens, or another mask")
        report.facts["rows"], report.facts["tokens_a_row"] = (
            len(rows),
            round(cache.manifest.counts.tokens / cache.num_docs),
        )

        def run_ours() -> float:
            ours(table, tokenizer, template, scratch / "ours")
            return len(rows)

        def run_theirs() -> float:
            theirs(rows, tokenizer, marked, scratch / "peer")
            return len(rows)

        def clear(name: str) -> None:
            for part in ("tokens", "ranges", "manifests"):
                shutil.rmtree(scratch / "ours" / part, ignore_errors=True)

        alternate(report, {"easypipe": run_ours, "datasets.map": run_theirs}, options.rounds, clear)
    report.target(
        "times the speed of datasets.map with apply_chat_template",
        report.ratio("easypipe", "datasets.map"),
        at_least=5 if options.unmarked else 8,
    )
    report.finish(options.out)


if __name__ == "__main__":
    main()

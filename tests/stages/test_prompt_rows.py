"""Conversations and prompts with completions: from rows to labels, with every token accounted
for.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laws
import strategies
from chat_support import (
    CHATML,
    MARKED,
    SHARED,
    chat_tokenizer,
    needs_shared,
    talk,
    talks,
    without_template,
)
from easypipe import (
    DatasetConfig,
    LengthPolicy,
    LoadStageConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    PromptConfig,
    SaveStageConfig,
    load_tokenizer,
)
from easypipe.core.errors import ConfigError, SourceError, TokenizerError
from easypipe.core.protocols import SourceInfo, Turns
from easypipe.core.schema import INPUT_IDS, LABELS, LOSS_MASK, SEGMENT_IDS
from easypipe.sources.external.memory import InMemoryShardedSource
from easypipe.stages.tokenize.documents import TokenizedShardedSource, trained_turns
from easypipe.transforms.chat.render import ChatTemplate, HostileTemplateError
from pipelines import jsonl
from strategies import examples


def dataset(data: Any, **options: Any) -> DatasetConfig:
    return DatasetConfig(
        **{
            "name": "chat",
            "data_files": data,
            "tokenizer": chat_tokenizer(),
            "content_field": "messages",
        }
        | options
    )


def tokenized(folder: Path, data: Any, **options: Any) -> TokenizedShardedSource:
    config = PipelineConfig(datasets=[dataset(data, **options)], seed=1, cache_dir=folder)
    source = Pipeline.from_config(config).source().tokenize().get_data()["chat"]
    assert isinstance(source, TokenizedShardedSource)
    return source


def documents(source: TokenizedShardedSource) -> list[tuple[list[int], list[int]]]:
    batch = source.read(0, 0, source.shards[0].num_rows)
    return list(
        zip(batch.column(INPUT_IDS).to_pylist(), batch.column(LOSS_MASK).to_pylist(), strict=True)
    )


def targets(document: tuple[list[int], list[int]]) -> str:
    return load_tokenizer(chat_tokenizer()).decode(
        [i for i, flag in zip(*document, strict=True) if flag]
    )


def reasons(source: TokenizedShardedSource) -> dict[int, str]:
    return {
        reject.row: reject.reason for reject in source.scan(0, 0, source.shards[0].num_rows).rejects
    }


def batches(
    folder: Path,
    data: Any,
    *,
    pack: PackStageConfig | None,
    streaming: bool = False,
    **options: Any,
) -> list[dict[str, np.ndarray]]:
    load = LoadStageConfig(batch_size=3, drop_last=False)
    more: dict[str, Any] = {"streaming": True, "num_streams": 1} if streaming else {}
    config = PipelineConfig(
        datasets=[dataset(data, **options)], load=load, seed=3, cache_dir=folder, **more
    )
    pipeline = Pipeline.from_config(config).source().tokenize()
    pipeline = pipeline.pack(pack) if pack is not None else pipeline
    return [
        {name: np.asarray(values) for name, values in batch.items()}
        for batch in pipeline.load().build()
    ]


def test_a_missing_answer_is_named_before_options_of_conversations(tmp_path: Path) -> None:
    fields = {"prompt_field": "prompt", "completion_field": "answer", "chat_template": MARKED}
    message = r"column 'answer': no such column \(have: prompt, reply\)"
    with pytest.raises(SourceError, match=message):
        tokenized(tmp_path, [{"prompt": "a", "reply": "b"}], content_field="text", **fields)


def test_the_words_of_the_assistant_are_the_targets(tmp_path: Path) -> None:
    rows = [{"messages": talk("the quick", "Four.", "Sure?", "Yes", system="Be brief.")}]
    ids, mask = documents(tokenized(tmp_path, rows))[0]
    tokenizer = load_tokenizer(chat_tokenizer())
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe "
        "quick<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    )
    assert tokenizer.decode(ids).startswith(expected)
    assert targets((ids, mask)) == "Four.<|im_end|>Yes<|im_end|>"
    assert (
        targets(documents(tokenized(tmp_path, rows, train_on="completion"))[0]) == "Yes<|im_end|>"
    )
    assert targets(documents(tokenized(tmp_path, rows, train_on="all"))[0]) == tokenizer.decode(ids)
    assert (
        targets(documents(tokenized(tmp_path, rows, chat_template=MARKED))[0])
        == "Four.<|im_end|>Yes<|im_end|>"
    )


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    rows = talks(25)
    jsonl(tmp_path / "rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    as_text = [{"messages": json.dumps(row["messages"])} for row in rows]
    expected = documents(tokenized(tmp_path / "cache", rows))
    assert len(expected) == 25
    for data in (str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.parquet"), as_text):
        assert documents(tokenized(tmp_path / "cache", data)) == expected


@examples(12)
@given(st.data())
def test_reads_are_stateless_and_equal_the_cache(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    said = st.lists(st.one_of(strategies.texts(), st.none()), min_size=1, max_size=5)
    rows = [
        {"messages": talk(*turns)} for turns in data.draw(st.lists(said, min_size=1, max_size=8))
    ] + talks(2)
    options = data.draw(
        st.sampled_from(
            [{}, {"train_on": "all"}, {"train_on": "completion"}, {"chat_template": MARKED}]
        )
    )
    source = tokenized(tmp_path_factory.mktemp("cache"), rows, on_error="skip", **options)
    laws.assert_stateless_reads(source, data.draw(strategies.row_cuts()))
    cache = source.materialize()
    assert cache.read(0, 0, len(rows)).equals(source.read(0, 0, len(rows)))
    cache.ledger.check()
    entry = cache.ledger.find("loss_mask", "chat", "tokens")
    assert entry.out["targets"] == sum(sum(mask) for _, mask in documents(source))
    for ids, mask in documents(source):
        assert any(mask[1:])
        assert len(ids) == len(mask)


def test_rows_that_are_no_conversation_are_rejected_by_name(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "null": None,
        "empty": "[]",
        "not_json": "[{",
        "not_a_list": '{"role": "user", "content": "x"}',
        "not_a_message": '["x"]',
        "no_role": '[{"content": "x"}]',
        "multimodal": '[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]',
        "refused_by_template": '[{"role": "user"}]',
        "nothing_to_train": '[{"role": "user", "content": "x"}]',
        "invalid_utf8": '[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": '
        '"x"}]',
    }
    rows = [{"messages": value} for value in wrong.values()] + [
        {"messages": json.dumps(talk("a", "b"))}
    ]
    source = tokenized(tmp_path, rows, on_error="quarantine")
    assert list(reasons(source).values()) == list(wrong)
    cache = source.materialize()
    assert cache.num_docs == 1
    ledger = cache.ledger.find("tokenize", "chat", "rows")
    assert ledger.out == {"written": 1, **dict.fromkeys(sorted(wrong), 1)}
    assert cache.quarantine is not None
    set_aside = [json.loads(line) for line in cache.quarantine.read_text().splitlines()]
    assert [row["reason"] for row in set_aside] == [
        reason for reason in wrong if reason not in ("empty", "nothing_to_train")
    ]
    assert "part of type 'image_url'" in next(
        row["detail"] for row in set_aside if row["reason"] == "multimodal"
    )


@pytest.mark.parametrize("first", [["system"], ["developer"], ["system", "developer"]])
def test_what_the_developer_says_first_stays_as_what_the_system_says(
    tmp_path: Path, first: list[str]
) -> None:
    said = [{"role": role, "content": f"of the {role}"} for role in first]
    rows = [{"messages": [*said, *talk(*(f"{n} so so so" for n in range(10)))]}]
    trim: dict[str, Any] = {"length": LengthPolicy(policy="trim_oldest_turns")}
    config = PipelineConfig(
        datasets=[dataset(rows, chat_template=CHATML)],
        pack=PackStageConfig(seq_length=180),
        seed=1,
        cache_dir=tmp_path,
    )
    split = Pipeline.from_config(config).source().tokenize().get_data()["chat"]
    cut = tokenized(
        tmp_path, rows, chat_template=CHATML, tokenizer_kwargs={"max_length": 180}, **trim
    )
    assert (split.read(0, 0, 1).num_rows, cut.read(0, 0, 1).num_rows) > (1, 0)
    whole = "".join(f"<|im_start|>{role}\nof the {role}<|im_end|>\n" for role in first)
    for source in (split, cut):
        for ids in source.read(0, 0, 1)[INPUT_IDS].to_pylist():
            assert (
                load_tokenizer(chat_tokenizer()).decode(ids).startswith(f"{whole}<|im_start|>user")
            )


def test_arguments_that_are_nested_too_deeply_end_no_worker(tmp_path: Path) -> None:
    """Five rows in sequence that end their worker would blame the template.

    The JSON of newer Pythons reads 600 levels, which the proof of spans then refuses.
    """
    calls = [{"function": {"name": "f", "arguments": "deep"}}]
    said = json.dumps([*talk("a"), {"role": "assistant", "content": "b", "tool_calls": calls}])
    at_600 = "not_json" if sys.version_info < (3, 12) else "unproven_spans"
    for depth, reason in ((600, at_600), (100_000, "not_json")):
        deep = said.replace('"deep"', "[" * depth + "]" * depth)
        rows = [{"messages": value} for value in (*[deep] * 6, json.dumps(talk("a", "b")))]
        found = reasons(tokenized(tmp_path / str(depth), rows, on_error="skip"))
        assert found == dict.fromkeys(range(6), reason)


def test_half_of_a_surrogate_pair_in_the_reason_is_set_aside(tmp_path: Path) -> None:
    told = "{{ raise_exception('not from ' + messages[0].role) }}"
    template = f"{{% if messages[0].role not in 'user' %}}{told}{{% endif %}}{CHATML}"
    odd = '[{"role": "\\ud800", "content": "x"}]'
    rows = [{"messages": value} for value in (odd, json.dumps(talk("a", "b")))]
    source = tokenized(tmp_path, rows, on_error="quarantine", chat_template=template)
    (line,) = source.materialize().quarantine.read_text().splitlines()
    assert json.loads(line)["detail"] == "not from \ud800"


def test_maps_are_objects_for_templates(tmp_path: Path) -> None:
    """Parquet files of Spark have them; as lists of pairs they would be printed as such."""
    kinds = {"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())}
    call = pa.struct({"function": pa.struct(kinds)})
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(call)})
    calls = [{"function": {"name": "f", "arguments": {"city": "Bern"}}}]
    row = {
        "messages": [*talk("a", "b"), {"role": "assistant", "content": "", "tool_calls": calls}],
        "chat_template_kwargs": {"mood": "kind"},
    }
    types = {"messages": pa.list_(message), "chat_template_kwargs": kinds["arguments"]}
    pq.write_table(pa.Table.from_pylist([row], pa.schema(types)), tmp_path / "maps.parquet")
    template = CHATML.replace(
        "['content']", "['content'] + (message.tool_calls or [])|tojson + mood"
    )
    made = [
        tokenized(tmp_path / str(i), data, chat_template=template, train_on="all")
        for i, data in enumerate((str(tmp_path / "maps.parquet"), [row]))
    ]
    assert documents(made[0]) == documents(made[1])
    table = pa.Table.from_pylist([{"f": {"city": "Bern"}}], pa.schema({"f": kinds["arguments"]}))
    prompt = PromptConfig(format_type="custom", template="{{ f.city }}", input_columns=("f",))
    pq.write_table(table, tmp_path / "custom.parquet")
    found = tokenized(
        tmp_path / "c", str(tmp_path / "custom.parquet"), content_field="text", prompt=prompt
    )
    ((ids, _),) = documents(found)
    assert load_tokenizer(chat_tokenizer()).decode(ids).startswith("Bern")


def test_a_bad_row_stops_where_errors_do_and_names_its_place(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "rows.jsonl",
        [
            *talks(2),
            {
                "messages": [
                    {"role": "user", "content": None},
                    {"role": "assistant", "content": "x"},
                ]
            },
        ],
    )
    with pytest.raises(
        SourceError, match=r"rows.jsonl, row 2, column 'messages': refused_by_template: .*on_error"
    ):
        tokenized(tmp_path / "cache", str(path)).materialize()
    benign = tokenized(tmp_path / "cache", [*talks(2), {"messages": talk("only a question")}])
    assert benign.materialize().num_docs == 2


def test_a_hostile_template_stops_whatever_on_error_says(tmp_path: Path) -> None:
    with pytest.raises(
        HostileTemplateError, match=r"row 0, column 'messages': .*too much"
    ) as caught:
        tokenized(
            tmp_path,
            talks(2),
            chat_template="{% for i in range(10**9) %}{% endfor %}",
            on_error="skip",
        ).materialize()
    assert isinstance(caught.value, TokenizerError)


def test_a_row_that_takes_too_long_is_a_bad_row(tmp_path: Path) -> None:
    """Two giant conversations, of which the second alone fills a request: both end their worker."""
    giant = {"messages": [m for _ in range(20_000) for m in talk("ask", "say")]}
    rows = [*talks(70), giant, *talks(3), giant, *talks(5)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    cache = tokenized(tmp_path / "cache", str(path), on_error="skip").materialize()
    assert cache.num_docs == 78
    assert cache.manifest.counts.rejects == {"beyond_limits": 2}
    helps = "Leave such rows out, cut them before, or give a simpler chat_template, or set on_error"
    with pytest.raises(
        SourceError, match=rf"row 70, column 'messages': beyond_limits: it takes.*{helps}"
    ):
        tokenized(tmp_path / "other", str(path)).materialize()


def test_a_template_that_always_takes_too_long_stops_whatever_on_error_says(
    tmp_path: Path,
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    short = f"{{% if messages|length < 9 %}}{CHATML}{{% else %}}{endless}{{% endif %}}"
    rows = [{"messages": talk(*"abcdefghijkl")}] * 50
    for template, row in ((endless, 0), (short, 4)):
        with pytest.raises(
            HostileTemplateError, match=rf"row {row}, column 'messages': .*processor time"
        ):
            tokenized(tmp_path, rows, chat_template=template, on_error="skip").materialize()


def test_rows_are_known_by_their_numbers_where_several_processes_render_them(
    tmp_path: Path,
) -> None:
    rows = [{"messages": talk(f"row {i}", "fine")} for i in range(2100)]
    source = tokenized(tmp_path, rows)
    texts = source.form.read(source.source, 0, 0, len(rows))
    assert all(
        f"row {i}<|im_end|>" in text
        for i, text in zip(texts.rows.tolist(), texts.texts.to_pylist(), strict=True)
    )
    assert len(texts.texts) == len(rows)
    hostile = (
        "{% if messages[0].content == 'row 2050' %}{% for i in range(10**9) %}{% endfor %}{% endif "
        "%}" + CHATML
    )
    with pytest.raises(HostileTemplateError, match=r"row 2050, column 'messages': .*too much"):
        tokenized(tmp_path, rows, chat_template=hostile).read(0, 0, len(rows))


@pytest.mark.parametrize("reasoning", ["keep", "per_turn"])
def test_a_row_is_known_by_its_number_where_it_is_rendered_again_without_turns(
    tmp_path: Path, reasoning: Any
) -> None:
    """The template is hostile only to what is left of the last row."""
    hostile = "{% if messages[0].content == 'late' %}{{ lipsum() }}{% endif %}" + CHATML.replace(
        "message['content']",
        "(loop.last and message.thinking or '') + message['content']",
    )
    long = talk("early " * 90, "one", "late", "two")
    rows = [{"messages": talk("a", "b", "c", "d")}, {"messages": long}]
    for message in (one for row in rows for one in row["messages"][1::2]):
        message["reasoning_content"] = "<think>So.</think>"
    with pytest.raises(HostileTemplateError, match=r"row 1, column 'messages': .*lipsum"):
        tokenized(
            tmp_path,
            rows,
            content_field="text",
            prompt=PromptConfig(template=hostile, reasoning=reasoning),
            tokenizer_kwargs={"max_length": 120},
            length=LengthPolicy(policy="trim_oldest_turns"),
        ).materialize()


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools|tojson }}{% endif %}" + CHATML
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"messages": talk("a", "b"), "tools": tools, "functions": tools[:0]},
        {"messages": talk("a", "b"), "tools": None, "functions": tools},
    ]
    decode = load_tokenizer(chat_tokenizer()).decode

    def starts(**options: Any) -> list[bool]:
        found = documents(tokenized(tmp_path, rows, chat_template=template, **options))
        return [
            decode(ids).startswith('[{"type": "function", "function": {"name": "f"}}]<|im_start|>')
            for ids, _ in found
        ]

    assert starts() == [True, False]
    assert starts(tools_field="functions") == [False, True]
    with pytest.raises(SourceError, match="column 'nowhere': no such column"):
        tokenized(tmp_path, rows, tools_field="nowhere")


def test_keys_that_arrow_filled_up_with_null_are_not_there(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.name is defined %}({{ m.name }}){% "
        "endif %}:{{ m.content }}<|im_end|>{% endfor %}"
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a", "name": "Ann"},
                {"role": "assistant", "content": "b"},
            ]
        }
    ]
    ids, _ = documents(tokenized(tmp_path, rows, chat_template=template))[0]
    assert (
        load_tokenizer(chat_tokenizer()).decode(ids) == "user(Ann):a<|im_end|>assistant:b<|im_end|>"
    )


@needs_shared
@pytest.mark.shared
def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path) -> None:
    """`apply_chat_template(tokenize=True, return_assistant_tokens_mask=True)` of a template with
    markers, row by row.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install easypipe[compare]"
    )
    lines = (
        (SHARED / "chat" / "openai_messages_tools_150.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[:30]
    )
    rows = [json.loads(line) for line in lines]
    rows += [
        {"messages": talk("naïve 日本 😀", "  ﬁrst 😀 \n", "a\u0301", "x")},
        {"messages": talk("1", " ")},
    ]
    template = (SHARED / "templates" / "qwen2_5_training.jinja").read_text(encoding="utf-8")
    # torchtitan_tiny drops characters, and transformers then loses whole turns
    for name in ("gpt2", "mistral_v1", "olmo_neox"):
        folder = SHARED / "tokenizers" / name
        reference = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )
        as_text = [
            {"messages": json.dumps(row["messages"]), "tools": json.dumps(row.get("tools"))}
            for row in rows
        ]
        source = tokenized(tmp_path, as_text, tokenizer=str(folder), chat_template=template)
        for row, (ids, mask) in zip(rows, documents(source), strict=True):
            expected = reference.apply_chat_template(
                row["messages"],
                tools=row.get("tools"),
                chat_template=template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            assert ids == expected["input_ids"], (name, row)
            assert mask == expected["assistant_masks"], (name, row)


def test_values_that_json_does_not_know_reach_templates_as_text(tmp_path: Path) -> None:
    day = {"role": "user", "content": "a", "at": datetime.date(2026, 1, 31)}
    template = "{{ messages[0].at }}<|im_end|>{{ messages[1].content }}<|im_end|>"
    ids, _ = documents(
        tokenized(
            tmp_path,
            [{"messages": [day, {"role": "assistant", "content": "b"}]}],
            chat_template=template,
        )
    )[0]
    assert load_tokenizer(chat_tokenizer()).decode(ids) == "2026-01-31<|im_end|>b<|im_end|>"


def test_prompts_and_completions(tmp_path: Path) -> None:
    rows = [
        {"q": "the quick ", "a": "brown fox"},
        {"q": "x", "a": ""},
        {"q": "", "a": "Four."},
        {"q": None, "a": "y"},
        {"q": "", "a": ""},
    ]
    columns = {"prompt_field": "q", "completion_field": "a", "on_error": "skip"}
    source = tokenized(tmp_path, rows, **columns)
    found = documents(source)
    # The token " brown" stands for the last character of the prompt and for the completion: it is a
    # target.
    assert [targets(document) for document in found] == [" brown fox<|im_end|>", "Four.<|im_end|>"]
    assert reasons(source) == {1: "nothing_to_train", 3: "null", 4: "empty"}
    assert source.materialize().read(0, 0, 5).equals(source.read(0, 0, 5))
    laws.assert_stateless_reads(source)
    everything = documents(tokenized(tmp_path, rows, train_on="all", **columns))
    assert [targets(document) for document in everything] == [
        "the quick brown fox<|im_end|>",
        "x<|im_end|>",
        "Four.<|im_end|>",
    ]


def test_what_max_length_leaves_untrained_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": talk("the quick brown fox " * 5, "Four.")},
        {"messages": talk("a", "Four. " * 30)},
        {"messages": talk("the", "fox")},
    ]
    config = {"name_or_path": chat_tokenizer(), "max_length": 40}
    source = tokenized(tmp_path, rows, tokenizer=config)
    assert reasons(source) == {0: "nothing_to_train"}
    ledger = source.materialize().ledger
    tokens = ledger.find("tokenize", "chat", "tokens")
    assert tokens.out["truncated"] > 0
    whole = documents(tokenized(tmp_path, rows))
    for (ids, mask), (full_ids, full_mask) in zip(documents(source), whole[1:], strict=True):
        assert (ids, mask) == (full_ids[:40], full_mask[:40])


def test_the_cache_is_used_again_and_not_for_another_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = talks(12)
    first = tokenized(tmp_path, rows)
    path = first.materialize().path
    others = [{"train_on": "all"}, {"chat_template": MARKED}, {"template_date": "2026-01-31"}]
    assert (
        len(
            {path, *(tokenized(tmp_path, rows, **options).materialize().path for options in others)}
        )
        == 4
    )
    assert (
        len(
            {
                first.fingerprint,
                *(tokenized(tmp_path, rows, **options).fingerprint for options in others),
            }
        )
        == 4
    )

    def never(*_: Any) -> None:
        raise AssertionError("rendered again")

    monkeypatch.setattr(ChatTemplate, "render", never)
    assert tokenized(tmp_path, rows).materialize().path == path


def own_labels(
    documents: list[tuple[list[int], list[int]]], rows: Mapping[str, np.ndarray]
) -> None:
    """Every segment of packed rows is a document, whole; its labels are its targets, one slot
    earlier.
    """
    seen = []
    for r in range(len(rows[INPUT_IDS])):
        for segment in range(1, rows[SEGMENT_IDS][r].max() + 1):
            here = rows[SEGMENT_IDS][r] == segment
            seen.append((rows[INPUT_IDS][r][here].tolist(), rows[LABELS][r][here].tolist()))
    expected = [
        (ids, [i if flag else -100 for i, flag in zip(ids[1:], mask[1:], strict=True)] + [-100])
        for ids, mask in documents
    ]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("strategy", ["greedy", "pool", "first_fit"])
def test_masks_reach_the_labels_through_packing(tmp_path: Path, strategy: Any) -> None:
    rows = talks(40)
    pack = PackStageConfig(seq_length=256, strategy=strategy)
    whole = documents(tokenized(tmp_path, rows))
    assert all(len(ids) <= 256 for ids, _ in whole)
    found = batches(tmp_path, rows, pack=pack)
    for batch in found:
        laws.assert_labels(batch | {LABELS: batch[LABELS]}, _mask_of(batch))
    own_labels(whole, {name: np.concatenate([batch[name] for batch in found]) for name in found[0]})


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
def test_the_ledger_knows_what_is_trained_and_what_is_masked(tmp_path: Path, oversize: Any) -> None:
    """placed = targets + masked + segment starts, and the targets are the labels that a loader
    gives.
    """
    rows, text = exchanges(20), [{"text": "the quick brown fox " * n} for n in range(1, 12)]
    datasets = [
        dataset(rows),
        DatasetConfig(name="text", data_files=text, tokenizer=chat_tokenizer()),
    ]
    pack = PackStageConfig(seq_length=60, oversize=oversize)
    mix = {"weights": {"chat": 0.5, "text": 0.5}, "stop_strategy": "all_exhausted"}
    load = LoadStageConfig(batch_size=2, drop_last=False)
    config = PipelineConfig(datasets=datasets, mix=mix, load=load, seed=3, cache_dir=tmp_path)  # type: ignore[arg-type]
    for packed in (True, False):
        pipeline = Pipeline.from_config(config).source().tokenize().mix()
        pipeline = (pipeline.pack(pack) if packed else pipeline).load()
        trained = sum(int((np.asarray(batch[LABELS]) >= 0).sum()) for batch in pipeline.build())
        ledger = pipeline.ledger()
        entries = [ledger.find("labels", name, "tokens") for name in ("chat", "text")]
        assert sum(entry.out["targets"] for entry in entries) == trained
        assert entries[0].out["masked"] > 0
        assert "masked" not in entries[1].out
        assert ("without their prompt" in entries[0].out) == (packed and oversize == "split")
        ledger.check()


def _mask_of(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """1 at every slot whose token is somebody's label."""
    return np.concatenate([np.zeros_like(batch[LABELS][:, :1]), batch[LABELS][:, :-1] >= 0], axis=1)


def exchanges(count: int) -> list[dict[str, Any]]:
    """A question and an answer each, so that no row of packing cuts them between turns."""
    return [
        {"messages": talk("fox " * (1 + i % 5), f"{i} Four. " * (1 + i % 9))} for i in range(count)
    ]


def test_documents_longer_than_a_row_keep_their_masks(tmp_path: Path) -> None:
    rows = exchanges(20)
    whole = documents(tokenized(tmp_path, rows))
    assert min(len(mask) for _, mask in whole) < 60 < max(len(mask) for _, mask in whole)
    for oversize in ("split", "asked", "truncate", "drop"):
        rule: dict[str, Any] = (
            {"train_continued": True} if oversize == "asked" else {"oversize": oversize}
        )
        found = batches(tmp_path, rows, pack=PackStageConfig(seq_length=60, **rule))
        labels = np.concatenate([batch[LABELS] for batch in found])
        if oversize == "asked":
            pieces = [(mask[i : i + 60]) for _, mask in whole for i in range(0, len(mask), 60)]
        else:  # what goes on in another row has no target there
            pieces = [mask[:60] for _, mask in whole if oversize != "drop" or len(mask) <= 60]
        assert (labels >= 0).sum() == sum(sum(piece[1:]) for piece in pieces), oversize
        forward = batches(
            tmp_path, rows, pack=PackStageConfig(seq_length=60, **rule), streaming=True
        )
        assert sum((batch[LABELS] >= 0).sum() for batch in forward) == (labels >= 0).sum(), oversize
    for wrong, why in (
        ({"strategy": "stream"}, "strategy 'stream', which trains them"),
        ({"oversize": "drop"}, "oversize 'drop', which makes none"),
    ):
        with pytest.raises(ConfigError, match=f"train_continued: has no effect on {why}"):
            PackStageConfig(train_continued=True, **wrong)  # type: ignore[arg-type]


def test_batches_of_single_conversations_are_masked_too(tmp_path: Path) -> None:
    rows = talks(7)
    found = batches(tmp_path, rows, pack=None)
    trained = sum(int((batch[LABELS] >= 0).sum()) for batch in found)
    assert trained == sum(sum(mask[1:]) for _, mask in documents(tokenized(tmp_path, rows)))


@pytest.mark.parametrize(
    ("format", "seq_length", "options"),
    [("parquet", 200, {}), ("arrow", 200, {"tokenizer_kwargs": {"max_length": 30}}), ("jsonl", 60, {})],
    ids=["whole", "cut by max_length", "cut between turns"],
)  # fmt: skip
def test_saved_conversations_give_the_same_batches(
    tmp_path: Path, format: Any, seq_length: int, options: dict[str, Any]
) -> None:
    rows = talks(20)
    pack = PackStageConfig(seq_length=seq_length, strategy="first_fit")
    straight = batches(tmp_path / "cache", rows, pack=pack, chat_template=MARKED, **options)
    save = SaveStageConfig(output_dir=tmp_path / "saved", format=format)
    config = PipelineConfig(
        datasets=[dataset(rows, chat_template=MARKED, **options)],
        save=save,
        pack=pack,
        seed=3,
        cache_dir=tmp_path / "cache",
    )
    Pipeline.from_config(config).source().tokenize().save().build()
    again = batches(tmp_path / "other", str(tmp_path / "saved"), pack=pack, content_field="text")
    laws.assert_same_batches(straight, again)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompt_field": "q"}, "completion_field: prompt_field needs it"),
        ({"completion_field": "a"}, "prompt_field: completion_field needs it"),
        (
            {"prompt_field": "q", "completion_field": "q"},
            "completion_field: is the prompt_field too",
        ),
        ({"rejected_field": "b"}, "completion_field: rejected_field needs it"),
        (
            {"completion_field": "a", "rejected_field": "a"},
            "rejected_field: is the completion_field too",
        ),
        ({"template_date": "yesterday"}, "template_date: 'yesterday' is not a date"),
        ({"train_on": "user"}, "train_on: 'user' is not an option"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset("x.jsonl", **options)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"train_on": "assistant"}, "train_on: prompts have no assistant"),
        ({"chat_template": "{{ 1 }}"}, "chat_template: has no effect"),
        ({"tools_field": "t"}, "tools_field: has no effect"),
    ],
)
def test_options_about_messages_are_refused_for_prompts_of_text(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    columns = {"content_field": "text", "prompt_field": "q", "completion_field": "a"}
    with pytest.raises(ConfigError) as caught:
        tokenized(tmp_path, [{"q": "a", "a": "b"}], **columns, **options)
    assert f"datasets[0].{problem}" in str(caught.value)


def test_options_about_messages_are_refused_for_other_columns(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"datasets\[0\].train_on: has no effect on column 'n', which holds int64"
    ):
        tokenized(tmp_path, [{"n": 1}], content_field="n", train_on="all")
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenized(tmp_path, talks(1), tokenizer=without_template(tmp_path / "bare"))
    with pytest.raises(ConfigError, match=r"datasets\[0\].chat_template: 'nowhere.jinja'"):
        tokenized(tmp_path, talks(1), chat_template="nowhere.jinja")
    bad = r"datasets\[0\]\.%s: the template cannot be used: line 1 is not Jinja"
    with pytest.raises(TokenizerError, match=bad % "chat_template"):
        tokenized(tmp_path, talks(1), chat_template="{{ messages[ }}").materialize()
    prompt = {
        "format_type": "custom",
        "template": "{{ n }",
        "input_columns": ["n"],
        "train_on": "all",
    }
    with pytest.raises(TokenizerError, match=bad % r"prompt\.template"):
        tokenized(tmp_path, [{"n": "1"}], content_field="text", prompt=prompt).materialize()


def test_the_sft_example_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "SFT Training Pipeline" of the Pipeline API, on local files."""
    monkeypatch.chdir(tmp_path)
    for part in ("a", "b"):
        jsonl(tmp_path / "conversations" / f"{part}.jsonl", talks(150))
    eos = load_tokenizer(chat_tokenizer()).eos_token_id
    config = PipelineConfig(
        datasets=[
            DatasetConfig(
                data_files="conversations/*.jsonl",
                tokenizer=chat_tokenizer(),
                content_field="messages",  # Chat data
            ),
        ],
        pack=PackStageConfig(
            enabled=True,
            seq_length=2048,
            eos_token_id=eos,
        ),
        load=LoadStageConfig(
            batch_size=2,
            shuffle_buffer_size=10000,
        ),
        cache_dir=tmp_path / "cache",
    )
    pipeline = Pipeline.from_config(config)
    steps = 0
    for batch in pipeline.source().tokenize().pack().load().build():
        steps += 1
        assert batch[INPUT_IDS].shape == (2, 2048)
        share = float(np.mean(np.asarray(batch[LABELS]) >= 0))
        assert 0.05 < share < 0.7
    assert steps > 2


@pytest.mark.parametrize("length", [None, LengthPolicy(), LengthPolicy(policy="trim_prompt_first")])
def test_a_cut_conversation_ends_where_it_is_cut(
    tmp_path: Path, length: LengthPolicy | None
) -> None:
    """An EOS behind half an answer would teach the model to stop there."""
    rows = [{"messages": talk("hello", "a long answer " * 20)}, {"messages": talk("hi", "yes")}]
    tokenizer = load_tokenizer(chat_tokenizer())
    config = PipelineConfig(
        datasets=[dataset(rows, tokenizer_kwargs={"max_length": 60}, length=length)], pack=PackStageConfig(seq_length=128),
        load=LoadStageConfig(batch_size=1, drop_last=False), seed=3, cache_dir=tmp_path,
    )  # fmt: skip
    pipeline = Pipeline.from_config(config).source().tokenize()
    stored = documents(pipeline.get_data()["chat"])
    assert len(stored[0][0]) == 60
    assert stored[0][0][-1] != tokenizer.eos_token_id
    packed = pipeline.pack()
    batch = next(iter(packed.load().build()))
    ids, labels = (np.asarray(batch[name])[0].tolist() for name in (INPUT_IDS, LABELS))
    at = next(i for i in range(len(ids)) if ids[i : i + 60] == stored[0][0])
    segments = np.asarray(batch[SEGMENT_IDS])[0].tolist()
    # the last token that was kept is a target, and nothing is behind it
    assert labels[at + 58] == ids[at + 59] != tokenizer.eos_token_id
    assert segments[at + 59] != segments[at + 60]
    assert labels[at + 59] == -100
    ledger = packed.ledger()
    assert ledger.find("tokenize", "chat", "tokens").out["truncated"] > 0
    # the other document ends with its own
    assert "EOS" not in ledger.find("pack", "chat", "tokens").into


def test_what_ends_a_turn_of_any_dataset_ends_an_answer() -> None:
    class Told(InMemoryShardedSource):
        turns: Turns | None = None

        @property
        def info(self) -> SourceInfo:
            return SourceInfo(turns=self.turns)

    parts: dict[str, Told] = {}
    for name, turns in (("a", Turns("A", (3, 4))), ("b", None), ("c", Turns("C", (4, 7)))):
        parts[name] = Told({"input_ids": [[1]]})
        parts[name].turns = turns
    mixed: Any = SimpleNamespace(mixture=SimpleNamespace(parts=parts))
    assert trained_turns(mixed) == Turns("A", (3, 4, 7))
    assert trained_turns(parts["b"]) is None

"""easypipe.preview: samples decoded with what is trained of them, on the terminal and as a page
that cannot be injected.
"""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from easypipe import (
    DatasetConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    Preview,
    PromptConfig,
    load_tokenizer,
    masks,
    preview,
)
from easypipe.cli import main
from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, StageOrderError
from easypipe.loader.explain import ExplainedRow, Segment
from easypipe.previews.preview import Piece, Sample, SampleSegment
from easypipe.transforms.columns.columns import Rename
from pipelines import config, jsonl, texts, tokenizer
from told import assert_told

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}<|endoftext|>{% "
    "endgeneration %}\n{% endfor %}"
    .replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}")
    .replace("{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }}{% endif %}")
)  # fmt: skip
HOSTILE = [
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "</style></span></div><h1 id=owned>big</h1>",
    "<!-- ]]> & &amp; &lt;b&gt; <svg/onload=alert(1)>",
    "\x1b[31mred\x00\u202egnp.exe \u2028 end",
    "javascript:alert(1) {{7*7}} ${7*7}",
]


def chat(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


def made(
    folder: Path,
    rows: list[dict[str, Any]],
    n: int = 3,
    *,
    pack: dict[str, Any] | None = None,
    **dataset: Any,
) -> Preview:
    path = jsonl(folder / "rows.jsonl", rows)
    values = {
        "datasets": [{"name": "d", "data_files": str(path), **dataset}],
        "default_tokenizer": tokenizer(),
        "seed": 3,
        "pack": pack,
    }
    return preview(values, n)


def test_every_answer_says_whether_it_is_desirable(tmp_path: Path) -> None:
    """As the column of its row says; and how many are is told in a sentence."""
    rows = [{"q": f"{i}? ", "a": f"{i}", "good": i % 3 == 0} for i in range(60)]
    fields = {"prompt_field": "q", "completion_field": "a", "desirable_field": "good"}
    shown = made(tmp_path, rows, pack={"seq_length": 64, "oversize": "drop"}, **fields)
    segments = [one for sample in shown.samples for one in sample.segments]
    assert {one.segment.desirable for one in segments} == {True, False}
    for one in segments:
        good = rows[one.segment.row]["good"]
        verdict = "desirable" if good else "not desirable"
        assert one.segment.desirable == good
        assert one.segment.title.endswith(f" masked, {verdict}")
        assert f"masked, {verdict}; q, a" in str(shown)
    assert [note for note in shown.notes if note.startswith("d: ")] == [
        "d: 60 answers, 20 of them desirable"
    ]
    [plain] = made(tmp_path, [{"text": "a"}], 1).samples[0].segments
    assert plain.segment.desirable is None
    assert "desirable" not in plain.title


@pytest.mark.parametrize("look", [True, False])
def test_samples_warn_of_turns_that_nothing_ends(
    look: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    end = f"<|over {look}|>"  # told once in a process
    said = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}"
    if look:
        rows = [{"messages": chat("what?", "that")}] * 4
        made(tmp_path, rows, 1, content_field="messages", chat_template=said)
    else:
        masks(tokenizer(), chat_template=said)
    assert f"ends a turn with {end!r}, which is not a special or added token" in caplog.text


def test_packed_rows_show_segments_and_cuts(tmp_path: Path) -> None:
    shown = made(
        tmp_path,
        [{"text": text} for text in texts(30)],
        6,
        pack={"seq_length": 100, "strategy": "stream"},
    )
    segments = [segment for sample in shown.samples for segment in sample.segments]
    assert len(segments) > len(shown.samples) == 6
    cut = [segment for segment in segments if segment.cuts]
    assert cut
    assert all(segment.segment.is_part for segment in cut)
    assert any("of the document are not here" in text for segment in cut for text in segment.cuts)
    assert str(shown).count("slots padding") == 6
    told = [f"      cut: {text}" for segment in cut for text in segment.cuts]
    assert [line for line in str(shown).splitlines() if line.lstrip().startswith("cut:")] == told


def test_the_other_answer_of_a_pair_is_no_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "a b ", "chosen": "c d", "rejected": "e f g"}] * 3
    prompt = PromptConfig(
        format_type="prompt_completion", label_column="chosen", rejected_column="rejected"
    )
    pack = PackStageConfig(seq_length=64, strategy="first_fit", oversize="drop")
    dataset = DatasetConfig(data_files=rows, prompt=prompt)
    shown = preview(
        PipelineConfig(datasets=[dataset], default_tokenizer=tokenizer(), pack=pack, seed=1), n=1
    )
    segments = shown.samples[0].segments
    assert len(segments) == 6
    assert all(segment.cuts == () for segment in segments)


def a_preview() -> Preview:
    """Two segments in which no two numbers are alike."""
    one = Segment(
        segment=1,
        slot_start=2,
        slot_stop=13,
        dataset="d",
        file="a.txt",
        row=8,
        document=9,
        token_start=4,
        token_stop=14,
        document_tokens=20,
        ends_with_eos=True,
        masked_tokens=3,
        desirable=True,
        ids=(5,),
        spans=(),
    )
    other = dataclasses.replace(
        one,
        segment=2,
        slot_start=13,
        slot_stop=40,
        dataset="",
        token_start=0,
        document_tokens=None,
        ends_with_eos=False,
        masked_tokens=0,
        desirable=False,
    )
    said = (
        Piece(text="<a>\n", masked=True, role="user"),
        Piece(text="b", masked=False, role="assistant"),
        Piece(text="c", masked=True),
    )
    segments = (
        SampleSegment(segment=one, pieces=said, roles=("user", "bot", "user"), cuts=("6", "7")),
        SampleSegment(segment=other, pieces=None, roles=(), cuts=()),
    )
    row = ExplainedRow(
        row=3, number=1_234, epoch=15, window=16, slots=64, padding=17, segments=(one, other)
    )
    whole = dataclasses.replace(row, row=4, window=None, padding=0, segments=())
    samples = (Sample(row=row, segments=segments), Sample(row=whole, segments=()))
    return Preview(samples=samples, notes=("one", "two"))


ROWS = (
    "row 3: row 1,234 of the run, epoch 15, window 16; 2 segments, 17 of 64 slots padding",
    "row 4: row 1,234 of the run, epoch 15; 0 segments, 0 of 64 slots padding",
)
SEGMENTS = (
    "[1] slots 2:13  d, a.txt, row 8, tokens 4:14 of 20 and EOS, 3 masked, desirable; user, bot",
    "[2] slots 13:40  a.txt, row 8, tokens 0:14, not desirable",
)


def test_every_number_of_a_preview_is_told() -> None:
    assert str(a_preview()).splitlines() == [
        ROWS[0],
        f"  {SEGMENTS[0]}",
        "      cut: 6",
        "      cut: 7",
        "      ‹user›⟦<a>\\n⟧‹assistant›b⟦c⟧",
        f"  {SEGMENTS[1]}",
        ROWS[1],
        "note: one",
        "note: two",
    ]


def test_every_number_of_a_preview_stands_on_its_page() -> None:
    text = a_preview().to_html("the title")
    body = text[text.index("<body>") :]
    found = re.findall(r"<\w+(?: class=\"(\w+)\")?>([^<]+)", body)
    assert [(name, html.unescape(said)) for name, said in found if said.strip()] == [
        ("", "the title"),
        ("trained", "trained"),
        ("masked", "masked"),
        ("role", "who begins to speak"),
        ("", ROWS[0]),
        ("where", SEGMENTS[0]),
        ("cut", "cut: 6"),
        ("cut", "cut: 7"),
        ("role", "user"),
        ("masked", "<a>\n"),
        ("role", "assistant"),
        ("trained", "b"),
        ("masked", "c"),
        ("where", SEGMENTS[1]),
        ("text", "no tokenizer decodes it"),
        ("padding", "17 slots of padding"),
        ("", ROWS[1]),
        ("note", "one"),
        ("note", "two"),
    ]


KEYS = {"role": "who", "content": "said"}


def test_samples_of_many_configs_word_for_word(tmp_path: Path) -> None:
    words = [{"text": text} for text in texts(12)]
    parts = [{"type": "text", "text": "four"}, {"type": "text", "text": " of course"}]
    talks = [
        {"messages": chat("same words", "same words", "bye", f"good bye {i}")} for i in range(3)
    ]
    calls = [*chat("How warm?", ""), {"role": "tool", "content": "19"}, chat("", "Mild.")[1]]
    calls[1] |= {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    spoken = [{"from": "human", "value": "what? "}, {"from": "gpt", "value": "that"}]
    renamed = [{"who": turn["role"], "said": turn["content"]} for turn in chat("two", "four")]
    answers = [{"q": f"{i}? ", "a": f"{i} is so", "b": "no", "good": i % 2 > 0} for i in range(4)]
    asked = {"prompt_field": "q", "completion_field": "a"}
    own = {"content_field": "messages", "chat_template": TEMPLATE}
    share = {"prompt": {"format_type": "sharegpt", "template": "chatml"}}
    tools = {"content_field": "messages", "chat_template": "chatml"}
    wide = {"seq_length": 64, "oversize": "drop"}
    cases: dict[str, tuple[list[dict[str, Any]], int, dict[str, Any]]] = {
        "text": ([*words[:3], {"text": None}, {"text": ""}], 2, {"on_error": "skip"}),
        "end to end": (words, 4, {"pack": {"seq_length": 24, "strategy": "concat"}}),
        "cut": (words, 3, {"tokenizer_kwargs": {"max_length": 20}, "pack": {"seq_length": 16}}),
        "turns": (talks, 1, own),
        "turns as JSON": ([{"messages": json.dumps(talks[1]["messages"])}], 1, own),
        "parts": (
            [{"messages": [chat("two")[0], {"role": "assistant", "content": parts}]}],
            1,
            tools,
        ),
        "a call": ([{"messages": calls}], 1, tools),
        "nobody answers": ([{"messages": chat("two")}, talks[0]], 3, own | {"on_error": "skip"}),
        "ShareGPT": ([{"conversations": spoken}], 1, share),
        "other keys": ([{"messages": renamed}], 1, tools | {"message_fields": KEYS}),
        "Alpaca": (
            [{"instruction": "add", "input": "1 and 2", "output": "3"}],
            1,
            {"prompt": {"format_type": "alpaca"}},
        ),
        "answers": (answers, 2, asked),
        "pairs": (answers, 1, {**asked, "rejected_field": "b", "pack": wide}),
        "verdicts": (answers, 1, {**asked, "desirable_field": "good", "pack": wide}),
        "tokens": ([{"input_ids": [5, 6, 7]}], 1, {}),
        "held out": (words, 1, {"hold_out": {"fraction": 0.4}}),
    }
    told = []
    for name, (rows, n, options) in cases.items():
        told += [f"### {name}", str(made(tmp_path / name, rows, n, **options)), ""]
    two = config(tmp_path, seed=None, pack={"seq_length": 32})
    mix = {"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"}
    file = tmp_path / "run.yaml"
    values = to_dict(two) | {"mix": mix, "num_streams": 2, "streaming": True}
    file.write_text(yaml.safe_dump({"data": values, "train": {"steps": 3}}))
    told += ["### a run", str(preview(file, 2, first_rows=3)), ""]
    pipeline = Pipeline(dataclasses.replace(two, datasets=two.datasets[:1], seed=9))
    pipeline.source().tokenize().load({"batch_size": 7})
    told += ["### a chain", str(preview(pipeline, 2, first_rows=4)), ""]
    assert_told("previews", "\n".join(told), DATA=tmp_path)


def test_what_max_length_cut_is_said(tmp_path: Path) -> None:
    encode = load_tokenizer(tokenizer()).reference_encode
    rows = [{"text": text} for text in texts(30)]
    for sample in made(tmp_path, rows, 30, tokenizer_kwargs={"max_length": 20}).samples:
        [segment] = sample.segments
        count = len(encode(rows[segment.segment.row]["text"]))
        said = f"the row has {count} tokens, and max_length 20 leaves 20 of them in this document"
        assert segment.cuts == ((said,) if count > 20 else ())
    total = sum(len(encode(row["text"])) for row in rows)
    cut = sum(max(len(encode(row["text"])) - 20, 0) for row in rows)
    notes = made(tmp_path, rows, 1, tokenizer_kwargs={"max_length": 20}).notes
    assert f"d: {total:,} tokens, of which {cut:,} truncated" in notes


def test_it_is_what_training_gets(tmp_path: Path) -> None:
    """With as many rows as there are, the samples are the rows of the first batch."""
    whole = config(
        tmp_path,
        pack={"seq_length": 32},
        mix={"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"},
    )
    shown = preview(whole, 4, first_rows=20)  # code has 20 in its first file
    first = [
        DatasetConfig(
            name=d.name, data_files=str(tmp_path / "data" / str(d.name) / "a.jsonl"), num_rows=20
        )
        for d in whole.datasets
    ]
    limited = PipelineConfig(**{**vars(whole), "datasets": first, "cache_dir": tmp_path / "other"})
    loader = Pipeline(limited).source().tokenize().mix().pack().load({"batch_size": 4}).loader()
    explained = loader.explain(0)
    again = preview(limited, 4, first_rows=40)  # num_rows holds where more are asked for
    for one in (shown, again):
        assert [sample.row for sample in one.samples] == list(explained.rows)


def test_a_pipeline_with_its_own_stages_and_nothing_kept(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"words": text} for text in texts(10)])
    options = {"default_tokenizer": tokenizer(), "seed": 1, "cache_dir": tmp_path / "cache"}
    pipeline = (
        Pipeline(PipelineConfig(datasets=(DatasetConfig(data_files=str(path)),), **options))
        .source()
        .transform(Rename({"words": "text"}))
    )
    with pytest.raises(StageOrderError, match="Call tokenize"):
        preview(pipeline)
    shown = preview(
        pipeline.tokenize().pack({"seq_length": 32}).save({"output_dir": tmp_path / "saved"}), 2
    )
    assert len(shown.samples) == 2
    assert not (tmp_path / "saved").exists()
    assert not list((tmp_path / "cache").glob("tokens*"))


def test_a_mixture_that_says_the_rows_of_a_step_is_shown(tmp_path: Path) -> None:
    points = [{"step": 0, "weights": {"code": 1, "docs": 1}}]
    mix = {"weight_schedule": points, "batch_size": 4, "stop_strategy": "all_exhausted"}
    assert len(preview(config(tmp_path, mix=mix), 5).samples) == 5


def test_a_run_has_its_model_s_tokenizer_and_leaves_out_what_is_held_out(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts(20)])
    run = {
        "data": {"datasets": [{"data_files": str(rows)}]},
        "model": {"pretrained": tokenizer()},
        "eval": {"held": {"from": "data", "fraction": 0.3}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    for given in (run, tmp_path / "run.yaml"):
        assert preview(given, 1).notes[1:] == ("dataset1: 20 rows, of which 6 held_out",)


def test_a_config_that_keeps_elsewhere_keeps_nothing(tmp_path: Path) -> None:
    """Whatever it says of where and how tokens are made and kept: none of that is asked for."""
    path = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts(10)])
    values = {
        "datasets": [
            {
                "data_files": str(path),
                "save_path": "memory://preview/rows",
                "save_format": "jsonl",
                "cache_path": "memory://preview/own",
            }
        ],
        "default_tokenizer": tokenizer(),
        "cache_dir": "memory://preview/cache",
        "cache": {"storage_options": {"anything": 1}, "staging_dir": str(tmp_path / "staged")},
        "executor": "ray",
        "save": {"output_dir": "memory://preview/saved", "storage_options": {"anything": 1}},
        "load": {"batch_size": 3, "mesh": {"data": 64}},
    }
    before = sorted(tmp_path.iterdir())
    assert len(preview(values, 2).samples) == 2
    assert sorted(tmp_path.iterdir()) == before
    assert not fsspec.filesystem("memory").exists("/preview")


def test_streaming_configs_and_large_files(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts(50)).encode())
        file.truncate(1 << 40)
    values = {
        "datasets": [{"data_files": str(path)}],
        "default_tokenizer": tokenizer(),
        "streaming": True,
        "num_streams": 2,
    }
    shown = preview(
        values | {"cache_dir": str(tmp_path / "cache"), "pack": {"seq_length": 64}},
        2,
        first_rows=30,
    )
    assert len(shown.samples) == 2
    assert all(segment.segment.row < 30 for sample in shown.samples for segment in sample.segments)


def test_refusals(tmp_path: Path) -> None:
    for options in ({"n": 0}, {"first_rows": 0}):
        with pytest.raises(ConfigError, match="Give at least 1"):
            preview(config(tmp_path), **options)
    data = {"datasets": [{"data_files": "x", "content_feild": "y"}]}
    for values, at in ((data, ""), ({"data": data}, r"data\.")):
        with pytest.raises(ConfigError, match=rf"^{at}datasets\[0\].content_feild: unknown key"):
            preview(values)


class Page(HTMLParser):
    """Every element and attribute of a page, and the text within."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def hostile_page(folder: Path) -> str:
    rows = [{"q": text, "a": f"answer {text}"} for text in HOSTILE]
    return made(folder, rows, 9, prompt_field="q", completion_field="a", name="<b>d").to_html(
        "<script>title</script>"
    )


def test_the_page_cannot_be_injected(tmp_path: Path) -> None:
    text = hostile_page(tmp_path)
    page = Page(text)
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "span",
        "section",
        "div",
    }
    assert {tag for tag, _ in page.tags} <= allowed
    assert {name for _, attributes in page.tags for name in attributes} <= {
        "lang",
        "charset",
        "name",
        "content",
        "class",
        "http-equiv",
    }
    assert all(
        "://" not in str(value) for _, attributes in page.tags for value in attributes.values()
    )
    policy = next(
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    for words in HOSTILE[:4]:
        assert words in page.words  # as text, every character of it
    for character in "\x1b\x00\u202e\u2028":
        assert character not in text
        assert f"\\u{{{ord(character):x}}}" in text
    classes = [attributes.get("class") for _, attributes in page.tags]
    assert {"trained", "masked", "role", "segment", "text", "where"} <= set(classes)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": f"\x1b[31mwhat is {i}?\n", "a": f"{i} <b>"} for i in range(9)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    values = {
        "datasets": [{"data_files": str(path), "prompt_field": "q", "completion_field": "a"}],
        "default_tokenizer": tokenizer(),
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    assert main(["preview", str(file), "-n", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("of the run") == 2
    assert "⟦\\x1b[31mwhat is" in out
    assert "\x1b[31mwhat" not in out
    assert main(["preview", str(file), "--html", str(tmp_path / "out.html"), "-n", "1"]) == 0
    assert Page((tmp_path / "out.html").read_text()).words.count("of the run") == 1
    capsys.readouterr()
    assert main(["preview", str(file), "--json", "-n", "1", "--set", "pack.seq_length=128"]) == 0
    assert len(json.loads(capsys.readouterr().out)["samples"][0]["segments"]) > 1
    assert main(["preview", str(tmp_path / "nothing.yaml")]) == 2


@pytest.mark.skipif("EASYPIPE_CHROMIUM" not in os.environ, reason="needs a browser: nox -s html")
def test_in_a_browser(tmp_path: Path) -> None:
    """A real browser finds the elements that we wrote and no others, runs nothing, and asks for
    nothing.
    """
    browser = shutil.which(os.environ["EASYPIPE_CHROMIUM"])
    assert browser, os.environ["EASYPIPE_CHROMIUM"]
    text = hostile_page(tmp_path)
    (tmp_path / "page.html").write_text(text)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--enable-logging=stderr",
        ]
        command = [
            browser,
            *flags,
            "--window-size=1000,1400",
            *arguments,
            (tmp_path / "page.html").as_uri(),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    done = run("--dump-dom")
    seen, sent = Page(done.stdout), Page(text)
    assert sorted(tag for tag, _ in seen.tags) == sorted(tag for tag, _ in sent.tags)
    assert "<title>&lt;script&gt;title&lt;/script&gt;</title>" in done.stdout
    assert "CONSOLE" not in done.stderr  # no script ran or was refused, nothing was asked for
    for words in HOSTILE[:4]:
        assert words in seen.words
    run(f"--screenshot={tmp_path / 'page.png'}")
    assert (tmp_path / "page.png").stat().st_size > 10_000

"""`easypipe.masks` and `easypipe masks`: what a template trains, told without a pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_support import talk
from easypipe import ConfigError, EasypipeError, masks
from easypipe.cli import main
from easypipe.previews.masks import SAMPLES

PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}"
    "<|end|>{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["masks", *arguments])
    return code, capsys.readouterr().out


def test_samples_of_a_template_alone() -> None:
    found = {one.name: one for one in masks(PARTS)}
    assert list(found) == list(SAMPLES)
    one = found["two turns with system"]
    assert one.text is not None
    assert one.reason is None
    assert one.form == "typed parts"
    said = [one.text[a:b] for a, b in one.spans]
    assert said == ["It is four.<|end|>", "Six, of course.<|end|>"]
    call = found["a tool call"]
    assert call.text is None
    assert call.reason is not None
    assert not call.spans
    assert not call.pieces
    assert "".join(piece.text for piece in one.pieces) == one.text
    assert [piece.masked for piece in one.pieces] == [True, False, True, False]


def test_own_conversations_with_a_tokenizer(shared_data: Path) -> None:
    """The masks of tokens are those that a pipeline trains."""
    folder = shared_data / "tokenizers" / "torchtitan_tiny"
    talks = [talk("Hi", "Hello"), {"messages": talk("Hi", "Hello", "And?", "Bye")}, talk("Hi")]
    one, two, none = masks(folder, talks, chat_template="chatml")
    assert none.reason is not None
    assert none.reason.startswith("nothing_to_train")
    for found, turns in ((one, 1), (two, 2)):
        assert found.input_ids is not None
        assert found.loss_mask is not None
        assert len(found.input_ids) == len(found.loss_mask)
        assert len(found.spans) == turns
        edges = zip((0, *found.loss_mask), found.loss_mask, strict=False)
        assert sum(before < after for before, after in edges) == turns
    (last,) = masks(folder, talks[1:2], chat_template="chatml", train_on="last_assistant")
    assert last.spans == two.spans[1:]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (found,) = masks("chatml", [{"messages": "Hi"}])
    assert found.reason == "not_a_list: messages are text"
    with pytest.raises(ConfigError, match="neither a file"):
        masks(tmp_path / "none.jinja")
    with pytest.raises(ConfigError, match="chat_template: has no effect beside a template alone"):
        masks("chatml", chat_template="zephyr")
    with pytest.raises(EasypipeError, match="line 1 is not Jinja"):
        masks("{% for %}")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = shown(capsys, "chatml")
    assert code == 0
    assert "one turn: proven" in out
    assert "⟧It is four.<|im_end|>⟦" in out
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps(talk(*said)) + "\n" for said in (("Hi", "\x1b[2J"), ("Hi",)))
    )
    code, out = shown(capsys, "chatml", "--messages", str(rows))
    assert code == 1
    assert "\x1b" not in out
    assert "conversation 1: not proven: nothing_to_train" in out
    code, out = shown(capsys, "chatml", "--messages", str(rows), "--json")
    assert [row["reason"] is None for row in json.loads(out)] == [True, False]
    page = tmp_path / "page.html"
    assert shown(capsys, "chatml", "--html", str(page))[0] == 0
    assert '<span class="trained">It is four.&lt;|im_end|&gt;</span>' in page.read_text()

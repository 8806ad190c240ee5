"""`masks`: which text of sample conversations, or yours, is trained on; proven, or why not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from easypipe.core.errors import require
from easypipe.previews.preview import Piece, page
from easypipe.transforms.chat.render import (
    ChatTemplate,
    check_whole,
    given_template,
    is_jinja,
    load_chat_template,
    turns_of,
)
from easypipe.transforms.chat.sandbox import Json
from easypipe.transforms.chat.spans import OPEN, Rendered
from easypipe.transforms.chat.turns import Request, by_turns
from easypipe.transforms.prompt.config import PromptConfig, Reasoning, TrainOn, TrainOnEos
from easypipe.transforms.prompt.formats import ChatFormat
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.masked import encode_masked
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

Talk = Sequence[Mapping[str, Json]]
# the forms that special tokens have in the text of a template
TOKEN = re.compile(
    r"<\|[^|<>\s]+\|>|<[|a-z_/][^<>\s{}'\"]*>|<[A-Z_\d]+>|\[/?[A-Z_]+\]|\[\|\w+\|\]|<｜[^<>]*｜>"
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
DATE = "2026-01-31"  # the day for templates that use the date

_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "id": "abcdefghi",  # nine characters, which Mistral's templates require
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Bern"}},
}
_QUESTION, _ANSWER = (
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
)
# The conversations that are tried if none are given, by name.
SAMPLES: Mapping[str, Mapping[str, Json]] = {
    "one turn": {"messages": [_QUESTION, _ANSWER]},
    "two turns with system": {
        "messages": [
            {"role": "system", "content": "You are brief."},
            _QUESTION,
            _ANSWER,
            {"role": "user", "content": "And three and three?"},
            {"role": "assistant", "content": "Six, of course."},
        ]
    },
    "a tool call": {
        "messages": [
            {"role": "user", "content": "How warm is it today?"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {
                "role": "tool",
                "name": "get_weather",
                "tool_call_id": "abcdefghi",
                "content": "19 degrees",
            },
            {"role": "assistant", "content": "It is mild."},
        ],
        "tools": [_TOOL],
    },
    "a reasoning turn": {
        "messages": [
            _QUESTION,
            {**_ANSWER, "reasoning_content": "Two and two make four."},
        ]
    },
}


@dataclass(frozen=True, kw_only=True)
class ConversationMask:
    """A conversation as a chat template renders it, and which parts are trained on.

    Attributes:
        name: The name of the sample, or `conversation 0`, `conversation 1`, ...
        text: The rendered text; None if nothing is proven.
        spans: (first character, the one after the last) of the parts trained on, ascending.
        reason: Why nothing is proven, in a word and a sentence; None if the mask is proven.
        form: How a sample had to be changed for this template, in words; empty for the form in
            `SAMPLES`.
        input_ids: The tokens, with an EOS if the template does not end the text itself; None
            without a tokenizer.
        loss_mask: 1 for each token that is a target, else 0; None without a tokenizer.
    """

    name: str
    text: str | None = None
    spans: tuple[tuple[int, int], ...] = ()
    reason: str | None = None
    form: str = ""
    input_ids: tuple[int, ...] | None = None
    loss_mask: tuple[int, ...] | None = None

    @property
    def title(self) -> str:
        """The name, and whether the mask is proven."""
        return f"{self.name}: {'proven' if self.reason is None else f'not proven: {self.reason}'}"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The text, in pieces that are all trained on or all masked."""
        if self.text is None:
            return ()
        edges = [0, *itertools.chain.from_iterable(self.spans), len(self.text)]
        return tuple(
            Piece(text=self.text[a:b], masked=n % 2 == 0)
            for n, (a, b) in enumerate(itertools.pairwise(edges))
            if a < b
        )


def masks(
    source: str | Path,
    conversations: Sequence[Talk | Mapping[str, Json]] | None = None,
    *,
    train_on: TrainOn | None = None,
    roles_to_train: Sequence[str] | None = None,
    train_on_eos: TrainOnEos = "turn",
    reasoning: Reasoning = "keep",
    chat_template: str | Path | None = None,
    template_date: str = DATE,
    train_empty_thinking: bool = True,
    special_tokens: Sequence[str] | None = None,
) -> list[ConversationMask]:
    """Returns which parts of conversations are trained on, proven character by character.

    Args:
        source: A tokenizer: its tokenizer.json, its folder or its name on the Hub. Or only a chat
            template: a .jinja file, its text, or the name of a built-in one.
        conversations: Each a list of messages, or an object with `messages` and optional `tools`,
            `system` and `chat_template_kwargs`, as rows of data have them. Without conversations,
            `SAMPLES` are tried, each in the forms that templates accept.
        train_on: `assistant` (also for None), `last_assistant`, `completion` or `all`. It is as in
            `DatasetConfig`, like the next three options.
        roles_to_train: The roles whose turns are trained on, in place of train_on. If empty,
            messages that are marked by `train` or `weight`.
        train_on_eos: Whether the token that ends a turn is trained on: for every `turn` that is
            trained on, for the `last` one, or `none`.
        reasoning: The reasoning of messages is trained on (`keep`) or masked (`mask`), or each turn
            that is trained on becomes a separate sample (`per_turn`).
        chat_template: A template other than the tokenizer's own.
        template_date: The day that `strftime_now` returns, such as 2026-01-31.
        train_empty_thinking: Whether an empty reasoning block is trained on.
        special_tokens: The special tokens in the template. By default they are the tokenizer's, or,
            without a tokenizer, words of the template that look like one.

    Returns:
        One mask for each conversation, in order: proven, or with the reason why not. With reasoning
        `per_turn`, one for each sample.

    Raises:
        ConfigError: A file does not exist, or an option has an invalid value.
        TokenizerError: A tokenizer has no template, or a template does not compile or does
            something forbidden.
    """
    asked = PromptConfig(
        input_columns=("messages",),
        train_on=train_on,
        roles_to_train=roles_to_train,
        train_on_eos=None if train_on_eos == "turn" else train_on_eos,
        reasoning=None if reasoning == "keep" else reasoning,
        template_date=template_date,
        train_empty_thinking=None if train_empty_thinking else False,
    )
    alone, fix = isinstance(special_tokens, str), f"Write [{special_tokens!r}]."
    require(not alone, "special_tokens", f"wants a list, got {special_tokens!r} (str)", fix)
    template, tokenizer = _opened(source, chat_template, asked, special_tokens)
    if tokenizer is not None:
        turns_of(template, tokenizer)  # warns if nothing ends a turn
    found = _rendered(ChatFormat(asked, template, refuse=()), conversations)
    return [one for one, _ in found] if tokenizer is None else _with_tokens(tokenizer, found)


def masks_page(found: Sequence[ConversationMask], title: str) -> str:
    """Returns a self-contained page of HTML; text that is trained on is green."""
    samples = [
        {"title": one.title, "segments": [{"title": one.form, "pieces": one.pieces}]}
        for one in found
    ]
    return page(title, samples, ())


def _opened(
    source: str | Path,
    chat_template: str | Path | None,
    asked: PromptConfig,
    special_tokens: Sequence[str] | None,
) -> tuple[ChatTemplate, Tokenizer | None]:
    """Returns the template, and the tokenizer if `source` is one."""
    text, tokenizer = str(source), None
    if not (is_jinja(text) or text in CHAT_TEMPLATES or text.endswith((".jinja", ".jinja2"))):
        tokenizer = load_tokenizer(TokenizerConfig(name_or_path=text))
        template = load_chat_template(
            tokenizer,
            chat_template=chat_template,
            train_on="assistant",
            date=asked.template_date,
        )
        if special_tokens is not None:
            template = dataclasses.replace(template, closers=tuple(special_tokens))
    else:
        fix = "Leave it out, or give a tokenizer."
        beside = "has no effect with a template alone"
        require(chat_template is None, "chat_template", beside, fix)
        written, origin = given_template(source, at="source", names=CHAT_TEMPLATES)
        check_whole(written, "source", origin)
        seen = sorted({*TOKEN.findall(written), *NAMES.values()})
        template = ChatTemplate(
            source=written,
            tool_use=None,
            names=NAMES,
            closers=tuple(seen if special_tokens is None else special_tokens),
            train_on="assistant",
            date=asked.template_date,
            origin=origin,
        )
    roles = asked.roles_to_train
    return dataclasses.replace(
        template,
        train_on=asked.train_on or "assistant",
        roles_to_train=("assistant",) if roles is None else tuple(roles),
        train_on_eos=asked.train_on_eos or "turn",
        reasoning=asked.reasoning or "keep",
        train_empty_thinking=asked.train_empty_thinking is not False,
    ), tokenizer


def _named(conversations: Sequence[Talk | Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
    return {
        f"conversation {i}": one if isinstance(one, Mapping) else {"messages": one}
        for i, one in enumerate(conversations)
    }


def spellings(sample: Mapping[str, Json]) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields a sample in the forms that templates accept, each with its form in words.

    Content is text or typed parts; in a message with a call it is left out or empty; arguments are
    an object or JSON text.
    """
    calls = any("tool_calls" in message for message in sample["messages"])
    either = (False, True) if calls else (False,)
    for parts, written, empty in itertools.product((False, True), either, either):
        words = ["typed parts"] * parts + ["arguments as JSON text"] * written
        words += ["empty content beside a call"] * empty
        said = [_formed(message, parts, written, empty) for message in sample["messages"]]
        yield ", ".join(words), {"messages": said, "tools": sample.get("tools")}


def _formed(message: Mapping[str, Json], parts: bool, written: bool, empty: bool) -> Json:
    """Returns a message in one of the forms that templates accept (see `spellings`)."""
    made = dict(message)
    if "tool_calls" in made:
        made["content"] = "" if empty else None
        if written:
            made["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"]),
                    },
                }
                for call in made["tool_calls"]
            ]
    if parts and made["content"] is not None:
        texts = [made["content"]] if made["content"] else []
        made["content"] = [{"type": "text", "text": text} for text in texts]
    return {key: value for key, value in made.items() if value is not None}


def _rendered(
    format: ChatFormat, conversations: Sequence[Talk | Mapping[str, Json]] | None
) -> list[tuple[ConversationMask, int]]:
    """Returns the mask of each conversation, and how its text ends."""
    template = format.template
    given = SAMPLES if conversations is None else _named(conversations)
    forms = {
        name: list(spellings(one)) if conversations is None else [("", one)]
        for name, one in given.items()
    }
    rows = [{"messages": None, **row} for tried in forms.values() for _, row in tried]
    asked = [format.request(format.as_json(row)) for row in rows]
    if template.reasoning == "per_turn":
        samples = [[one for _, one in some] for some in by_turns(template, asked)]
    else:
        samples = [[one] for one in template.render(asked)]
    each = zip(asked, samples, strict=True)
    return [
        one
        for name, tried in forms.items()
        for one in _chosen(name, [(form, *next(each)) for form, _ in tried])
    ]


def _chosen(
    name: str, tried: Sequence[tuple[str, Request | Refused, Sequence[Rendered | Refused]]]
) -> list[tuple[ConversationMask, int]]:
    """Returns the samples of the first form that is proven, and how their texts end.

    If none is proven, it returns the reason for the first form that the template accepts.
    """
    refused: list[Refused] = []
    for form, request, answers in tried:
        whole = [one for one in answers if isinstance(one, Rendered)]
        if len(whole) == len(answers):
            text = "".join(one.text for one in whole)
            silent = next((word for word in _words(request) if word not in text), None)
            if len(tried) == 1 or silent is None:
                of = f" of {len(whole)}" if len(whole) > 1 else ""
                return [
                    (
                        ConversationMask(
                            name=f"{name}, sample {n}{of}" if of else name,
                            text=one.text,
                            spans=tuple((a, b) for a, b in one.spans),
                            form=form,
                        ),
                        one.end,
                    )
                    for n, one in enumerate(whole, 1)
                ]
            refused.append(Refused("not_printed", f"the template does not print {silent!r}"))
        refused += [one for one in answers if isinstance(one, Refused)]
    why = next((one for one in refused if one.reason != "refused_by_template"), refused[0])
    return [(ConversationMask(name=name, reason=f"{why.reason}: {why.detail}"), OPEN)]


def _words(request: Request | Refused) -> Iterator[str]:
    """Yields what a template must print of a sample: the text and calls of the assistant."""
    assert not isinstance(request, Refused), "its answers are refused"
    for message in request["messages"]:
        if message["role"] != "assistant":
            continue
        content = message.get("content") or ""
        yield from [content] if isinstance(content, str) else [part["text"] for part in content]
        if "tool_calls" in message:
            yield from ("get_weather", "Bern")


def _with_tokens(
    tokenizer: Tokenizer, found: Sequence[tuple[ConversationMask, int]]
) -> list[ConversationMask]:
    """Returns the masks with the tokens and loss masks of those that are proven."""
    proven = [(one, end) for one, end in found if one.reason is None]
    texts = pa.array([one.text for one, _ in proven], pa.large_string())
    spans, ends = [one.spans for one, _ in proven], [end for _, end in proven]
    made = encode_masked(tokenizer, texts, spans, ends, raw=False, whole=True)
    mask = np.ones(len(made.ids), np.uint8) if made.mask is None else made.mask
    edges = itertools.pairwise(made.offsets.tolist())
    return [
        one
        if one.reason is not None
        else dataclasses.replace(
            one,
            input_ids=tuple(made.ids[(edge := next(edges))[0] : edge[1]].tolist()),
            loss_mask=tuple(mask[edge[0] : edge[1]].tolist()),
        )
        for one, _ in found
    ]

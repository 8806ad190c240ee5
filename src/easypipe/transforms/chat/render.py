"""ChatTemplate: finds a template, its variables and date; when rendering in workers is given up.

A template is a program by strangers, and a thread that runs one cannot be stopped. So templates run
in a few worker processes (pool.py), and the system limits their processor time and memory. A worker
that exceeds the limits ends alone, and the error names the row.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, TokenizerError, did_you_mean, near_path, raising
from easypipe.core.protocols import Turns
from easypipe.core.values import JsonValue
from easypipe.transforms.chat.conversations import MessageReader
from easypipe.transforms.chat.pool import Asked, Ended, Hostile, asked
from easypipe.transforms.chat.sandbox import RESERVED, Json, Message
from easypipe.transforms.chat.spans import Rendered
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.refused import BEYOND_LIMITS, Refused
from easypipe.transforms.tokenizer.files import find_chat_template, find_end_tokens
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, added_tokens

log = logging.getLogger("easypipe")

ENGINE_VERSION = 9  # raised when the same conversation becomes other text or other spans
MOST_ENDED = 5  # if this many rows in sequence end their worker, the template is to blame
# Options that were added later: fingerprints hold them only if they differ from these values.
ADDED: Mapping[str, Json] = {
    "train_on_eos": "turn",
    "roles_to_train": ("assistant",),
    "reasoning": "keep",
    "end_tokens": (),
}
_TEXT_ARGUMENTS = '"arguments": "{\\"'  # an object that was JSON text, written as JSON once more
OTHER_FILES = ("include", "import", "from", "extends")  # statements of Jinja that read other files


class HostileTemplateError(TokenizerError):
    """Raised for a template that took too long or too much, or reached for something forbidden.

    Attributes:
        row: The number of the row within the call.
    """

    row: int = 0


@dataclass(frozen=True)
class ChatTemplate:
    r"""One chat template, with its variables and the options of its trained spans.

    Attributes:
        source: The text of the template.
        tool_use: Another template for rows that have tools, if the tokenizer has one.
        names: Variables of the template: `bos_token`, `eos_token`, ... and chat_template_kwargs.
        closers: The special tokens of the tokenizer.
        train_on: Which turns are trained on.
        date: The ISO date that strftime_now returns.
        origin: Where the template is from, for errors.
        train_empty_thinking: Whether `<think>\n\n</think>` before an answer is trained on.
        train_on_eos: Which trained turns have their end trained on too: turn, last, none.
        roles_to_train: Whose turns train_on chooses among.
        reasoning: What happens to the reasoning of messages: keep, mask, per_turn.
        end_tokens: The special tokens that end what the model writes, if they are known.
    """

    source: str
    tool_use: str | None
    names: Mapping[str, Json]
    closers: tuple[str, ...]
    train_on: str
    date: str | None
    origin: str
    train_empty_thinking: bool = True
    train_on_eos: str = "turn"
    roles_to_train: tuple[str, ...] = ("assistant",)
    reasoning: str = "keep"
    end_tokens: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A digest of everything that decides text and spans, except the rows."""
        return digest("chat", ENGINE_VERSION, *self._spec.values())

    @property
    def _spec(self) -> dict[str, Json]:
        """The options that workers write with; their order is part of the fingerprint."""
        given = asdict(self)
        later = {name: value for name, value in ADDED.items() if given[name] == value}
        return {k: value for k, value in given.items() if k != "origin" and k not in later}

    def render(
        self, rows: Sequence[Asked | Refused], reader: MessageReader | None = None
    ) -> list[Rendered | Refused]:
        """Writes conversations as texts, with the trained spans of each.

        Thread-safe; a thread waits for worker processes.

        Args:
            rows: `messages`, a list of dicts; `tools`, a list or None; `answers` if that many of
                the last messages answer the others; and `kwargs` for the template. Or JSON of
                messages and tools. Rows that are refused already stay so.
            reader: How JSON of messages and tools is read and refused.

        Raises:
            HostileTemplateError: The template does not compile or does something forbidden. Or it
                exceeds its limits for the shortest conversation or for five rows in sequence (a
                single such row is Refused).
            StallError: A worker hangs.
        """
        spec = {**self._spec, "reader": asdict(reader or MessageReader())}
        answers = answers_of(spec, rows, self.origin)
        if any(_TEXT_ARGUMENTS in one.text for one in answers if isinstance(one, Rendered)):
            _warn_text_arguments(self.origin)
        return answers

    def prompts(self, rows: Sequence[Asked | Refused]) -> list[str | Refused]:
        """Writes conversations as texts that open an assistant's answer; like `render`."""
        spec = {**self._spec, "reader": asdict(MessageReader()), "prompt": True}
        answers = answers_of(spec, rows, self.origin)
        return [one if isinstance(one, Refused) else one.text for one in answers]


def turns_of(template: ChatTemplate, tokenizer: Tokenizer) -> Turns:
    """Returns the ends that `template` trains the assistant to write, as seen on probes.

    The probes are an answer and a call. If the template closes a turn with several special tokens,
    the last one is the end; without any, it is an added token that ends what the template writes
    (as those of model.add_tokens, which are not special). If it writes nothing there, the EOS token
    that packing adds is the end. If what it writes is not a token of the tokenizer, no end of an
    answer is trained on, and a warning says so. What opens the next message is an end too, if it is
    trained on.

    Raises:
        HostileTemplateError: The template went beyond its limits.
    """
    asked = replace(template, train_on="assistant", roles_to_train=("assistant",))
    answer, others = None, []
    for parts in (False, True):
        answer, *others = map(_said_behind_probe, asked.render(_probes(parts=parts)))
        if answer is not None:
            break
    else:
        return Turns(template.source, ())
    ends = _special(tokenizer, answer)[-1:] or _added_end(tokenizer, answer.strip())
    if answer.strip() and not ends:
        _warn_endless(template.origin, tokenizer.name, answer.strip())
    followed, call, call_followed = (said or "" for said in others)
    for alone, behind in ((answer, followed), (call, call_followed)):
        last = _special(tokenizer, behind)[-1:]
        opens = len(behind) > len(alone) > 0 and behind.startswith(alone)
        if last and (opens or tokenizer.token(last[0]) in template.end_tokens):
            ends += last
    return Turns(template.source, tuple(dict.fromkeys(ends)))


_PROBE = "easypipeAnswerProbe"


def _probes(*, parts: bool) -> list[Asked]:
    """Returns an answer and a call, each alone and followed; content is text or typed parts."""

    def says(role: str, said: str, **more: Json) -> Message:
        content = [{"type": "text", "text": said}] if parts else said
        return {"role": role, "content": content, **more}

    call = {"id": "easypipe1", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
    question = says("user", "easypipeQuestionProbe")
    answered = [question, says("assistant", _PROBE)]
    called = [question, says("assistant", "", tool_calls=[call])]
    result = says("tool", "19", tool_call_id="easypipe1")
    talks = (answered, [*answered, question], called, [*called, result])
    return [{"messages": talk, "tools": None} for talk in talks]


def _said_behind_probe(seen: Rendered | Refused) -> str | None:
    """Returns the trained text after the probe; None if it is missing or not trained on."""
    if isinstance(seen, Refused) or not seen.spans:
        return None
    _, found, behind = seen.text[: seen.spans[-1][1]].rpartition(_PROBE)
    return behind if found else None


def _special(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the special tokens of a text."""
    (ids, _, _), *_ = tokenizer.encode_with_characters([text])
    special = set(tokenizer.special_tokens)
    return [number for number in ids if tokenizer.token(number) in special]


def _added_end(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the last token of a text if it is an added one, special or not."""
    (ids, _, _), *_ = tokenizer.encode_with_characters([text])
    return [number for number in ids[-1:] if tokenizer.token(number) in added_tokens(tokenizer)]


@functools.cache
def _warn_endless(origin: str, tokenizer: str, end: str) -> None:
    """Warns, once, about a template whose end of a turn is not a token of its own."""
    log.warning(
        "%s: ends a turn with %r, which is not a special or added token of tokenizer %s. A model "
        "trained on it never stops by itself. Take a tokenizer that has it, name it among the "
        "special tokens of train_bpe, or add it to a published model by model.add_tokens.",
        origin,
        end,
        tokenizer,
    )


@functools.cache
def _warn_text_arguments(origin: str) -> None:
    """Warns, once, about a template that quotes the arguments of tool calls."""
    log.warning(
        "%s: writes the arguments of tool calls, which rows hold as JSON text, as quoted text: "
        '"arguments": "{\\"...". A model trained on it writes text in place of an object. Store '
        "arguments as objects in the rows.",
        origin,
    )


def answers_of(
    spec: Mapping[str, Json], rows: Sequence[Asked | Refused], origin: str
) -> list[Rendered | Refused]:
    """Returns the worker processes' answers for rows with the template of `spec` (see worker.py).

    Args:
        origin: The name of the template in errors.
    """
    done = {i: row for i, row in enumerate(rows) if isinstance(row, Refused)}
    answers: dict[int, Rendered | Refused] = {**done}
    numbers = [i for i in range(len(rows)) if i not in done]
    ended: set[int] = set()
    while waiting := [i for i in numbers if i not in answers]:
        asking: list[Asked] = [row for i in waiting if not isinstance(row := rows[i], Refused)]
        with contextlib.closing(asked(spec, asking)) as batches:
            for n, answer in enumerate(itertools.chain.from_iterable(batches)):
                if isinstance(answer, Rendered | Refused):
                    answers[waiting[n]] = answer
                    continue
                bad = waiting[n + answer.row] if isinstance(answer, Ended) else waiting[n]
                blamed = isinstance(answer, Hostile) or (not ended and _ends_short(spec, rows[bad]))
                ended.add(bad)
                last = numbers[: numbers.index(bad) + 1][-MOST_ENDED:]
                if blamed or (len(last) == MOST_ENDED and ended >= {*last}):
                    error = HostileTemplateError(
                        at=origin,
                        problem=f"the template cannot be used: {answer.why}",
                        fix="Give another one.",
                    )
                    error.row = bad
                    raise error
                answers[bad] = Refused(BEYOND_LIMITS, answer.why)
                break  # the rows before it had no answer yet: they are asked again
    return [answers[i] for i in range(len(rows))]


def _ends_short(spec: Mapping[str, Json], row: Asked | Refused) -> bool:
    """Whether a worker also ends at the shortest row of the kind of `row`."""
    fields = row.get("fields") if isinstance(row, Mapping) else None
    short = _probes(parts=False)[0] if fields is None else {"fields": dict.fromkeys(fields, "x")}
    with contextlib.closing(asked(spec, [short])) as batches:
        return isinstance(next(batches)[0], Ended)


def load_chat_template(
    tokenizer: Tokenizer,
    *,
    chat_template: str | Path | None,
    train_on: str,
    date: str | None,
    train_empty_thinking: bool = True,
    kwargs: Mapping[str, Json] = MappingProxyType({}),
    train_on_eos: str = "turn",
) -> ChatTemplate:
    """Loads the tokenizer's own template, or the given one: a file, its text, or a built-in name.

    Args:
        chat_template: The given template; None takes the tokenizer's own.
        train_on: As in ChatTemplate, like all options that are not described here.
        kwargs: Further variables of the template, as `apply_chat_template` of transformers takes
            them.

    Raises:
        TokenizerError: The tokenizer has no template.
        ConfigError: A file is missing, a date is invalid, the template does not read kwargs or asks
            for other files.
    """
    if date is not None:
        check_date(date)
    tool_use = None
    if chat_template is None:
        source, tool_use, origin = find_chat_template(tokenizer.name)
        source = without_mark(source)
        tool_use = tool_use and without_mark(tool_use)
    else:
        source, origin = given_template(chat_template, at="chat_template", names=CHAT_TEMPLATES)
    for text in (source, tool_use):
        check_whole(text, "chat_template", origin)
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", f"{source} {tool_use}"):
            at, problem = (
                f"chat_template_kwargs.{name}",
                f"has no effect: {origin} reads no {name!r}",
            )
            raise ConfigError(at=at, problem=problem, fix="Correct the name, or leave it out.")
    ends = set(map(tokenizer.token, find_end_tokens(tokenizer.name)))
    return ChatTemplate(
        source=source,
        tool_use=tool_use,
        names={**tokenizer.special_strings, **kwargs},
        closers=tokenizer.special_tokens,
        train_on=train_on,
        date=date,
        origin=origin,
        train_empty_thinking=train_empty_thinking,
        train_on_eos=train_on_eos,
        end_tokens=tuple(one for one in tokenizer.special_tokens if one in ends),
    )


def check_date(date: str) -> None:
    """Raises ConfigError for a text that is not an ISO date."""
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ConfigError(
            at="template_date", problem=f"{date!r} is not a date", fix="Write it as 2026-01-31."
        ) from None


def wrong_kwargs(kwargs: Mapping[str, Json]) -> tuple[str, str] | None:
    """Returns (name, why) for a variable that chat_template_kwargs must not set, or None."""
    for name, value in kwargs.items():
        if name in RESERVED or not name.isidentifier():
            return name, "is not a variable that a template can be given"
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return name, f"{value!r:.80} cannot be written as JSON"
    return None


def check_kwargs(kwargs: Mapping[str, Json] | None) -> None:
    """Raises ConfigError for variables that chat_template_kwargs must not set."""
    if (wrong := wrong_kwargs(kwargs or {})) is not None:
        at, problem = f"chat_template_kwargs.{wrong[0]}", wrong[1]
        raise ConfigError(at=at, problem=problem, fix="Give what the template reads as JSON.")


def is_jinja(text: str) -> bool:
    """Whether a text is a Jinja template."""
    return "{%" in text or "{{" in text or "{#" in text


def check_whole(template: str | Path | None, at: str, origin: str | None = None) -> None:
    """Raises ConfigError for Jinja that asks for other files, which templates do not get.

    Text that is not Jinja passes. `origin` is where the template is from.
    """
    if not isinstance(template, str) or not is_jinja(template):
        return
    import jinja2

    try:
        # It is only parsed, not compiled: the worker processes handle hostile templates.
        tokens = list(jinja2.Environment(autoescape=True).lex(template))
    except jinja2.TemplateSyntaxError:
        return  # the worker processes report it
    code = [(line, kind, text) for line, kind, text in tokens if kind != "whitespace"]
    for (_, begins, _), (line, _, word) in itertools.pairwise(code):
        if begins == "block_begin" and word in OTHER_FILES:
            where = f"line {line}" if origin in (None, at) else f"{origin}, line {line}"
            problem = (
                f"{where}: asks for another file ({{% {word} %}}), and a template is given none"
            )
            raise ConfigError(at=at, problem=problem, fix="Write it as one template.")


def given_template(
    template: str | Path, *, at: str, names: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str]:
    """Returns (source, origin) of a Jinja template: its text, a name among `names`, or a file.

    Raises:
        ConfigError: `template` is none of these.
    """
    text = str(template)
    if isinstance(template, str) and is_jinja(text):
        return without_mark(text), at
    if text in names:
        return names[text], f"built-in template {text!r}"
    path = Path(os.path.expanduser(text))
    if not os.path.isfile(path):  # a device may never end
        meant = did_you_mean(text, names) or (near_path(path)[1] if path.suffix else None)
        raise ConfigError(
            at=at,
            problem=f"{text[:200]!r} is neither a file nor the text of a template",
            have=sorted(names) or None,
            fix=meant
            or (
                "Give the path of a .jinja file." if "{" not in text else "Set format_type: custom."
            ),
        )
    with raising(
        ConfigError,
        at,
        f"{path} cannot be read",
        "Give a Jinja template in UTF-8.",
        (OSError, UnicodeDecodeError),
    ):
        return without_mark(path.read_text(encoding="utf-8")), str(path)


def without_mark(template: str) -> str:
    """Returns a template without the byte-order mark that editors put at the beginning of files.

    Every row would begin with it.
    """
    return template.removeprefix("\ufeff")


def is_unicode(value: JsonValue) -> bool:
    """Whether all text in a value can be written as UTF-8; bytes are not text."""
    if isinstance(value, dict):
        return all(map(is_unicode, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_unicode, value))
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        return False
    return not isinstance(value, bytes)

"""Runs strangers' templates in a process with limits: why a row is refused, what is not printed.

A request has two frames. The first is the JSON of what the rows are written with. The second is
JSON of the rows. Each row is a list of JSON texts: one object, {"messages": …, "tools": …} or
{"fields": …}, or messages and tools as a file had them, which are checked here.

Answers to some rows are a frame: MORE, or LAST for the last frame of a request, and JSON with one
list for each row. A list is [text, spans, end], [reason, detail] for a refused row, or [detail] for
a hostile template. The number of the row in progress is written to a file that the reader shares,
in case this process is ended. The process reads until its input ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from easypipe.transforms.chat.conversations import MessageReader, Wrong, loaded, wrong_calls
from easypipe.transforms.chat.sandbox import (
    NO_MEMORY,
    REASONING,
    HostileError,
    Json,
    LimitError,
    Message,
    RenderError,
    Template,
    as_given,
)
from easypipe.transforms.chat.sentinels import UnprovenError, forms_of, unused_stem
from easypipe.transforms.chat.spans import LAST, MASKED_END, MORE, TRAINED_END, Rendered, Spans
from easypipe.transforms.refused import BEYOND_LIMITS, UNPRINTED_REASONING

# processor time of one conversation; SIGPROF ends the process, even in the middle of a call into C
CPU_SECONDS = 0.75
MEMORY_BYTES = 1 << 30
_MAPPED = (
    "prompt: {format_type: sharegpt, input_columns: [COLUMN], roles: {NAME: assistant}} maps them"
)
_TOO_DEEP = "not_json", "nested too deeply"
MOST_KINDS = 256  # the most chat_template_kwargs whose ends of turns are remembered
# after this many characters of text, answers are sent although there are more rows
ANSWER_CHARACTERS = 1 << 20


def main() -> None:
    """Reads requests and answers them until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent handles Ctrl-C; it closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    gc.freeze()  # the garbage collector never visits imported objects again
    number_file, connection = int(sys.argv[1]), Connection(int(sys.argv[2]))
    writers: dict[bytes, _Writer] = {}
    with contextlib.suppress(EOFError):
        while spec := connection.recv_bytes():
            if spec not in writers:
                writers[spec] = _Writer(json.loads(spec))
            write = writers[spec]
            # All rows at once, because the asking process reads nothing before.
            # a row of some hundred MB ends this process here, alone
            rows = json.loads(connection.recv_bytes())
            answers: list[Sequence[Json]] = []
            held = 0
            for number, texts in enumerate(rows):
                os.pwrite(number_file, number.to_bytes(8, "little"), 0)
                row = write.read(texts)
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                answers.append(write.answer(row))
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                held += len(answers[-1][0])
                last = number == len(rows) - 1
                if held > ANSWER_CHARACTERS or last:
                    kind = LAST if last else MORE
                    connection.send_bytes(kind + json.dumps(answers).encode())
                    answers, held = [], 0


class _Writer:
    """The writer for one spec; its templates are compiled when a row first needs them."""

    def __init__(self, spec: Message) -> None:
        self._spec = spec
        self._reader = MessageReader(**spec.get("reader", {}))
        self._templates: dict[str, Template | HostileError] = {}
        self._known: dict[tuple[str, str], Spans] = {}

    def read(self, texts: Sequence[str]) -> Message | Wrong:
        """Parses a row for `answer`, or returns what is wrong with it."""
        try:
            if len(texts) == 1:
                return json.loads(texts[0])
            said, tools = map(loaded, texts)
            talk = self._reader.translated(said)
            return self._reader.wrong(talk, tools) or self._reader.whole(talk, tools)
        except MemoryError:
            return BEYOND_LIMITS, NO_MEMORY
        except RecursionError:
            return _TOO_DEEP

    def answer(self, row: Message | Wrong) -> Sequence[Json]:
        """Returns the answer for a row: [text, spans, end], [reason, detail] or [detail]."""
        if isinstance(row, tuple):
            return row
        try:
            return self._written(row)
        except HostileError as error:
            return [str(error)]
        except LimitError as error:
            return [BEYOND_LIMITS, str(error)]
        except MemoryError:
            return [BEYOND_LIMITS, NO_MEMORY]
        except RecursionError:
            return _TOO_DEEP
        except RenderError as error:
            wrong = wrong_calls(row["messages"], row["tools"]) if "messages" in row else None
            return ["not_a_message", wrong] if wrong else ["refused_by_template", str(error)]
        except UnprovenError as error:
            return ["unproven_spans", str(error)]

    def _written(self, row: Message) -> Sequence[Json]:
        """Writes a row: [text, spans, end], or [reason, detail] if it is refused."""
        train_on = self._spec["train_on"]
        if "fields" in row:
            found = find_label(
                self._template("source"), row["fields"], self._spec["label"], train_on
            )
        else:
            name = "tool_use" if row["tools"] and self._spec["tool_use"] is not None else "source"
            spans, talk = self._spans(name, row.get("kwargs", {})), as_given(row["messages"])
            if self._spec.get("prompt"):
                text, _ = spans.template.render(talk, row["tools"], prompt=True)
                found = Rendered(text, [(0, len(text))], len(text))
            elif self._loses_reasoning(spans.template, talk):
                asked = self._spec["reasoning"]
                detail = f"reasoning={asked!r} has no effect: the template prints no {REASONING[0]}"
                return [UNPRINTED_REASONING, detail]
            else:
                found = spans.find(talk, row["tools"], train_on, row.get("answers"))
        if not found.text.strip():
            return ["empty", "the template prints nothing"]
        if not any(a < b for a, b in found.spans):
            roles = {str(one.get("role")): None for one in row.get("messages", ())}
            spoken = f"; its messages are from {', '.join(map(repr, roles))}"[:200]
            unknown = roles.keys() - {"system", "developer", "user", "assistant", "tool"}
            silent = f"{spoken}; {_MAPPED}" if unknown else ""
            given = self._spec.get("roles_to_train")
            asks = f"train_on={train_on!r}" if given is None else f"roles_to_train={[*given]}"
            return ["nothing_to_train", f"no text that {asks} asks for{silent}"]
        try:
            found.text.encode()
        except UnicodeEncodeError:
            return ["invalid_utf8", "a text holds half of a surrogate pair"]
        return found[:3]

    def _loses_reasoning(self, template: Template, talk: Sequence[Message]) -> bool:
        """Whether an option concerns reasoning that is there but that `template` never prints."""
        thinks = any(one.get("role") == "assistant" and one.get(REASONING[0]) for one in talk)
        chosen = self._spec.get("reasoning", "keep") != "keep"
        return chosen and thinks and not prints_reasoning(template)

    def _spans(self, name: str, kwargs: Message) -> Spans:
        """Returns the Spans of a template.

        Args:
            name: The name of the template in the spec.
            kwargs: The template's variables for a row besides its messages and tools.
        """
        key = name, json.dumps(kwargs, sort_keys=True) if kwargs else ""
        if key not in self._known:
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            template = self._template(name)
            self._known[key] = Spans(
                template.with_names(kwargs) if kwargs else template,
                self._spec["closers"],
                self._spec.get("train_empty_thinking", True),
                self._spec.get("train_on_eos", "turn"),
                self._spec.get("roles_to_train", ("assistant",)),
                self._spec.get("reasoning") == "mask",
                self._spec.get("end_tokens", ()),
            )
        return self._known[key]

    def _template(self, name: str) -> Template:
        """Returns a compiled template of the spec.

        Raises:
            HostileError: It does not compile.
        """
        found = self._templates.get(name)
        if found is None:
            try:
                found = Template(self._spec[name], self._spec["names"], self._spec["date"])
            except HostileError as error:
                found = error
            self._templates[name] = found
        if isinstance(found, HostileError):
            raise found.with_traceback(None)
        return found


@functools.lru_cache(MOST_KINDS)
def prints_reasoning(template: Template) -> bool:
    """Whether a template prints the reasoning of the last answer, or of a last tool call.

    If it refuses such messages, it is assumed to do so.
    """
    probe = "easypipeReasoningProbe"
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!", "reasoning_content": probe}
    call = {"id": "callprobe", "type": "function", "function": {"name": "f", "arguments": {}}}
    for last in (answer, {**answer, "tool_calls": [call]}):
        try:
            text, _ = template.render(as_given([question, last]))
        except RenderError:
            return True  # it cannot be known
        if probe in text:
            return True
    return False


def find_label(template: Template, fields: Message, label: str | None, train_on: str) -> Rendered:
    """Writes a row of columns, and finds the trained spans of the text.

    They are what `{% generation %}` marks, or else everything from the label to the end. With no
    label, or with train_on="all", they are the whole text.

    Raises:
        RenderError: The template refuses the row.
        UnprovenError: It cannot be known what is trained on.
    """
    text, marked = template.write(fields)
    if train_on == "all" or (label is None and not template.marked):
        return Rendered(text, [(0, len(text))] if text else [], TRAINED_END)
    if template.marked:
        closed = bool(marked) and not text[marked[-1][1] :].strip()
        return Rendered(text, marked, TRAINED_END if closed else MASKED_END)
    assert label is not None
    word = unused_stem(text)
    other, _ = template.write({**fields, label: word})
    if other.count(word) != 1:
        raise UnprovenError(f"the template prints {label!r} as it is {other.count(word)} times")
    before, after = other.split(word)
    said = text[len(before) : len(text) - len(after)]
    whole = (
        text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
    )
    if not whole or said not in forms_of(fields[label]):
        raise UnprovenError(
            f"putting another word in place of {label!r} changes more than that word"
        )
    return Rendered(text, [(len(before), len(text))] if said else [], TRAINED_END)


if __name__ == "__main__":
    main()

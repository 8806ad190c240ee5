"""A process of its own for chat templates, which are programs of strangers: the system ends it
where one takes too long or too much.

A request is two lines of JSON and bytes: what the rows are written with; a list of sizes for each
row; their JSON, so many bytes each. A row is one object, {"messages": …, "tools": …} or {"fields":
…}, or messages and tools as it had them, which are checked here. Answers to some rows are a line of
JSON and bytes: [[size, spans, end], …], [0, reason, detail] for one that is refused, [0, detail]
for a hostile template; and the texts, `size` bytes of UTF-8 each. The number of the row at hand
stands in a file that the reader shares, for when this process is ended. Reads until its input ends.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import BinaryIO

from easypipe.transforms.chat.conversations import MessageReader, Wrong, loaded
from easypipe.transforms.chat.sandbox import (
    NO_MEMORY,
    HostileError,
    Json,
    Message,
    RenderError,
    Template,
    as_given,
)
from easypipe.transforms.chat.sentinels import UnprovenError
from easypipe.transforms.chat.spans import Spans
from easypipe.transforms.prompt.label_span import find_label

# of one conversation; SIGPROF ends the process, also in the middle of a call into C
CPU_SECONDS = 0.75
MEMORY_BYTES = 1 << 30
ANSWER_BYTES = 1 << 20  # of texts, after which answers go out though there are more rows


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    gc.freeze()  # what was imported is never looked through again
    number_file, source, output = int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer
    writers: dict[bytes, _Writer] = {}
    while spec := source.readline():
        if spec not in writers:
            writers[spec] = _Writer(json.loads(spec))
        write = writers[spec]
        # all: who asks reads nothing before
        rows = [[source.read(size) for size in sizes] for sizes in json.loads(source.readline())]
        answers: list[list[Json]] = []
        texts: list[bytes] = []
        held = 0
        for number, cells in enumerate(rows):
            os.pwrite(number_file, number.to_bytes(8, "little"), 0)
            row = write.read(cells)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            answer, text = write.answer(row)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answers.append([len(text), *answer])
            texts.append(text)
            held += len(text)
            if held > ANSWER_BYTES:
                _send(output, answers, texts)
                held = 0
        _send(output, answers, texts)


def _send(output: BinaryIO, answers: list[list[Json]], texts: list[bytes]) -> None:
    if answers:
        output.write(b"".join([json.dumps(answers).encode(), b"\n", *texts]))
        output.flush()
        answers.clear()
        texts.clear()


class _Writer:
    """What one spec asks for; its templates are compiled when first a row needs them."""

    def __init__(self, spec: Message) -> None:
        self._spec = spec
        self._reader = MessageReader(**spec.get("reader", {}))
        self._templates: dict[str, Spans | HostileError] = {}

    def read(self, cells: Sequence[bytes]) -> Message | Wrong | HostileError:
        """A row for `answer`."""
        try:
            if len(cells) == 1:
                return json.loads(cells[0])
            said, tools = (loaded(cell.decode("utf-8", "surrogatepass")) for cell in cells)
            talk = self._reader.translated(said)
            return self._reader.wrong(talk, tools) or self._reader.whole(talk, tools)
        except MemoryError:
            return HostileError(NO_MEMORY)
        except RecursionError:
            return "not_json", "nested too deeply"

    def answer(self, row: Message | Wrong | HostileError) -> tuple[Sequence[Json], bytes]:
        """([spans, end], [reason, detail] or [detail], the text in UTF-8)."""
        if isinstance(row, tuple):
            return row, b""
        try:
            if isinstance(row, HostileError):
                raise row
            return self._written(row)
        except HostileError as error:
            return [str(error)], b""
        except MemoryError:
            return [NO_MEMORY], b""
        except RenderError as error:
            return ["refused_by_template", str(error)], b""
        except UnprovenError as error:
            return ["unproven_spans", str(error)], b""

    def _written(self, row: Message) -> tuple[Sequence[Json], bytes]:
        train_on = self._spec["train_on"]
        if "fields" in row:
            found = find_label(
                self._spans("source").template, row["fields"], self._spec["label"], train_on
            )
        else:
            name = "tool_use" if row["tools"] and self._spec["tool_use"] is not None else "source"
            found = self._spans(name).find(as_given(row["messages"]), row["tools"], train_on)
        if not found.text.strip():
            return ["empty", "the template prints nothing"], b""
        if not any(a < b for a, b in found.spans):
            return ["nothing_to_train", f"no text that train_on={train_on!r} asks for"], b""
        try:
            return [found.spans, found.end], found.text.encode()
        except UnicodeEncodeError:
            return ["invalid_utf8", "a text holds half of a surrogate pair"], b""

    def _spans(self, name: str) -> Spans:
        """Raises HostileError for a template that does not compile."""
        found = self._templates.get(name)
        if found is None:
            try:
                template = Template(self._spec[name], self._spec["names"], self._spec["date"])
                found = Spans(
                    template, self._spec["closers"], self._spec.get("train_empty_thinking", True)
                )
            except HostileError as error:
                found = error
            self._templates[name] = found
        if isinstance(found, HostileError):
            raise found.with_traceback(None)
        return found


if __name__ == "__main__":
    main()

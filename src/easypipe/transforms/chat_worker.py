"""A process of its own for chat templates, which are programs of strangers: the system ends it where one takes too long or too much.

A request is a line of JSON: {"template": …, "rows": [{"messages": …, "tools": …} or {"fields": …}, …]}; the answers are lines of
JSON, one a row: {"spans": [[a, b], …], "end": 0, "size": n}, with the n bytes of the text behind it, or {"refused": reason, "detail": …}
or {"hostile": detail}. The number of the row at hand stands in a file that the reader shares, for when this process is ended. Reads until
its input ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from easypipe.transforms.chat_sandbox import HostileError, RenderError, Template, with_aliases
from easypipe.transforms.chat_spans import Spans, UnprovenError
from easypipe.transforms.label_span import find_label

CPU_SECONDS = 0.75  # of one conversation; SIGPROF ends the process, also in the middle of a call into C
MEMORY_BYTES = 1 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    number_file, output = int(sys.argv[1]), open(1, "wb", buffering=1 << 20, closefd=False)  # noqa: SIM115 (a request has many short answers)
    templates: dict[str, Spans | HostileError] = {}
    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        spec = request["template"]
        key = json.dumps(spec, sort_keys=True)
        for number, row in enumerate(request["rows"]):
            os.pwrite(number_file, number.to_bytes(8, "little"), 0)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            if key not in templates:
                templates[key] = _compiled(spec)
            answer = _answer(templates[key], row, spec)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            text = answer.pop("text", None)
            data = b"" if text is None else text.encode("utf-8", "surrogatepass")  # not as JSON, which is slow with many lines
            output.write(json.dumps(answer if text is None else answer | {"size": len(data)}).encode() + b"\n" + data)
        output.flush()


def _compiled(spec: dict[str, Any]) -> Spans | HostileError:
    try:
        return Spans(Template(spec["source"], spec["names"], spec["date"]), spec["closers"])
    except HostileError as error:
        return error


def _answer(spans: Spans | HostileError, row: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    train_on = spec["train_on"]
    if isinstance(spans, HostileError):
        return {"hostile": str(spans)}
    try:
        if "fields" in row:
            found = find_label(spans.template, row["fields"], spec["label"], train_on)
        else:
            found = spans.find(with_aliases(row["messages"]), row["tools"], train_on)
    except HostileError as error:
        return {"hostile": str(error)}
    except MemoryError:
        return {"hostile": "it takes more memory than a template may have"}
    except RenderError as error:
        return {"refused": "refused_by_template", "detail": str(error)}
    except UnprovenError as error:
        return {"refused": "unproven_spans", "detail": str(error)}
    if not found.text:
        return {"refused": "empty", "detail": "the template prints nothing"}
    if not any(a < b for a, b in found.spans):
        return {"refused": "nothing_to_train", "detail": f"no text that train_on={train_on!r} asks for"}
    return {"text": found.text, "spans": found.spans, "end": found.end}


if __name__ == "__main__":
    main()

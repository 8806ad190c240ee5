"""Template: renders chat templates as transformers does, in a sandbox: allowed calls, limits.

This file imports only jinja2, because it runs in the worker process of worker.py, which limits time
and memory. The sandbox here keeps templates from reaching attributes and from changing their input.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

Json = Any  # a value that JSON can hold; it is checked before it is used
Row = Message = Mapping[str, Json]
Span = tuple[int, int]  # the first character, and the character after the last

MOST_CHARACTERS = 1 << 25  # the longest conversation that may be rendered
# variables of templates that chat_template_kwargs may not replace
RESERVED = ("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message")
# names of the same key; templates read the first
REASONING = ("reasoning_content", "thinking", "reasoning")
KEYS_OF_REASONING = frozenset(REASONING)

_OF_DICT = frozenset(dir(dict))
# The sandbox itself handles `format`.
_OF_STR = frozenset(name for name in dir(str) if name[0] != "_" and not name.startswith("format"))
_OF_LOOP = frozenset(name for name in dir(LoopContext) if name[0] != "_")
# as Python writes objects that have no text of their own
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# What jinja2 says of a method that changes a list or object. Some published templates keep lists,
# and only rows that reach such a method are refused.
_CHANGES = re.compile(r"access to attribute '[a-z]\w*' of '(list|dict|set)' object is unsafe")
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


NO_MEMORY = "it takes more memory than a template may have"


class RenderError(Exception):
    """Raised if the template refuses a conversation."""


class LimitError(Exception):
    """Raised for a conversation that exceeds the limits of one conversation."""


class HostileError(Exception):
    """Raised if the template does something forbidden, which would happen in every conversation."""


class Template:
    """A compiled chat template. Not thread-safe.

    Args:
        source: The text of the template.
        names: Its variables besides messages and tools: `bos_token`, `eos_token`,
            `enable_thinking`, ...
        date: The ISO date that `strftime_now` returns; None refuses templates that ask for it.

    Raises:
        HostileError: The template does not compile.
    """

    def __init__(self, source: str, names: Mapping[str, Json], date: str | None = None) -> None:
        self.marked = _MARKER.search(source) is not None
        self._names = dict(names)
        self._source = source
        self._environment = _environment(date)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise HostileError(f"line {error.lineno} is not Jinja: {error.message}") from None
        except RecursionError:
            raise HostileError("it is nested too deeply") from None
        except MemoryError:
            raise HostileError(NO_MEMORY) from None
        except Exception as error:  # noqa: BLE001 (jinja works constants out while it compiles)
            raise HostileError(
                f"it does not compile: {type(error).__name__}: {error}"[:500]
            ) from None
        # The globals are a chain with one mapping, and every rendering would copy it slowly.
        self._template.globals = dict(self._template.globals)

    def with_names(self, names: Mapping[str, Json]) -> Template:
        """Returns the same template with these variables too."""
        other = copy.copy(self)
        other._names = {**self._names, **names}
        return other

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Renders a conversation.

        Args:
            prompt: Whether to open an assistant turn at the end.

        Returns:
            (text, character ranges between `{% generation %}` markers).

        Raises:
            RenderError: The template refuses the conversation.
            LimitError: The conversation exceeds its limits.
            HostileError: The template does something forbidden.
        """
        return self.write(
            {
                "messages": messages,
                "tools": tools,
                "documents": self._names.get("documents"),
                "add_generation_prompt": prompt,
            }
        )

    def write(self, variables: Mapping[str, Json]) -> tuple[str, list[Span]]:
        """Does the work of `render` for a template with these variables, and further names."""
        pieces: list[str] = []
        found: list[tuple[int, str]] = []
        size = 0

        def note(inner: str) -> None:
            found.append((size, inner))

        self._environment.easypipe_note = note  # type: ignore[attr-defined]
        try:
            context = self._template.new_context({**self._names, **variables})
            for piece in self._template.root_render_func(context):
                pieces.append(piece)
                size += len(piece)
                if size > MOST_CHARACTERS:
                    raise LimitError(
                        f"it writes more than {MOST_CHARACTERS} characters for one conversation"
                    )
        except SecurityError as error:
            if _CHANGES.match(str(error)):
                raise RenderError(f"the sandbox stopped it: {error}") from None
            raise HostileError(f"the sandbox stopped it: {error}") from None
        except MemoryError:
            raise LimitError(NO_MEMORY) from None
        except RecursionError:
            raise HostileError("it calls itself without end") from None
        # what the sandbox says to range(10**9), and Python to larger numbers
        except OverflowError as error:
            raise HostileError(f"it asks for too much: {error}") from None
        except (HostileError, LimitError):
            raise
        except Exception as error:  # noqa: BLE001 (a template can raise anything that Python can)
            name = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RenderError(_ADDRESS.sub("", f"{name}{error}")[:500]) from None
        finally:
            del self._environment.easypipe_note  # type: ignore[attr-defined]
        text = "".join(pieces)
        if " at 0x" in text and (printed := self._printed_address(text, variables)) is not None:
            raise HostileError(
                "it prints an address in memory, which is different in each process: "
                f"{printed[:80]!r}"
            )
        for start, inner in found:
            if not text.startswith(inner, start):
                raise RenderError(
                    "its generation markers are in a block whose text is changed later, so what "
                    "they mark is not known"
                )
        return text, [(start, start + len(inner)) for start, inner in found if inner]

    def _printed_address(self, text: str, variables: Mapping[str, Json]) -> str | None:
        """Returns a memory address that is in the text but was not given to the template."""
        given = [self._source, *texts_within(variables)]
        found = (match[0] for match in _ADDRESS.finditer(text))
        return next(
            (address for address in found if not any(address in one for one in given)), None
        )


def as_given(messages: Sequence[Message]) -> list[Message]:
    """Returns messages as transformers passes them to templates.

    Keys with null are left out, as many templates would print them as the word None. Reasoning is
    under every name that templates read it from.
    """
    result: list[Message] = []
    for message in messages:
        if None in message.values():
            message = {key: value for key, value in message.items() if value is not None}
        if not KEYS_OF_REASONING.isdisjoint(message):
            reasoning = next(message[key] for key in REASONING if key in message)
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result


def texts_within(value: Json, *, keys: bool = True) -> Iterator[str]:
    """Yields every text in nested lists and objects; with `keys` also the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for parts in (value.keys() if keys else (), value.values()):
            for part in parts:
                yield from texts_within(part, keys=keys)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_within(part, keys=keys)


class _Markers(jinja2.ext.Extension):
    """The extension for `{% generation %}…{% endgeneration %}`, what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        inner = str(caller())
        self.environment.easypipe_note(inner)  # type: ignore[attr-defined]
        return inner


class _Dict:
    """The callable `dict` of templates, without its attributes."""

    def __call__(self, *args: Json, **values: Json) -> dict[Json, Json]:
        return dict(*args, **values)

    def fromkeys(self, *args: Json) -> dict[Json, Json]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The `namespace` of templates, without attributes that begin with an underscore."""

    def __init__(*args: Json, **values: Json) -> None:  # type: ignore[misc]  (so that `self` may be a key)
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **values)
        for name in attributes:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Json) -> None:
        _Namespace._check(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Json) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, made faster: an attribute of an object is mostly a key of a message."""

    def getattr(self, obj: Json, attribute: str) -> Json:
        """Looks up keys of messages and harmless attributes without slow checks."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICT:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _OF_STR) or (
            kind is LoopContext and attribute in _OF_LOOP
        ):
            # The name comes from the template, and is allowed.
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _environment(date: str | None) -> ImmutableSandboxedEnvironment:
    """Returns the sandbox with the filters and functions that transformers offers to templates."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Markers, jinja2.ext.loopcontrols]
    )
    names: dict[str, Json] = environment.globals
    environment.filters["tojson"] = _tojson
    names["raise_exception"] = _raise
    names["strftime_now"] = _clock(date)
    environment.filters["random"] = _by_chance("random")
    names["lipsum"] = _by_chance("lipsum")
    names["dict"] = _Dict()
    names["namespace"] = _Namespace
    return environment


_JSON = json.JSONEncoder(ensure_ascii=False)  # json.dumps would make a new one for every value


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: Json = None,
    separators: Json = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as the `tojson` filter of transformers does, without escaping HTML."""
    if ensure_ascii is False and indent is None and separators is None and sort_keys is False:
        return _JSON.encode(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: Json) -> None:
    raise jinja2.TemplateError(str(message))


def _by_chance(name: str) -> Callable[..., None]:
    @jinja2.pass_context  # so that it is not called while the template compiles
    def refuse(*args: Json, **values: Json) -> None:
        raise HostileError(
            f"it asks for {name!r}, and a conversation must give the same tokens whenever it is "
            "prepared"
        )

    return refuse


def _clock(date: str | None) -> Callable[[str], str]:
    """Returns `strftime_now`, which returns the configured date, never today's."""

    def strftime_now(format: str) -> str:
        if date is None:
            raise jinja2.TemplateError(
                "the template asks for today's date, and what it prints must not depend on the "
                "day: set template_date"
            )
        import datetime

        return datetime.datetime.fromisoformat(date).strftime(format)

    return strftime_now

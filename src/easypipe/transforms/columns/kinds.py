"""What kind of rows a dataset holds, told from names and types of columns and the first rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import pyarrow as pa

from easypipe.core.errors import ConfigError, require_known
from easypipe.core.schema import INPUT_IDS, ROW_NUMBER, SOURCE
from easypipe.transforms.chat.conversations import is_messages, is_text, values_of
from easypipe.transforms.chat.sandbox import Json, Row
from easypipe.transforms.columns.mapper import Choice, Match, Slot, Tie, match_columns

KindName = Literal[
    "text",
    "prompt_completion",
    "unpaired",
    "prompts",
    "alpaca",
    "sharegpt",
    "messages",
    "preference",
    "tokens",
    "unknown",
]

TITLES: dict[str, str] = {
    "text": "plain text",
    "prompt_completion": "prompts with completions",
    "unpaired": "unpaired preferences",
    "prompts": "prompts without answers",
    "alpaca": "Alpaca instructions",
    "sharegpt": "ShareGPT conversations",
    "messages": "OpenAI messages",
    "preference": "preference pairs",
    "tokens": "tokens",
    "unknown": "unknown",
}

_PROMPT = (
    "question",
    "query",
    "instruction",
    "input",
    "problem",
    "prompts",
    "questions",
    "user prompt",
)
_COMPLETION = (
    "answer",
    "response",
    "output",
    "target",
    "solution",
    "completions",
    "answers",
    "responses",
    "reply",
)
_TALK = (
    "messages",
    "conversations",
    "conversation",
    "chat",
    "dialogue",
    "dialog",
    "turns",
    "message",
)
_TOOLS = Slot(name="tools", aliases=("functions", "available tools"), required=False)

# In the order in which they are tried. Every slot's type is decided by `_fits`.
SLOTS: dict[str, tuple[Slot, ...]] = {
    "tokens": (Slot(name=INPUT_IDS, aliases=("tokens", "token ids", "ids")),),
    "preference": (
        Slot(name="chosen", aliases=("preferred", "winner", "response chosen", "chosen response")),
        Slot(name="rejected", aliases=("dispreferred", "loser", "response rejected", "rejected response")),
        Slot(name="prompt", aliases=_PROMPT, required=False),
        _TOOLS,
    ),
    "messages": (Slot(name="messages", aliases=_TALK), _TOOLS),
    "sharegpt": (Slot(name="conversations", aliases=_TALK), _TOOLS),
    "alpaca": (
        Slot(name="instruction", aliases=("instructions", "instruct")),
        Slot(name="input", aliases=("context", "inputs"), required=False),
        Slot(name="output", aliases=("response", "answer", "completion", "outputs", "responses")),
    ),
    "unpaired": (
        Slot(name="prompt", aliases=_PROMPT),
        Slot(name="completion", aliases=_COMPLETION),
        Slot(name="label", aliases=("kto tag",)),
        _TOOLS,
    ),
    "prompt_completion": (Slot(name="prompt", aliases=_PROMPT), Slot(name="completion", aliases=_COMPLETION), _TOOLS),
    "prompts": (Slot(name="prompt", aliases=("prompts",)), _TOOLS),
    "text": (
        Slot(name="text", aliases=("content", "document", "body", "article", "code", "passage", "story", "page content")),
    ),
}  # fmt: skip


CONTENT = ("content", "text", "value")  # keys by which messages of a role say something
# kinds of rows whose columns may hold messages of role and content, beside ShareGPT's
_TALKS = ("messages", "preference", "unpaired", "prompt_completion", "prompts")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A guess.

    choices: which column is what, and why. ties: what two columns could be. roles: who speaks,
    in the order of the first rows.

    tools: whether the first rows name or call tools. fields: the keys of messages that have other
    names than OpenAI's, as the option message_fields has them.
    """

    name: KindName
    choices: tuple[Choice, ...] = ()
    ties: tuple[Tie, ...] = ()
    roles: tuple[str, ...] = ()
    tools: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)

    def column(self, slot: str) -> str | None:
        return next((choice.column for choice in self.choices if choice.slot == slot), None)

    def require_decided(self, at: str) -> None:
        """Raises ConfigError naming the columns between which only the user can choose."""
        if self.ties:
            raise self.ties[0].error(at)

    def __str__(self) -> str:
        parts = [TITLES[self.name]]
        parts += [f"roles {', '.join(self.roles)}"] if self.roles else []
        parts += ["with tools"] if self.tools else []
        return ", ".join(parts)


def guess_kind(
    schema: pa.Schema,
    rows: Sequence[Row] = (),
    *,
    kind: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Kind:
    """What rows with this schema are.

    rows: some of the first, which tell who speaks, and what lists in JSON text hold.

    kind, columns (slot -> column): what the user has decided; the guess is then of the rest. Raises
    ConfigError for a kind, a slot or a column that is not there.
    """
    names = [name for name in schema.names if name not in (ROW_NUMBER, SOURCE)]
    if kind is not None:
        require_known(kind, SLOTS, "kind", f"{kind!r} is no kind of rows")
    kinds = list(SLOTS) if kind is None else [kind]
    kinds = _holding(columns or {}, kinds, names)
    fitting = {
        name: {
            slot.name: [c for c in names if _fits(name, slot.name, schema.field(c), rows)]
            for slot in SLOTS[name]
        }
        for name in kinds
    }
    # a name that is merely alike says less than the exact one of another kind
    for fuzzy in (False, True):
        for name in kinds:
            found = match_columns(SLOTS[name], fitting[name], fuzzy=fuzzy, given=columns)
            if found is not None:
                return _kind(name, found, rows)
    # conversations are told by their type; text may be anything where there is more
    for name in ("messages", "sharegpt", "text"):
        sure = name != "text" or len(names) == 1 or kind == "text"
        if name in kinds and sure and len(only := fitting[name][SLOTS[name][0].name]) == 1:
            choice = Choice(slot=SLOTS[name][0].name, column=only[0], how="only")
            return _kind(name, ((choice,), ()), rows)
    return Kind(name="unknown")


def _holding(columns: Mapping[str, str], kinds: list[str], names: list[str]) -> list[str]:
    """The kinds that have all of these slots."""
    for slot, column in columns.items():
        require_known(column, names, f"columns.{slot}", f"no column {column!r}")
    held = [kind for kind in kinds if columns.keys() <= {slot.name for slot in SLOTS[kind]}]
    if not held:
        have = list(dict.fromkeys(slot.name for kind in kinds for slot in SLOTS[kind]))
        raise ConfigError(
            at="columns",
            problem=f"no kind of rows has {sorted(columns)}",
            have=have,
            fix="Name the parts of one kind.",
        )
    return held


def _kind(name: str, found: Match, rows: Sequence[Row]) -> Kind:
    choices, ties = found
    kind = Kind(name=cast(KindName, name), choices=choices, ties=ties)
    if name not in (*_TALKS, "sharegpt"):
        return kind
    messages = [
        message
        for choice in choices
        if choice.slot != "tools"
        for talk in _talks(rows, choice.column)
        for message in talk
        if isinstance(message, Mapping)
    ]
    said = [message.get("from" if name == "sharegpt" else "role") for message in messages]
    roles = dict.fromkeys(str(role) for role in said if role is not None)
    tools = kind.column("tools")
    named = tools is not None and any(row.get(tools) for row in rows)
    called = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
    fields = {} if name == "sharegpt" else _fields(messages)
    return replace(kind, roles=tuple(roles), tools=named or called, fields=fields)


def _fields(messages: Sequence[Mapping[str, Json]]) -> Mapping[str, str]:
    """The keys that messages have for `content`, and their parts for `text`."""
    keys = {key for message in messages for key in message}
    other = next((key for key in CONTENT[1:] if key in keys), None)
    found = {"content": other} if other is not None and "content" not in keys else {}
    said = [message.get(found.get("content", "content")) for message in messages]
    parts = [part for parts in said if isinstance(parts, list) for part in parts]
    inside = {key for part in parts if isinstance(part, Mapping) for key in part}
    return found | ({"text": "value"} if "value" in inside and "text" not in inside else {})


def _fits(kind: str, slot: str, field: pa.Field, rows: Sequence[Row]) -> bool:
    """Whether a column could be this by its type, or where that is text by what the first rows
    hold.
    """
    t = pa.types
    text = is_text(field.type)
    if kind == "tokens":
        return (t.is_list(field.type) or t.is_large_list(field.type)) and t.is_integer(
            field.type.value_type
        )
    if slot == "tools":
        return text or t.is_list(field.type) or t.is_large_list(field.type) or t.is_null(field.type)
    if slot == "label":
        return t.is_boolean(field.type)
    talk = is_messages(field.type) or (text and bool(_talks(rows, field.name)))
    if kind == "prompts" and not talk:
        return False
    if kind == "sharegpt":
        return talk and _says(("from", "value"), field, rows)
    if kind == "messages":
        return talk and any(_says(("role", key), field, rows) for key in CONTENT)
    if kind in _TALKS and talk:
        return _says(("role", "content"), field, rows)
    return text and not talk


def _says(keys: tuple[str, str], field: pa.Field, rows: Sequence[Row]) -> bool:
    if is_messages(field.type):
        inside = field.type.value_type
        return all(inside.get_field_index(key) >= 0 for key in keys)
    first = _talks(rows, field.name)[0]
    return all(isinstance(message, Mapping) and keys[0] in message for message in first)


def _talks(rows: Sequence[Row], column: str) -> list[list[Json]]:
    """The conversations of a column: lists as they are, or JSON of lists, where all of its text is
    that.
    """
    found = [value for row in rows if (value := row.get(column))]
    if any(isinstance(value, str) for value in found):
        if not all(isinstance(value, str) and value.lstrip()[:1] == "[" for value in found):
            return []
        found = values_of(pa.array(found, pa.large_string()), keep=())
    return (
        found
        if all(
            isinstance(value, list) and value and isinstance(value[0], Mapping) for value in found
        )
        else []
    )

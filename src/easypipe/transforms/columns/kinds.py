"""Guesses what kind of rows a dataset holds, from columns and first rows; names the kinds.

Names of columns are matched with what rows of a kind need. A match is a proposal with its reason.
If two columns fit equally well, neither is proposed: only the user knows which one is meant.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import pyarrow as pa

from easypipe.core.errors import ConfigError, require, require_known
from easypipe.core.schema import INPUT_IDS, ROW_NUMBER, SOURCE, is_list
from easypipe.transforms.chat.columns import VERDICTS, is_messages, is_text, values_of
from easypipe.transforms.chat.conversations import CONTENT, SPEAKER, TALK, keys_of
from easypipe.transforms.chat.sandbox import Json, Row

LIKE = 85  # of 100: names that are less alike than this do not match
NEAR = 3  # scores nearer than this count as equal

How = Literal["given", "exact", "alias", "fuzzy", "only"]
OTHERS = {
    "id",
    "ids",
    "hash",
    "url",
    "type",
    "length",
    "len",
    "count",
    "lang",
    "language",
    "name",
    "source",
}  # words that make a column something else: `prompt_id` is not a prompt


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Something that rows of a kind have, with the names that people give its column.

    Attributes:
        name: The exact name.
        aliases: Other names.
        required: Whether rows of the kind must have it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A column that is proposed for a slot.

    Attributes:
        slot: The slot.
        column: The column.
        how: `given` by the user, `exact` name, `alias`, `fuzzy` similarity, or the `only` column
            that could be it.
        known: With `fuzzy`, the name that the column is like.
        score: With `fuzzy`, how alike they are, of 100.
    """

    slot: str
    column: str
    how: How
    known: str = ""
    score: float = 100.0

    @property
    def reason(self) -> str:
        """The reason in words."""
        return {
            "given": "as you say",
            "exact": f"named {self.slot!r} exactly",
            "alias": f"an alias of {self.slot!r}",
            "fuzzy": f"like {self.known!r} ({self.score:.0f} of 100)",
            "only": f"the only column that can be {self.slot!r}",
        }[self.how]


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Columns that fit a slot equally well, and why."""

    slot: str
    columns: tuple[str, ...]
    why: str

    def error(self, at: str, *, typed: bool = False) -> ConfigError:
        """Returns the error that asks the user to choose; `typed` as in `decisions`."""
        names = " and ".join(repr(name) for name in self.columns)
        chosen = decisions("columns", {self.slot: self.columns[0]}, typed=typed)
        return ConfigError(
            at=at,
            problem=f"columns {names} fit {self.slot!r} equally well: {self.why}",
            have=self.columns,
            fix=f"Say which one is meant: {chosen}.",
        )


OPTIONS = {"columns": "--column", "roles": "--role"}  # what `easypipe discover` calls decisions


def decisions(name: str, decided: Mapping[str, str | None], *, typed: bool) -> str:
    """Returns decisions in the words in which the user makes them.

    Args:
        name: `columns` or `roles`.
        decided: What is decided; None is for the user to fill in.
        typed: Whether the user types options of the command line, and not Python.
    """
    if typed:
        words = (f"{key}={value or name[:-1].upper()}" for key, value in decided.items())
        return " ".join(f"{OPTIONS[name]} {shlex.quote(word)}" for word in words)
    pairs = (f"{key!r}: {value!r}" if value else f"{key!r}: ..." for key, value in decided.items())
    return f"{name}={{{', '.join(pairs)}}}"


Match = tuple[tuple[Choice, ...], tuple[Tie, ...]]  # what was found, and what is undecided


def match_columns(
    slots: Sequence[Slot],
    fitting: Mapping[str, Sequence[str]],
    *,
    fuzzy: bool,
    given: Mapping[str, str] | None = None,
) -> Match | None:
    """Proposes columns for `slots`.

    A column is used once, and better reasons choose first, over all slots.

    Args:
        fitting: For each slot the columns whose type it could have.
        fuzzy: Whether names that are merely alike count too.
        given: What the user has decided.

    Returns:
        (choices, ties); the result is None if a required slot has no column.
    """
    chosen = {
        slot: Choice(slot=slot, column=column, how="given")
        for slot, column in (given or {}).items()
    }
    ties: dict[str, Tie] = {}
    for how in ("exact", "alias", "fuzzy") if fuzzy else ("exact", "alias"):
        for slot in slots:
            name = slot.name
            if name in chosen or name in ties:
                continue
            used = {choice.column for choice in chosen.values()}
            found = _candidates(slot, [one for one in fitting[name] if one not in used], how)
            if len(found) == 1:
                chosen[name] = found[0]
            elif found:
                each = [f"{one.column!r} is {one.reason}" for one in found]
                why = " and ".join(each) if how == "fuzzy" else f"both are {found[0].reason}"
                ties[name] = Tie(slot=name, columns=tuple(one.column for one in found), why=why)
    if any(slot.required and slot.name not in {*chosen, *ties} for slot in slots):
        return None
    return tuple(chosen[one.name] for one in slots if one.name in chosen), tuple(ties.values())


def _candidates(
    slot: Slot, columns: Sequence[str], how: Literal["exact", "alias", "fuzzy"]
) -> list[Choice]:
    """Returns the columns whose names fit a slot, by one kind of similarity."""
    known = {plain(name): name for name in (*slot.aliases, slot.name)}
    if how != "fuzzy":
        same = [
            one for one in columns if (one == slot.name if how == "exact" else plain(one) in known)
        ]
        return [Choice(slot=slot.name, column=one, how=how) for one in same]
    scored = {one: _best(plain(one), known) for one in columns}
    best = max((score for score, _ in scored.values()), default=0.0)
    return [
        Choice(slot=slot.name, column=one, how=how, known=name, score=score)
        for one, (score, name) in scored.items()
        if score >= LIKE and best - score < NEAR
    ]


def plain(name: str) -> str:
    """Returns the same name for `userPrompt`, `user-prompt` and `User_Prompt`."""
    return (
        " ".join(re.split(r"[\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name))).strip().lower()
    )


def _best(name: str, known: Mapping[str, str]) -> tuple[float, str]:
    """Returns (score, name) of the known name that is most like `name`.

    The score counts letters that agree, or a known name that is whole among its words.
    """
    from rapidfuzz import fuzz

    words = name.split()
    if OTHERS & set(words):
        return 0.0, name

    def score(other: str) -> float:
        whole = len(words) > 1 and set(other.split()) <= set(words)
        return max(fuzz.ratio(name, other), 90.0 if whole else 0.0)

    return max((score(other), original) for other, original in known.items())


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
_TOOLS = Slot(name="tools", aliases=("functions", "available tools"), required=False)

# The kinds are tried in this order. `_fits` decides which types a slot may have.
SLOTS: dict[str, tuple[Slot, ...]] = {
    "tokens": (Slot(name=INPUT_IDS, aliases=("tokens", "token ids", "ids")),),
    "preference": (
        Slot(name="chosen", aliases=("preferred", "winner", "response chosen", "chosen response")),
        Slot(
            name="rejected",
            aliases=("dispreferred", "loser", "response rejected", "rejected response"),
        ),
        Slot(name="prompt", aliases=_PROMPT, required=False),
        _TOOLS,
    ),
    "messages": (Slot(name="messages", aliases=TALK), _TOOLS),
    "sharegpt": (Slot(name="conversations", aliases=TALK), _TOOLS),
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
    "prompt_completion": (
        Slot(name="prompt", aliases=_PROMPT),
        Slot(name="completion", aliases=_COMPLETION),
        _TOOLS,
    ),
    "prompts": (Slot(name="prompt", aliases=("prompts",)), _TOOLS),
    "text": (
        Slot(
            name="text",
            aliases=(
                "content",
                "document",
                "body",
                "article",
                "code",
                "passage",
                "story",
                "page content",
            ),
        ),
    ),
}


# the kinds, besides ShareGPT's, whose columns may hold messages of role and content
_CHAT_KINDS = ("messages", "preference", "unpaired", "prompt_completion", "prompts")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A guess of the kind of some rows.

    Attributes:
        name: The kind.
        choices: Which column is what, and why.
        ties: The columns that fit a slot equally well.
        roles: Who speaks, in the order of the first rows.
        tools: Whether the first rows name or call tools.
        fields: The keys of messages that have other names than OpenAI's, as for the option
            message_fields.
    """

    name: KindName
    choices: tuple[Choice, ...] = ()
    ties: tuple[Tie, ...] = ()
    roles: tuple[str, ...] = ()
    tools: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)

    def column(self, slot: str) -> str | None:
        """Returns the column that is proposed for a slot, or None."""
        return next((choice.column for choice in self.choices if choice.slot == slot), None)

    def require_decided(self, at: str, *, typed: bool = False) -> None:
        """Raises ConfigError naming the columns between which only the user can choose."""
        if self.ties:
            raise self.ties[0].error(at, typed=typed)

    def speakers(self, rows: Sequence[Row]) -> list[list[str]]:
        """Returns who speaks in each conversation of `rows`, message by message."""
        key = "from" if self.name == "sharegpt" else self.fields.get("role", "role")
        talks = (
            talk
            for choice in self.choices
            if choice.slot != "tools"
            for talk in _conversations(rows, choice.column)
        )
        said = (
            [message.get(key) for message in talk if isinstance(message, Mapping)] for talk in talks
        )
        return [[str(name) for name in names if name is not None] for names in said]

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
    """Guesses what rows with this schema are.

    Args:
        rows: Some of the first rows, which show who speaks, and what lists in JSON text hold.
        kind: The kind, if the user has decided it.
        columns: The columns of slots that the user has decided; the guess is of the rest.

    Raises:
        ConfigError: A kind, a slot or a column does not exist.
    """
    names = [name for name in schema.names if name not in (ROW_NUMBER, SOURCE)]
    if kind is not None:
        require_known(kind, SLOTS, "kind", f"{kind!r} is not a kind of rows")
    kinds = list(SLOTS) if kind is None else [kind]
    kinds = _holding(columns or {}, kinds, names)
    fitting = {
        name: {
            slot.name: [c for c in names if _fits(name, slot.name, schema.field(c), rows)]
            for slot in SLOTS[name]
        }
        for name in kinds
    }
    # A name that is merely alike is weaker evidence than the exact name of another kind.
    for fuzzy in (False, True):
        for name in kinds:
            found = match_columns(SLOTS[name], fitting[name], fuzzy=fuzzy, given=columns)
            if found is not None:
                return _kind(name, found, rows)
    # Conversations are known by their type; text may be anything if there are more columns.
    for name in ("messages", "sharegpt", "text"):
        sure = name != "text" or len(names) == 1 or kind == "text"
        if name in kinds and sure and len(only := fitting[name][SLOTS[name][0].name]) == 1:
            choice = Choice(slot=SLOTS[name][0].name, column=only[0], how="only")
            return _kind(name, ((choice,), ()), rows)
    return Kind(name="unknown")


def _holding(columns: Mapping[str, str], kinds: list[str], names: list[str]) -> list[str]:
    """Returns the kinds that have all of these slots."""
    for slot, column in columns.items():
        require_known(column, names, f"columns.{slot}", f"no column {column!r}")
    held = [kind for kind in kinds if columns.keys() <= {slot.name for slot in SLOTS[kind]}]
    require(
        held,
        "columns",
        f"no kind of rows has {sorted(columns)}",
        "Name the parts of one kind.",
        list(dict.fromkeys(slot.name for kind in kinds for slot in SLOTS[kind])),
    )
    return held


def _kind(name: str, found: Match, rows: Sequence[Row]) -> Kind:
    """Returns the guess, completed by what the first rows say about conversations."""
    choices, ties = found
    kind = Kind(name=cast(KindName, name), choices=choices, ties=ties)
    if name not in (*_CHAT_KINDS, "sharegpt"):
        return kind
    messages = [
        message
        for choice in choices
        if choice.slot != "tools"
        for conversation in _conversations(rows, choice.column)
        for message in conversation
        if isinstance(message, Mapping)
    ]
    kind = replace(kind, fields={} if name == "sharegpt" else keys_of(messages))
    roles = dict.fromkeys(itertools.chain.from_iterable(kind.speakers(rows)))
    tools = kind.column("tools")
    named = tools is not None and any(row.get(tools) for row in rows)
    called = "tool" in roles or any(message.get("tool_calls") for message in messages)
    return replace(kind, roles=tuple(roles), tools=named or called)


def _fits(kind: str, slot: str, field: pa.Field, rows: Sequence[Row]) -> bool:
    """Whether a column could fill this slot, by its type or, for text, by its first rows."""
    t = pa.types
    text = is_text(field.type)
    if kind == "tokens":
        return is_list(field.type) and t.is_integer(field.type.value_type)
    if slot == "tools":
        return text or is_list(field.type) or t.is_null(field.type)
    if slot == "label":
        said = {str(row.get(field.name)).lower() for row in rows}
        return t.is_boolean(field.type) or (text and bool(said) and said <= VERDICTS.keys())
    conversation = is_messages(field.type) or (text and bool(_conversations(rows, field.name)))
    if kind == "prompts" and not conversation:
        return False
    if kind == "sharegpt":
        return conversation and _says(("from", "value"), field, rows)
    if kind == "messages":
        shared = conversation and _says(("from", "value"), field, rows)
        pairs = itertools.product(SPEAKER[:1] if shared else SPEAKER, CONTENT)
        return conversation and any(_says(pair, field, rows) for pair in pairs)
    if kind in _CHAT_KINDS and conversation:
        return _says(("role", "content"), field, rows)
    return text and not conversation


def _says(keys: tuple[str, str], field: pa.Field, rows: Sequence[Row]) -> bool:
    """Whether the messages of a column have these two keys."""
    if is_messages(field.type):
        inside = field.type.value_type
        return all(inside.get_field_index(key) >= 0 for key in keys)
    first = _conversations(rows, field.name)[0]
    return all(isinstance(message, Mapping) and keys[0] in message for message in first) and any(
        keys[1] in message for message in first
    )


def _conversations(rows: Sequence[Row], column: str) -> list[list[Json]]:
    """Returns the conversations of a column: its lists, or all its texts parsed as JSON lists."""
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

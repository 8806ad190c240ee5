"""Proposes a config for unknown rows, with reasons and roles; tries it on the first rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import yaml

from easypipe.core.config import fields_of, is_config, to_dict
from easypipe.core.errors import ConfigError, require
from easypipe.core.schema import INPUT_IDS
from easypipe.core.values import JsonValue, Row, Settings
from easypipe.stages.source.config import DatasetConfig
from easypipe.transforms.chat.columns import is_messages
from easypipe.transforms.chat.conversations import (
    CONTENT,
    ROLES,
    SPEAKER,
    MessageReader,
    Wrong,
    value_of,
    wrong_messages,
)
from easypipe.transforms.columns.kinds import (
    SLOTS,
    TITLES,
    Kind,
    decisions,
    guess_kind,
    plain,
)
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.fields import text_of
from easypipe.transforms.refused import EMPTY, NOTHING_TO_TRAIN

_REMARKS = {
    "unpaired": (
        "train on both kinds of answers with train.preference: {loss: kto} and pack.oversize: "
        "drop; to train on the desirable ones alone, set on_error: skip in place of naming the "
        "column of verdicts: the others are left out and counted",
    ),
    "prompts": (
        "train_on = 'all': no row has an answer, so all of each row is trained; to have them "
        "answered, use `easypipe generate RUN --messages FILE`",
    ),
}
WRITTEN = ("user", "assistant", "system", "tool")  # the roles that chat templates know
# What other names of speakers likely mean: they are suggested, and never mapped silently.
_LIKELY = {
    **dict.fromkeys(("customer", "client", "visitor", "guest", "caller", "prompter"), "user"),
    **dict.fromkeys(
        ("bot", "chatbot", "ai", "model", "llm", "agent", "helper", "support", "advisor"),
        "assistant",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of trying a proposal on the first rows, which needs no tokenizer.

    Attributes:
        rows: The number of rows that were tried.
        reasons: How many of them cannot be read, by reason.
        first: The number of the first such row, and why it cannot be read.
    """

    rows: int
    reasons: Mapping[str, int]
    first: tuple[int, str] | None = None

    @property
    def failed(self) -> bool:
        """Whether none of the rows can be read."""
        return self.rows > 0 and sum(self.reasons.values()) == self.rows

    def __str__(self) -> str:
        if self.first is None:
            return f"all of the first {self.rows} rows can be read this way"
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.reasons.items())
        number, why = self.first
        return (
            f"{sum(self.reasons.values())} of the first {self.rows} rows cannot be read this way: "
            f"{reasons}; row {number}: {why}"
        )


def try_rows(kind: Kind, rows: Sequence[Row], roles: Mapping[str, str] | None = None) -> Trial:
    """Tries which of the first rows a proposal can read.

    Args:
        kind: The kind, with the columns that the proposal reads.
        rows: The first rows.
        roles: As in PromptConfig.
    """
    if kind.ties:
        rows = ()  # nothing is proposed yet
    reasons: Counter[str] = Counter()
    first = None
    for number, row in enumerate(rows):
        wrong = _wrong(kind, row, roles)
        if wrong is not None:
            reasons[wrong[0]] += 1
            first = first or (number, wrong[1])
    return Trial(rows=len(rows), reasons=dict(reasons.most_common()), first=first)


def names_roles_otherwise(kind: Kind) -> bool:
    """Returns whether all speakers are known, some by other names than in chat templates.

    A name in another case is another name.
    """
    return any(role not in WRITTEN for role in kind.roles) and all(
        role.lower() in ROLES for role in kind.roles
    )


def _wrong(kind: Kind, row: Row, roles: Mapping[str, str] | None) -> Wrong | None:
    """Returns why a row cannot be read as `kind`; None if it can."""
    values = {choice.slot: row.get(choice.column) for choice in kind.choices}
    if kind.name in ("tokens", "unknown"):
        return None
    if kind.name == "unpaired" and values["label"] is None:
        return "no_verdict", f"column {kind.column('label')!r} is null"
    if kind.name in ("messages", "sharegpt") or kind.roles:
        renamed = kind.name == "sharegpt" or names_roles_otherwise(kind) or roles
        known = {**ROLES, **(roles or {})} if renamed else None
        reader = MessageReader(known, fields=kind.fields or None)
        for slot in ("messages", "conversations", "chosen", "rejected", "completion"):
            if slot in values and (wrong := _wrong_talk(reader, values[slot])) is not None:
                return wrong
        return None
    required = {slot.name for slot in SLOTS[kind.name] if slot.required}
    texts = {slot: text_of(value, slot) for slot, value in values.items() if slot in required}
    for text in texts.values():
        if not isinstance(text, str):
            return text.reason, text.detail
    label = {"prompt_completion": "completion", "alpaca": "output"}.get(kind.name)
    if not any(text.strip() for text in texts.values() if isinstance(text, str)):
        return EMPTY, "no text"
    if label is not None and not texts[label]:
        return NOTHING_TO_TRAIN, f"the {label} is empty"
    return None


def _wrong_talk(reader: MessageReader, value: JsonValue) -> Wrong | None:
    talk = reader.translated(value_of(value, keep=(*SPEAKER, *CONTENT)))
    wrong = wrong_messages(talk) or reader.wrong_flags(talk)
    if wrong is None and not any(message["role"] == "assistant" for message in talk):
        return NOTHING_TO_TRAIN, "no message in it is from the assistant"
    return wrong


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A proposed config.

    Attributes:
        kind: The kind of the rows.
        reasons: A line for each column that is read, which says why.
        trial: The result of reading the first rows with it.
        fields: The fields of a DatasetConfig; those left out keep their defaults. storage_options
            among them may hold credentials.
    """

    kind: Kind
    reasons: tuple[str, ...]
    trial: Trial
    fields: Settings = dataclasses.field(repr=False)

    @property
    def config(self) -> DatasetConfig:
        return DatasetConfig(**self.fields)

    def yaml(self) -> str:
        """Returns the dataset under `datasets:`, to be pasted into a config, with reasons as
        comments.

        data_files of rows in memory, and storage_options, which may hold credentials, are left for
        Python: comments say so.
        """
        values = {
            name: _written(value)
            for name, value in self.fields.items()
            if name != "storage_options"
        }
        lines = [f"# {TITLES[self.kind.name]}", *(f"# {reason}" for reason in self.reasons)]
        lines += [f"# {self.trial}"] if self.trial.rows else []
        if self.config.in_memory:
            del values["data_files"]
            lines.append("# data_files: the rows are in memory; give them in Python")
        if "storage_options" in self.fields:
            lines.append(
                "# storage_options: as you gave them; they may hold credentials, so they are not "
                "written here"
            )
        return (
            "\n".join(lines)
            + "\n"
            + yaml.safe_dump({"datasets": [values]}, sort_keys=False, allow_unicode=True, width=120)
        )

    def __str__(self) -> str:
        return self.yaml()


def _written(value: Any) -> Any:
    """Returns a value for YAML; for a nested config, only what is set."""
    if not is_config(type(value)):
        return to_dict(value)
    options, fields = fields_of(value), dataclasses.fields(value)
    return {f.name: _written(options[f.name]) for f in fields if options[f.name] != f.default}


def propose(
    part: Any,  # a Part, whose file imports this one
    *,
    kind: str | None = None,
    columns: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    typed: bool = False,
) -> Proposal:
    """Returns a proposed config for a Part.

    Args:
        part: The Part.
        kind: As in Part.propose, like columns and roles.
        typed: Whether errors ask for options of the command line, and not for arguments of Python.

    Raises:
        ConfigError: Two columns fit equally well, no kind fits, a speaker is unknown, or none of
            the rows can be read.
    """
    found = part.kind
    if part.columns is None:
        raise ConfigError(
            at=part.name,
            problem="was listed only, not looked into",
            fix="Discover it by its own subset and split.",
        )
    if kind is not None or columns:
        found = guess_kind(part.schema, part.rows, kind=kind, columns=columns)
    found.require_decided(part.name, typed=typed)
    if found.name == "unknown":
        asked = "what a row is" if kind is None else f"which make {TITLES[kind]}"
        raise ConfigError(
            at=part.name,
            problem=f"the names of its columns do not show {asked}",
            have=[column.name for column in part.columns],
            fix=f"Name the columns: {_wanted(kind, typed=typed)}.{_hint(part.schema)}",
        )
    if found.name == "preference":
        found = _with_one_prompt(part.name, found, part.rows)
    reasons = (
        *part.because,
        *(f"{choice.slot} = {choice.column!r}: {choice.reason}" for choice in found.choices),
        *(f"{name} = {key!r}: a key of the messages" for name, key in found.fields.items()),
        *_REMARKS.get(found.name, ()),
    )
    _check_roles(part.name, found, roles or {}, part.rows, typed=typed)
    trial = try_rows(found, part.rows, roles)
    require(
        not trial.failed,
        part.name,
        f"{TITLES[found.name]} by their columns "
        f"({', '.join(choice.column for choice in found.choices)}), but {trial}",
        f"Decide otherwise ({'--column PART=COLUMN' if typed else 'kind=, columns='}), or change "
        "the rows with format_callback.",
    )
    fields = {**part.reads, **_fields(found, roles, part.rows)}
    return Proposal(kind=found, fields=fields, reasons=reasons, trial=trial)


def _wanted(kind: str | None, *, typed: bool) -> str:
    """Returns how the columns of a kind of rows are named; of plain text, if there is none."""
    parts = {name: [slot.name for slot in slots if slot.required] for name, slots in SLOTS.items()}
    named = decisions("columns", dict.fromkeys(parts[kind or "text"]), typed=typed)
    if typed:
        others = "; ".join(
            f"{', '.join(own)} ({TITLES[name]})" for name, own in parts.items() if name != "text"
        )
        return named if kind else f"{named}, or all parts of another kind: {others}"
    others = "" if kind else f"; kinds are {', '.join(SLOTS)}"
    return f"kind={kind or 'text'!r}, {named}{others}"


def _hint(schema: pa.Schema) -> str:
    """Returns how a column of objects is read if they are messages with keys of their own."""
    for field in schema:
        if is_messages(field.type):
            keys = ", ".join(inside.name for inside in field.type.value_type)
            return (
                f" If {field.name!r} holds conversations, write content_field: {field.name} and "
                f"message_fields: {{role: KEY, content: KEY}}, with two of its keys {keys}."
            )
    return ""


def _check_roles(
    at: str, found: Kind, roles: Mapping[str, str], rows: Sequence[Row], *, typed: bool
) -> None:
    """Checks that every speaker is known, and that rows without speakers are given no roles.

    Raises:
        ConfigError: A speaker is unknown, or roles have no effect.
    """
    if not found.roles and found.name not in ("sharegpt", "messages"):
        problem = f"has no effect on {TITLES[found.name]}"
        require(not roles, "roles", problem, "Leave it out.")
        return
    answered = found.name == "prompts" or "assistant" in found.roles
    if found.name != "sharegpt" and not roles and answered:
        return  # chat templates may know further roles
    known = {**ROLES, **roles}
    spoken = {role: known.get(role, known.get(role.lower())) for role in found.roles}
    unknown = [role for role, meaning in spoken.items() if meaning is None]
    likely = _likely_roles(spoken, found.speakers(rows))
    named = decisions("roles", {role: likely[role] for role in unknown}, typed=typed)
    check = " What is filled in is a guess: check it." if any(map(likely.get, unknown)) else ""
    require(
        not unknown,
        at,
        f"unknown roles: {', '.join(map(repr, unknown))}",
        f"Say who is user, assistant, system or tool: {named}.{check}",
        ROLES,
    )


def _likely_roles(
    spoken: Mapping[str, str | None], talks: Sequence[Sequence[str]]
) -> dict[str, str | None]:
    """Returns the likely role of each speaker, or None where neither name nor order decides it.

    Order decides between two: one begins all conversations, and the other has all last words.
    """
    likely = {name: role or _LIKELY.get(plain(name)) for name, role in spoken.items()}
    two = [name for name, role in likely.items() if role in (None, "user", "assistant")]
    turns = [[name for name in talk if name in two] for talk in talks]
    ends = {(talk[0], talk[-1]) for talk in turns if talk}
    if len(two) == 2 and len(ends) == 1:
        first, last = ends.pop()
        by_order = {first: "user", last: "assistant"}
        if first != last and all(likely[name] in (None, by_order[name]) for name in two):
            return likely | by_order
    return likely


def _with_one_prompt(at: str, found: Kind, rows: Sequence[Row]) -> Kind:
    """Returns preference pairs of conversations without a separate column of text for the prompt.

    Conversations already contain the prompt.

    Raises:
        ConfigError: The conversations begin with the answer.
    """
    is_chat = _is_talk(found.column("chosen"), rows)
    if not is_chat or _is_talk(found.column("prompt"), rows):
        return found
    require(
        _begin_with_prompts(found, rows),
        at,
        "preference pairs whose conversations begin with the answer: the prompt is "
        "in a column of its own",
        "Put it in front of both with format_callback.",
    )
    return replace(found, choices=tuple(one for one in found.choices if one.slot != "prompt"))


def _is_talk(column: str | None, rows: Sequence[Row]) -> bool:
    """Returns whether a column of the first rows holds messages."""
    values = [value_of(row.get(column or ""), keep=()) for row in rows]
    return bool(values) and any(isinstance(value, list) for value in values)


def _begin_with_prompts(kind: Kind, rows: Sequence[Row]) -> bool:
    """Returns whether conversations of the first rows, chosen or rejected, hold their prompts."""
    columns = [kind.column(slot) or "" for slot in ("chosen", "rejected")]
    for talk in (value_of(row.get(column), keep=()) for row in rows for column in columns):
        for message in talk[:-1] if isinstance(talk, list) else ():
            role = str(message.get("role")).lower() if isinstance(message, Mapping) else "system"
            if ROLES.get(role, "user") == "user":
                return True
    return False


def _fields(kind: Kind, roles: Mapping[str, str] | None, rows: Sequence[Row]) -> Settings:
    """Returns the fields of a DatasetConfig that read these columns."""
    column = {choice.slot: choice.column for choice in kind.choices}
    tools = None if column.get("tools") == "tools" else column.get("tools")
    if kind.name == "text":
        return {"content_field": column["text"]}
    named: Settings = {"tools_field": tools} if tools else {}
    named |= {"message_fields": dict(kind.fields)} if kind.fields else {}
    renamed = bool(roles) or names_roles_otherwise(kind)
    if kind.name == "prompts" and not renamed:
        return {"content_field": column["prompt"], "train_on": "all"} | named
    answer = column.get("completion" if "completion" in column else "chosen")
    in_text = any(isinstance(row.get(answer or ""), str) for row in rows)
    if kind.roles and answer is not None and (renamed or in_text):
        # Only the format distinguishes JSON text from plain text, and maps who speaks.
        prompt = PromptConfig(
            format_type="sharegpt" if renamed else "chat",
            input_columns=(column.get("prompt", answer),),
            label_column=answer if "prompt" in column else None,
            rejected_column=column.get("rejected"),
            desirable_column=column.get("label"),
            train_on="completion",
            tools_column=tools,
            roles=dict(roles) if renamed and roles else None,
            message_fields=dict(kind.fields) or None,
        )
        return {"prompt": prompt}
    if kind.name in ("prompt_completion", "unpaired"):
        own = {"prompt_field": column["prompt"], "completion_field": column["completion"]}
        verdict = {"desirable_field": column["label"]} if "label" in column else {}
        return own | verdict | named
    if kind.name == "messages" and not renamed:
        return {"content_field": column["messages"]} | named
    if kind.name == "tokens":
        own = column[INPUT_IDS]
        return {} if own == INPUT_IDS else {"format_fields": {own: INPUT_IDS}}
    if kind.name == "preference":
        answers = {"completion_field": column["chosen"], "rejected_field": column["rejected"]}
        prompt_of = {"prompt_field": column["prompt"]} if "prompt" in column else {}
        return prompt_of | answers | named
    if kind.name == "alpaca":
        prompt = PromptConfig(
            format_type="alpaca",
            input_columns=tuple(column[s] for s in ("instruction", "input") if s in column),
            label_column=column["output"],
        )
    else:
        prompt = PromptConfig(
            format_type="sharegpt",
            input_columns=(column[SLOTS[kind.name][0].name],),
            train_on="all" if kind.name == "prompts" else None,
            tools_column=tools,
            roles=dict(roles) if roles else None,
            message_fields=dict(kind.fields) or None,
        )
    return {"prompt": prompt}

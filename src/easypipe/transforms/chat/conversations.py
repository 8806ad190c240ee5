"""Reads conversations (keys of OpenAI or ShareGPT) from columns and files; what is wrong in them.

JSON in a row is read in the worker process of worker.py, and everything else by its parent.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from easypipe.core.errors import SourceError, require
from easypipe.transforms.chat.sandbox import Json, Message, texts_within
from easypipe.transforms.chat.spans import FLAG, RANGES, WEIGHT, flag_of

PART = "text"  # the key under which typed parts hold their text
# the keys of messages for which rows may use other names
MESSAGE_FIELDS = ("role", "content", PART, "tool_calls", "reasoning_content", FLAG, RANGES, WEIGHT)
# keys under which messages of others say who speaks, and have their text
SPEAKER = ("role", "from", "speaker", "who", "sender")
CONTENT = ("content", "text", "value", "message", "says", "said", "utterance", "body")
# names of columns of conversations, besides `prompt`
TALK = (
    "messages",
    "conversations",
    "conversation",
    "chat",
    "dialogue",
    "dialog",
    "turns",
    "message",
)
# what names of speakers mean
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
Wrong = tuple[str, str]  # (a word for the ledger, what to say about it)


@dataclass(frozen=True)
class MessageReader:
    """How rows become the messages that templates get.

    Attributes:
        roles: ShareGPT's names of who speaks; None if messages have OpenAI's keys.
        system: The system prompt of conversations that have none.
        refuse: Strings that no message may hold, because the template itself writes these special
            tokens.
        everything: The value of `train_on` with which every speaker is trained on; empty for
            others.
        fields: The keys that rows use for those of OpenAI, and for `text` of typed parts.
        anyone: Whether a message of any role may say of itself that it is trained on.
    """

    roles: Mapping[str, str] | None = None
    system: str | None = None
    refuse: Sequence[str] = ()
    everything: str = ""
    fields: Mapping[str, str] | None = None
    anyone: bool = False

    @functools.cached_property
    def _refused(self) -> re.Pattern[str] | None:
        words = sorted(self.refuse, key=len, reverse=True)
        return re.compile("|".join(re.escape(word) for word in words)) if words else None

    def translated(self, value: Json) -> Json:
        """Returns messages in OpenAI's keys; `wrong` reports anything else."""
        if not isinstance(value, list):
            return value
        if self.fields is not None:
            fields = self.fields
            value = [_renamed(turn, fields) if isinstance(turn, dict) else turn for turn in value]
        if self.roles is None:
            return value
        return [_turn(turn, self.roles) if isinstance(turn, dict) else turn for turn in value]

    def wrong(self, talk: Json, tools: Json) -> Wrong | None:
        """Returns why a conversation and its tools cannot be rendered, or None."""
        found = wrong_messages(talk) or wrong_tools(tools) or self.wrong_flags(talk)
        if found is not None or self._refused is None:
            return found
        hits = map(self._refused.search, texts_within([talk, tools], keys=False))
        hit = next(filter(None, hits), None)
        if hit is None:
            return None
        return "special_string", f"a message holds {hit[0]!r}, and special_strings is 'error'"

    def whole(
        self,
        talk: list[Message],
        tools: Json,
        examples: Sequence[Message] = (),
        system: str | None = None,
    ) -> dict[str, Json]:
        """Returns the template's input for a row in which nothing is `wrong`.

        Args:
            talk: The messages.
            examples: Messages that are put before the first turn.
            system: The row's own system prompt, which is preferred to that of all rows.
        """
        prompt = system or self.system
        if prompt is not None or examples:
            said = [message for message in talk[:1] if message["role"] == "system"]
            rest = talk[len(said) :]
            if not said and prompt is not None:
                said = [{"role": "system", "content": prompt}]
            talk = [*said, *examples, *rest]
        return {"messages": talk, "tools": tools or None}

    def wrong_flags(self, talk: Sequence[Message]) -> Wrong | None:
        """Returns what is wrong with roles and flags of otherwise valid messages, or None."""
        for i, message in enumerate(talk):
            role = message["role"]
            if isinstance(role, _BadRole):
                return (
                    "unknown_role",
                    f"message {i} is from {str(role)!r}; roles names those that are known",
                )
            silent = message.get("content") is None and not message.get("tool_calls")
            if self.roles is not None and silent:
                return "not_a_message", f"message {i} has no value"
            detail = None if flag_of(message) is None else self._wrong_flag(i, message)
            if detail is not None:
                return "bad_train_flag", detail
        return None

    def _wrong_flag(self, i: int, message: Message) -> str | None:
        """Returns what is wrong with the training flags of message i, or None."""
        flag, weight = message.get(FLAG), message.get(WEIGHT)
        if flag is not None and not isinstance(flag, bool):
            return f"the train flag of message {i} is {flag!r}, not true or false"
        if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
            return (
                f"the weight of message {i} is {weight!r}, and messages have weights of 0 and 1 "
                "alone; rows that are tokens have others by their column loss_weights"
            )
        if not _in_content(message.get(RANGES), message.get("content")):
            return (
                f"the {RANGES} of message {i} are not a list of "
                "{begin_offset, end_offset, train} within its text"
            )
        if flag is not None and weight is not None and flag != bool(weight):
            return f"the train flag of message {i} is {flag}, and its weight {weight}"
        if flag_of(message) and message["role"] != "assistant" and not self.anyone:
            who = f"is the {message['role']}'s, whom roles_to_train does not name"
            return f"message {i} is to be trained, and {who}"
        if self.everything:
            what = "weight" if flag is None else "train flag"
            trained = "every token" if self.everything == "all" else "all behind the prompt"
            return f"message {i} has a {what}, and train_on={self.everything!r} trains {trained}"
        return None


def _in_content(ranges: Json, said: Json) -> bool:
    """Whether ranges, if there are any, are ranges of characters of a message's text."""
    if ranges is None:
        return True
    if not isinstance(ranges, list) or not isinstance(said, str):
        return False
    for one in ranges:
        if not isinstance(one, dict) or not isinstance(one.get("train"), bool):
            return False
        begin, end = one.get("begin_offset"), one.get("end_offset")
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(said):
            return False
    return True


def _renamed(turn: Message, fields: Mapping[str, str]) -> Message:
    """Returns a message in OpenAI's keys.

    Args:
        turn: The message.
        fields: OpenAI's keys, with those that the message has for them.
    """
    own = {name: turn[key] for name, key in fields.items() if name != PART and key in turn}
    theirs = [key for name, key in fields.items() if name != PART]
    message = {key: item for key, item in turn.items() if key not in theirs} | own
    said, key = message.get("content"), fields.get(PART)
    if key is not None and isinstance(said, list):
        message["content"] = [
            {**{name: item for name, item in part.items() if name != key}, PART: part[key]}
            if isinstance(part, dict) and key in part
            else part
            for part in said
        ]
    return message


def _turn(turn: Message, roles: Mapping[str, str]) -> Message:
    """Returns a turn of ShareGPT in OpenAI's keys."""
    own = ("from", "value", "role", "content")
    rest = {key: item for key, item in turn.items() if key not in own}
    who, said = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = roles.get(who, roles.get(who.lower())) if isinstance(who, str) else who
    if role is None and who is not None:
        role = _BadRole(who)
    if role != "function_call":
        return {**rest, "role": role, "content": said}
    try:
        calls = json.loads(said or "")
    except (ValueError, TypeError, RecursionError):
        return {**rest, "role": _BadRole(f"{who} with other words than JSON"), "content": said}
    calls = calls if isinstance(calls, list) else [calls]
    tool_calls = [{"type": "function", "function": call} for call in calls]
    return {**rest, "role": "assistant", "content": None, "tool_calls": tool_calls}


class BadJson(str):
    """The error for a text that should have been JSON, in place of its value."""


class _BadRole(str):
    """A role that is not among the known ones."""


def loaded(text: str | bytes) -> Json:
    """Returns the value of JSON text, or a BadJson if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        return BadJson(error)


def wrong_tools(tools: Json) -> Wrong | None:
    """Returns (reason, detail) for tools that are not JSON, or one object; else None."""
    if isinstance(tools, dict):  # a template would write its keys
        return "not_a_message", "tools are an object, not a list of objects"
    return ("not_json", f"tools: {tools}") if isinstance(tools, BadJson) else None


def wrong_messages(value: Json) -> Wrong | None:
    """Returns (reason, detail) if `value` is not a conversation that can be rendered, else None."""
    if value is None:
        return "null", "no messages"
    if isinstance(value, BadJson):
        return "not_json", str(value)
    if not isinstance(value, list):
        return "not_a_list", f"messages are {_kind(value)}"
    if not value:
        return "empty", "a conversation without messages"
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            return "not_a_message", f"message {i} is {_kind(message)}"
        if not isinstance(message.get("role"), str) or not message["role"]:
            keys = [key for key in message if key not in MESSAGE_FIELDS]
            theirs = f"; message_fields maps its keys {', '.join(keys)[:100]}" if keys else ""
            if "from" in message:
                theirs = "; prompt: {format_type: sharegpt} reads 'from' and 'value'"
            missing = message.get("role") is None
            return "no_role", f"message {i} has no role{theirs if missing else ''}"
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            return "not_a_message", f"the content of message {i} is {_kind(content)}"
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind is None:
                found = _kind(part) if not isinstance(part, dict) else "an object without a type"
                detail = f"a part of message {i} is {found}, not {{type: text, text: ...}}"
                return "not_a_message", detail
            if kind != "text":
                detail = f"message {i} holds a part of type {kind!r}; only text can be tokenized"
                return "multimodal", detail
            if not isinstance(part.get("text"), str):
                return "not_a_message", f"the text of a part of message {i} is not text"
    return None


def wrong_calls(talk: Sequence[Message], tools: Json) -> str | None:
    """Returns what is wrong with tools and calls of a conversation that a template failed to write.

    Templates may accept calls in other shapes, so what is found here is never the only reason to
    refuse a row.
    """
    for i, message in enumerate(talk):
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            return f"the tool_calls of message {i} are {_kind(calls)}, not a list of calls"
        for call in calls or ():
            function = call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(function, dict):
                return f"a tool call of message {i} is {_kind(function)}, not an object"
            for key in ("name", "arguments"):
                if key not in function:
                    return f"a tool call of message {i} has no {key}"
    if tools is not None and not isinstance(tools, list):
        return f"tools are {_kind(tools)}, not a list of objects"
    odd = next((tool for tool in tools or () if not isinstance(tool, dict)), {})
    return None if isinstance(odd, dict) else f"a tool is {_kind(odd)}, not an object"


def cleaned(value: Json, keep: Sequence[str] = ()) -> Json:
    """Returns a value without the keys that Arrow fills with null because other rows have them.

    Args:
        keep: Outermost keys that are kept.
    """
    if isinstance(value, dict):
        return {
            key: cleaned(item) for key, item in value.items() if item is not None or key in keep
        }
    if isinstance(value, list | tuple):
        return [cleaned(item, keep) for item in value]
    return value


def value_of(value: Json, *, keep: Sequence[str]) -> Json:
    """Returns a Python value of a row: text is parsed as JSON, other values are `cleaned`."""
    return loaded(value) if isinstance(value, str | bytes) else cleaned(value, keep)


def _kind(value: Json) -> str:
    return {
        dict: "an object",
        str: "text",
        int: "a number",
        float: "a number",
        bool: "true or false",
        list: "a list",
    }.get(type(value), "null")


def keys_of(messages: Sequence[Mapping[str, Json]]) -> dict[str, str]:
    """Returns the keys that messages have for `role` and `content`, and their parts for `text`."""
    keys = {key for message in messages for key in message}
    first = {names[0]: [key for key in names if key in keys][:1] for names in (SPEAKER, CONTENT)}
    found = {name: key for name, present in first.items() for key in present if key != name}
    said = [message.get(found.get("content", "content")) for message in messages]
    parts = [part for parts in said if isinstance(parts, list) for part in parts]
    inside = {key for part in parts if isinstance(part, Mapping) for key in part}
    return found | ({"text": "value"} if "value" in inside and "text" not in inside else {})


def conversations_of(path: Path) -> list[tuple[str, Json]]:
    """Reads the conversations of a file, each with its place.

    A conversation is a list of messages, or an object with `messages` (or `prompt`, as in rows of
    TRL, or `conversations`, as in ShareGPT's) and further columns (`tools`, `system`,
    `chat_template_kwargs`). The file is the JSON of one, of a list of them, or has one in each
    line. Messages get OpenAI's keys.

    Raises:
        SourceError: The file is not UTF-8.
        ConfigError: It is not JSON, or empty, or an object in it has no messages, or messages in
            other keys than OpenAI's are from unknown speakers.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            at=str(path), problem=f"is not UTF-8: {error}", fix="Save it as UTF-8."
        ) from None
    one_line = "\n" not in text.strip()
    found = [(f"{path}, line 1" if one_line else str(path), loaded(text))]
    if isinstance(found[0][1], BadJson):
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [(f"{path}, line {number}", loaded(line)) for number, line in lines]
    require(found, str(path), "holds no conversation", "Give a list of messages.")
    (_, first), *others = found
    if isinstance(first, list) and not others and any(map(_is_conversation, first)):
        found = [(f"{path}, conversation {n}", one) for n, one in enumerate(first)]
    for at, row in found:
        require(not isinstance(row, BadJson), at, f"is not JSON: {row}", "Give a list of messages.")
    rows = [(at, row if isinstance(row, dict) else {"messages": row}) for at, row in found]
    for at, row in rows:
        fix = "Call the key of its messages `messages`."
        require(_column(row), at, "an object without messages", fix, row)
    return [(at, {**row, "messages": _in_openai_keys(at, row[_column(row)])}) for at, row in rows]


def _column(row: Message) -> str:
    """Returns the key of the messages of a conversation; empty if there are none."""
    lists = (name for name in ("messages", "prompt", *TALK) if isinstance(row.get(name), list))
    return next(lists, next((name for name in ("messages", "prompt") if name in row), ""))


def _in_openai_keys(at: str, talk: Json) -> Json:
    """Returns messages with the keys that `discover` proposes, in OpenAI's.

    Raises:
        ConfigError: They have other keys, and the name of a speaker is not known.
    """
    if not isinstance(talk, list) or not all(isinstance(message, dict) for message in talk):
        return talk
    fields = keys_of(talk)
    read = MessageReader(ROLES if "role" in fields else None, fields=fields).translated(talk)
    for i, role in enumerate(message.get("role") for message in read):
        problem, fix = f"message {i} is from {str(role)!r}", "Name who speaks by one of these."
        require(not isinstance(role, _BadRole), at, problem, fix, ROLES)
    return read


def _is_conversation(value: Json) -> bool:
    """Whether an item of a list is a conversation, and not a message."""
    rows = isinstance(value, dict) and "role" not in value
    return isinstance(value, list) or bool(rows and _column(value))

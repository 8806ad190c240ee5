"""The formats of PromptConfig (chat, Alpaca ...): rows as texts or messages; the `system` column.

Templates in Jinja run in the worker processes of chat templates, with their limits.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import itertools
import json
import logging
import uuid
from collections.abc import Mapping, Sequence

import pyarrow as pa

from easypipe.core.errors import require
from easypipe.core.schema import is_list
from easypipe.core.values import Identity, JsonObject
from easypipe.transforms.chat.columns import is_messages, is_text
from easypipe.transforms.chat.conversations import (
    ROLES,
    MessageReader,
    value_of,
    wrong_messages,
)
from easypipe.transforms.chat.pool import WrittenTalk
from easypipe.transforms.chat.render import (
    ENGINE_VERSION,
    ChatTemplate,
    HostileTemplateError,
    answers_of,
    check_whole,
    is_jinja,
    is_unicode,
    wrong_kwargs,
)
from easypipe.transforms.chat.sandbox import Json, Message, Row
from easypipe.transforms.chat.spans import FLAG, MASKED_END, OPEN, Rendered
from easypipe.transforms.chat.stops import num_shared
from easypipe.transforms.chat.turns import Request, by_turns, split_at_turns, trimmed
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.few_shot import FewShot
from easypipe.transforms.prompt.fields import (
    AlpacaTemplate,
    FieldTemplate,
    Writer,
    pieces_of,
    text_of,
)
from easypipe.transforms.prompt.templates import ALPACA, ALPACA_WITH_INPUT
from easypipe.transforms.refused import (
    EMPTY,
    NOTHING_TO_TRAIN,
    REFUSED_BY_TOKENIZER,
    Refused,
)
from easypipe.transforms.tokenizer.lengths import Lengths
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, UnencodableError

log = logging.getLogger("easypipe")

TOOLS = "tools"  # the column of tools, if none is named
# the column with what a row's template sees besides messages and tools
KWARGS = "chat_template_kwargs"
SYSTEM = "system"  # the column of system prompts that conversations and Alpaca rows may have
# columns that say by true or false whether an answer is good: unpaired preferences
VERDICTS = ("label", "kto_tag")
SHARED = "easypipe shared"  # key of a row of a pair: how much of its beginning both answers share


# Every format has these attributes. Every row has the `columns`; the `optional` ones are read if
# they exist. `raw` says that no template of a tokenizer writes the texts, so that its special
# tokens are put around them. `kind` and `identity` are what decides texts and spans besides the
# rows, for encoding keys. `accepts` says whether a column that it reads can have a type. `render`
# raises HostileTemplateError with the number of one of its rows as `row`.


class ChatFormat:
    """The format of messages that a chat template writes.

    Args:
        refuse: Strings that no message may hold, because the template itself writes these special
            tokens.
        trim: The lengths to which conversations are cut by leaving out the oldest turns, or None.
    """

    kind, raw = "chat", False

    def __init__(
        self,
        config: PromptConfig,
        template: ChatTemplate,
        refuse: Sequence[str],
        trim: Lengths | None = None,
    ) -> None:
        self.template = template
        self._trim = trim
        self._messages, self._answer = config.inputs[0], config.label
        self._answers = () if config.label is None else (config.label, config.rejected_column)
        self._tools = config.tools_column or TOOLS
        said = (self._messages,) if config.label is None else (self._messages, config.label)
        self.columns = said if config.tools_column is None else (*said, config.tools_column)
        self._system = None if SYSTEM in self.columns else SYSTEM
        optional = (TOOLS if config.tools_column is None else None, self._system, KWARGS)
        self.optional: tuple[str, ...] = tuple(
            name for name in optional if name is not None and name not in self.columns
        )
        roles = {**ROLES, **(config.roles or {})} if config.format_type == "sharegpt" else None
        everything = template.train_on == "all" or config.trains_behind_prompt
        self._reader = MessageReader(
            roles,
            config.system_prompt,
            tuple(refuse),
            template.train_on if everything else "",
            config.message_fields,
            anyone=config.roles_to_train is not None,
        )
        self._keep = ("role", "content", *(config.message_fields or {}).values())
        self._few_shot = None
        if config.few_shot is not None:
            self._given_examples = config.few_shot.data_files is None
            self._few_shot = FewShot(
                config.few_shot,
                said,
                lambda row: {name: self.messages_of(row[name]) for name in said},
                lambda pool: [self._example(self._joined(row)) for row in pool],
                "Give messages as rows have them.",
            )

    @property
    def identity(self) -> Identity:
        more: JsonObject = {}
        if self._reader.roles is not None:
            more["roles"] = self._reader.roles
        if self._reader.system is not None:
            more["system"] = self._reader.system
        if self._few_shot is not None:
            more["few_shot"] = self._few_shot.identity
        if self._reader.fields is not None:
            more["fields"] = self._reader.fields
        if self._answer is not None:
            more["answer"] = self._answer
        if self._reader.anyone:
            more["flags"] = "of anyone"
        return [self.template.fingerprint, *([more] if more else [])]

    def accepts(self, kind: pa.DataType, column: str) -> bool:
        if column == KWARGS and (pa.types.is_struct(kind) or pa.types.is_map(kind)):
            return True
        if column in self._answers and pa.types.is_struct(kind):  # a single message
            return True
        empty = is_list(kind) and pa.types.is_null(kind.field(0).type)  # [] in every row
        return empty or is_messages(kind) or is_text(kind) or pa.types.is_null(kind)

    def render(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        asked = [self._written(row) or self.request(row) for row in rows]
        answers = self.template.render(asked, self._reader)
        if self._trim is None:
            return answers
        return trimmed(self.template, asked, answers, self._trim)

    def by_turns(self, rows: Sequence[Row]) -> list[list[Rendered | Refused]]:
        """Returns the samples of each row for `reasoning` "per_turn", cut to their length."""
        found = by_turns(self.template, [self.request(row) for row in rows])
        every = list(itertools.chain.from_iterable(found))
        answers = [answer for _, answer in every]
        if self._trim is not None:
            owners = [row for row, samples in enumerate(found) for _ in samples]
            try:
                answers = trimmed(self.template, [one for one, _ in every], answers, self._trim)
            except HostileTemplateError as error:
                error.row = owners[error.row]
                raise
        each = iter(answers)
        return [[next(each) for _ in samples] for samples in found]

    def split(
        self,
        rows: Sequence[Row],
        found: Sequence[Rendered | Refused],
        tokenizer: Tokenizer,
        room: int,
    ) -> list[list[Rendered | Refused]]:
        """Returns the output of `render`, cut between turns if it has over `room` tokens."""
        return split_at_turns(
            self.template, found, lambda i: self.request(rows[i]), tokenizer, room
        )

    def _written(self, row: Row) -> WrittenTalk | None:
        """Returns a row's JSON for workers to read, unless its values are needed here."""
        talk, tools = row[self._messages], row.get(self._tools)
        alone = (
            self._few_shot is None
            and self._trim is None
            and self._answer is None
            and SHARED not in row
            and not row.get(KWARGS)
            and not (self._system and row.get(self._system))
        )
        return (
            WrittenTalk(talk, tools)
            if alone and isinstance(talk, str) and isinstance(tools, str | None)
            else None
        )

    def as_json(self, row: Row) -> Row:
        """Returns a Python row with the lists and objects that templates see as JSON.

        JSON keeps nulls. `request` leaves nulls out of lists and objects, which Arrow may have
        filled with them.
        """
        names = (self._messages, *self._answers, self._tools, KWARGS)
        return {name: _as_json(value) if name in names else value for name, value in row.items()}

    def request(self, row: Row) -> Request | Refused:
        """Returns the request to the template for a row."""
        talk, tools = self._joined(row), value_of(row.get(self._tools), keep=())
        if isinstance(talk, Refused):
            return talk
        wrong = self._reader.wrong(talk, tools)
        if wrong is not None:
            return Refused(*wrong)
        system = _system_of(row, self._system)
        if isinstance(system, Refused):
            return system
        if system is not None and talk[0]["role"] == "system" and talk[0].get("content") != system:
            return Refused(
                "two_system_prompts",
                f"column {SYSTEM!r} and the first message both hold one, and they differ",
            )
        drawn = [] if self._few_shot is None else self._few_shot.of(row)
        whole = self._reader.whole(talk, tools, [one for some in drawn for one in some], system)
        kwargs = _kwargs_of(row)
        if isinstance(kwargs, Refused):
            return kwargs
        if kwargs:
            whole["kwargs"] = kwargs
        if self._answer is not None:
            whole["answers"] = len(self._answered(row[self._answer]))
        elif SHARED in row:
            whole["answers"] = len(talk) - row[SHARED]
        return whole

    def shared(self, one: Json, other: Json) -> int:
        """Returns how many first messages two conversations share; 0 if one is not a list."""
        pair = self.messages_of(one), self.messages_of(other)
        return num_shared(*pair) if all(isinstance(talk, list) for talk in pair) else 0

    def messages_of(self, value: Json) -> Json:
        """Returns the messages of a column's value with OpenAI's keys and roles."""
        return self._reader.translated(value_of(value, keep=self._keep))

    def _answered(self, value: Json) -> Json:
        """Returns the messages of an answer, which may be a single one."""
        value = value_of(value, keep=self._keep)
        return self._reader.translated([value] if isinstance(value, dict) else value)

    def _joined(self, row: Row) -> Json:
        """Returns the messages of a row, with its answer if that is in a column of its own.

        The row is refused if one of the two holds no messages.
        """
        talk = self.messages_of(row[self._messages])
        if self._answer is None:
            return talk
        answer = self._answered(row[self._answer])
        for column, part in ((self._messages, talk), (self._answer, answer)):
            if (wrong := wrong_messages(part)) is not None:
                return Refused(wrong[0], f"column {column!r}: {wrong[1]}")
        return [*talk, *answer]

    def _example(self, talk: Json) -> list[Message] | Refused:
        """Returns the messages of an example; none of them is trained on.

        The system message of one from a file is left out, since the row has one.
        """
        if isinstance(talk, Refused):
            return talk
        wrong = wrong_messages(talk) or self._reader.wrong_flags(talk)
        if wrong is not None:
            return Refused(*wrong)
        said: list[Message] = [
            {**message, FLAG: False} for message in talk if message["role"] != "system"
        ]
        if len(said) < len(talk) and self._given_examples:
            return Refused(
                "two_system_prompts", "it has a system message; system_prompt is for all rows"
            )
        return said


def _as_json(value: Json) -> Json:
    """Returns a list or an object as JSON; any other value, and what JSON cannot say, as it is."""
    if not isinstance(value, list | tuple | dict):
        return value
    try:
        return json.dumps(value, default=_text_in_json)
    except (TypeError, ValueError, RecursionError):
        return value


def _text_in_json(value: Json) -> str:
    """Returns the text of a date, a time, a decimal or a UUID, as sources write them in JSON."""
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError


def _kwargs_of(row: Row) -> Message | Refused:
    """Returns the template variables in the row itself."""
    found = value_of(row.get(KWARGS), keep=())
    if found is not None and not isinstance(found, dict):
        return Refused("bad_template_kwargs", f"column {KWARGS!r}: {found!r:.80} is not an object")
    wrong = wrong_kwargs(found or {})
    if wrong is not None:
        return Refused("bad_template_kwargs", f"column {KWARGS!r}: {wrong[0]!r} {wrong[1]}")
    return found or {}


def _system_of(row: Row, column: str | None) -> str | Refused | None:
    """Returns the row's own system prompt, or None."""
    system = None if column is None else row.get(column)
    if system is not None and not isinstance(system, str):
        return Refused("not_a_string", f"column {column!r}: {system!r:.80} is not text")
    return system if system and system.strip() else None


class TemplateFormat:
    """The format of rows that a template of columns writes, with a prefix for all of them.

    The template has `{column}`s, or is written in Jinja2.

    Args:
        names: Special tokens that Jinja templates may print.
        lengths: The lengths whose budgets columns are cut to, or None.
        eos: The EOS that texts become one token of; empty if they do not.
    """

    raw = True

    def __init__(
        self,
        config: PromptConfig,
        names: Mapping[str, str],
        lengths: Lengths | None = None,
        eos: str = "",
    ) -> None:
        self._lengths = lengths
        source = config.source()[0] if config.format_type == "custom" else ""
        ends = eos and (eos in source or "eos_token" in source)
        self._eos = eos if ends and (is_jinja(source) or source.rstrip() != source) else ""
        pairs = config.format_type in ("prompt_completion", "text")
        self.kind = "pairs" if pairs else "prompt"
        self._everything = config.answer is None or config.train_on == "all"
        self._open = config.train_on_eos == "none"
        self._writer = _writer(config, names, everything=self._everything)
        self._in_jinja = isinstance(self._writer, JinjaTemplate)
        self.columns = self._writer.columns
        self._system = (
            SYSTEM if config.format_type == "alpaca" and SYSTEM not in self.columns else None
        )
        self.optional: tuple[str, ...] = () if self._system is None else (self._system,)
        self._front = "" if config.system_prompt is None else f"{config.system_prompt}\n\n"
        self._bos = names.get("bos_token", "")
        self._few_shot = None
        if config.few_shot is not None:
            self._few_shot = FewShot(
                config.few_shot,
                self.columns,
                self._read,
                self._examples,
                "Give rows that are samples.",
            )

    @property
    def identity(self) -> Identity:
        more: list[Identity | str] = (
            [self._front] if self._front or self._few_shot is not None else []
        )
        if self._few_shot is not None:
            more.append(self._few_shot.identity)
        if more and self._bos:
            more.append("one BOS")
        if self._open:
            more.append("no trained end, nor its own")
        if self._eos:
            more.append("spaces behind its end")
        if self.kind == "pairs":
            return ["all" if self._everything else "completion", *more]
        return [self._writer.identity, *more]

    def accepts(self, kind: pa.DataType, column: str) -> bool:
        return self.kind == "prompt" or is_text(kind) or pa.types.is_null(kind)

    def render(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        """Writes rows with their budgets, system prompts and examples."""
        systems = [_system_of(row, self._system) for row in rows]
        shared = [row.get(SHARED, 0) for row in rows]
        cut = [self._within(self._read(row)) for row in rows]
        made = self._writer.write([row for row, _ in cut])
        for i, (one, system) in enumerate(zip(made, systems, strict=True)):
            _, lost = cut[i]
            if isinstance(lost, Refused):
                made[i] = lost
            elif isinstance(one, Rendered):
                if self._open:
                    one = one._replace(end=MASKED_END)
                one = self._ended(one)
                spans = [[max(a, shared[i]), b] for a, b in one.spans] if shared[i] else one.spans
                made[i] = (
                    system
                    if isinstance(system, Refused)
                    else self._behind(one._replace(lost=lost, spans=spans), rows[i], system)
                )
        return made

    def shared(self, one: Json, other: Json) -> int:
        """Returns how many characters both texts begin with.

        A space at the end does not count, since tokens begin with it.
        """
        if not isinstance(one, str) or not isinstance(other, str):
            return 0
        return len(one[: num_shared(one, other)].removesuffix(" "))

    def _ended(self, one: Rendered) -> Rendered:
        """Returns a text without an EOS to add if the template wrote one, with spaces behind it."""
        said = one.text.rstrip()
        if not self._eos or said == one.text or not said.endswith(self._eos):
            return one
        stop = len(said) - len(self._eos) if self._open else len(one.text)
        return one._replace(end=OPEN, spans=[[a, min(b, stop)] for a, b in one.spans if a < stop])

    def _read(self, row: Row) -> Row:
        return {name: row[name] for name in self.columns}

    def _examples(self, pool: Sequence[Row]) -> list[str | Refused]:
        made = self._writer.write([self._within(row)[0] for row in pool])
        return [
            one if isinstance(one, Refused) else one.text.removeprefix(self._bos) for one in made
        ]

    def _within(self, row: Row) -> tuple[Row, int | Refused]:
        """Cuts the columns of a row to their budgets.

        Returns:
            (the row, how many tokens it lost, or why it is refused).
        """
        if self._lengths is None:
            return row, 0
        changed, lost = dict(row), 0
        for name, budget in (self._lengths.policy.budgets or {}).items():
            # a template in Jinja may read the items of a list
            text = row[name] if self._in_jinja else text_of(row[name], name)
            if isinstance(text, str):
                try:
                    changed[name], gone = self._lengths.within(text, budget)
                except UnencodableError as error:
                    return row, Refused(REFUSED_BY_TOKENIZER, error.problem)
                lost += gone
        return changed, lost

    def _behind(self, one: Rendered, row: Row, system: str | None) -> Rendered:
        """Returns the text with the system prompt and examples before it.

        Nothing of the examples is trained on; the system prompt is if train_on is `all`. The BOS
        that a template writes before each of them is kept once, at the start.
        """
        front = self._front if system is None else f"{system}\n\n"
        if self._few_shot is not None:
            front += "".join(text + self._few_shot.separator for text in self._few_shot.of(row))
        if not front:
            return one
        size, known = len(front), len(self._bos) if one.text.startswith(self._bos) else 0
        spans = [[max(a, known) + size, b + size] for a, b in one.spans if b > known]
        if self._everything and self._few_shot is None and spans and spans[0][0] == size + known:
            spans[0][0] = 0
        return one._replace(text=one.text[:known] + front + one.text[known:], spans=spans)


class TextFormat:
    """The format of one unchanged column of text; every token is trained on."""

    kind, raw, optional = "text", True, ()
    identity: Identity = ()  # no option affects it

    def __init__(self, column: str) -> None:
        self.columns = (column,)

    def accepts(self, kind: pa.DataType, column: str) -> bool:
        return is_text(kind) or pa.types.is_null(kind)

    def render(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        return [self._written(row[self.columns[0]]) for row in rows]

    def _written(self, value: Json) -> Rendered | Refused:
        text = text_of(value, self.columns[0])
        if isinstance(text, Refused):
            return text
        if not isinstance(value, str):
            return Refused("not_a_string", f"{text!r} is not text")
        if not text.strip():
            return Refused(EMPTY, "an empty text")
        return Rendered(text, [[0, len(text)]], OPEN)


@functools.cache
def warn_unread(at: str, have: Sequence[str], read: Sequence[str]) -> None:
    """Warns, once, about columns of conversations beside a prompt and an answer of text."""
    if unread := [name for name in (SYSTEM, TOOLS, KWARGS) if name in have and name not in read]:
        log.warning(
            "%s: the prompts and answers are text, so %s %s not read. Write {column}s in the "
            "template of a prompt of format_type: custom, or give lists of messages; format_fields "
            "renames columns of another meaning.",
            at,
            " and ".join(f"column {name!r}" for name in unread),
            "is" if len(unread) == 1 else "are",
        )


def _writer(config: PromptConfig, names: Mapping[str, str], *, everything: bool) -> Writer:
    """Returns the writer of a config; `names` are special tokens that Jinja may print."""
    inputs, label = config.inputs, config.label
    if config.format_type == "text":  # a pair whose answers both begin with the prompt
        return FieldTemplate(["", inputs[0], ""], (), inputs[0], everything=False)
    if config.format_type == "prompt_completion":
        return FieldTemplate(
            ["", inputs[0], "", str(label), ""], inputs, label, everything=everything
        )
    if config.format_type == "alpaca":
        columns = {"instruction": inputs[0], "input": inputs[-1], "output": str(label)}
        texts = []
        for template, needed in ((ALPACA, inputs[:1]), (ALPACA_WITH_INPUT, inputs)):
            pieces = pieces_of(template)
            pieces[1::2] = [columns[name] for name in pieces[1::2]]
            if len(needed) == template.count("{") - 1:
                texts.append(FieldTemplate(pieces, needed, label, everything=everything))
        return AlpacaTemplate(*texts) if len(texts) == 2 else texts[0]
    source, origin = config.source()
    check_whole(source, "template", origin)
    if not is_jinja(source):
        require(
            config.template_date is None,
            "template_date",
            "has no effect on a template of {column}s",
            "Leave it out.",
        )
        return FieldTemplate(pieces_of(source), inputs, label, everything=everything)
    require(
        inputs,
        "input_columns",
        "a Jinja template needs them",
        "Name the columns that it may read.",
    )
    everything = everything and (label is not None or config.train_on == "all")
    return JinjaTemplate(source, config, names, everything=everything, origin=origin)


class JinjaTemplate:
    """A writer of rows by a Jinja template that sees their columns as variables.

    The config's label is the column that is trained on. It is found where the template prints it,
    and this place is proven. Without a label, `{% generation %}` markers say what is trained on;
    without markers, everything is.

    Args:
        source: The template.
        names: As in ChatTemplate.
        everything: Whether all of the text is trained on.
        origin: Where the template is from, for errors.

    Raises:
        HostileTemplateError: The template exceeds its limits when it writes.
    """

    def __init__(
        self,
        source: str,
        config: PromptConfig,
        names: Mapping[str, str],
        *,
        everything: bool,
        origin: str,
    ) -> None:
        self._origin, self._label, self._everything = origin, config.label, everything
        label = () if config.label is None else (config.label,)
        self.columns = (*config.inputs, *label)
        self._spec = {
            "source": source,
            "names": dict(names),
            "closers": (),
            "train_on": "all" if everything else "completion" if label else "marked",
            "date": config.template_date,
            "label": config.label,
        }
        self.identity: Identity = ["jinja", ENGINE_VERSION, list(self.columns), self._spec]

    def write(self, rows: Sequence[Row]) -> list[Rendered | Refused]:
        return answers_of(self._spec, [self._request(row) for row in rows], self._origin)

    def _request(self, row: Row) -> Row | Refused:
        """Returns the variables that the template gets from a row; the label as text."""
        fields = {name: row[name] for name in self.columns}
        if self._label is not None:
            said = fields[self._label] = text_of(row[self._label], self._label)
            if isinstance(said, Refused):
                return said
            if not said and not self._everything:
                return Refused(NOTHING_TO_TRAIN, f"the {self._label} is empty")
        bad = next((name for name in self.columns if not is_unicode(fields[name])), None)
        if bad is not None:
            return Refused("invalid_utf8", f"column {bad!r} has no text")
        return {"fields": fields}

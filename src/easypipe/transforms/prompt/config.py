"""PromptConfig and FewShotConfig: how rows become text, what is trained on, option conflicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from easypipe.core.config import ListOf, config, fields_of
from easypipe.core.errors import ConfigError, require
from easypipe.transforms.chat.conversations import MESSAGE_FIELDS, PART, ROLES
from easypipe.transforms.chat.render import (
    check_date,
    check_kwargs,
    check_whole,
    given_template,
    without_mark,
)
from easypipe.transforms.prompt.fields import pieces_of

FormatType = Literal["chat", "openai", "sharegpt", "alpaca", "custom", "prompt_completion", "text"]
TrainOn = Literal["all", "completion", "assistant", "last_assistant"]
TrainOnEos = Literal["turn", "last", "none"]
Reasoning = Literal["keep", "mask", "per_turn"]

CHAT_FORMATS = ("chat", "openai", "sharegpt")  # formats of messages, which chat templates render
DEFAULT_COLUMNS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "chat": (("messages",), None),
    "openai": (("messages",), None),
    "sharegpt": (("conversations",), None),
    "alpaca": (("instruction", "input"), "output"),
    "prompt_completion": (("prompt",), "completion"),
    "text": (("text",), None),
    "custom": ((), None),
}
# the roles that roles_to_train may name
SPEAKERS = ("assistant", "user", "system", "tool", "developer")


def check_thinking(options: Any) -> None:
    """Raises ConfigError if train_empty_thinking has no effect."""
    require(
        options.train_empty_thinking is None or options.train_on != "all",
        "train_empty_thinking",
        "has no effect together with train_on 'all', which trains every token",
        "Leave it out.",
    )


def check_message_fields(fields: Mapping[str, str] | None) -> None:
    """Raises ConfigError for keys that messages do not have, and for one that is given twice."""
    for name, key in (fields or {}).items():
        at = f"message_fields.{name}"
        fix = f"OpenAI's key comes first: {key}: {name}." if key in MESSAGE_FIELDS else None
        require(name in MESSAGE_FIELDS, at, "no key of messages", fix, MESSAGE_FIELDS)
        others = [own for own in fields or {} if PART not in (own, name)]
        twice = sum((fields or {})[own] == key for own in others) > 1
        require(key and not twice, at, f"{key!r} {'appears twice' if key else 'is not a key'}")


@config
class FewShotConfig:
    """Solved examples before every row; none of their tokens counts in the loss.

    Args:
        examples: Examples, as dicts with the columns of the format; every row gets all of them, in
            this order.
        data_files: A file of rows (JSON lines, a JSON array, parquet) to draw examples from
            instead, such as the dataset's own; it is held in memory.
        count: How many examples are drawn for each row, by seed and row alone; an example that
            equals the row is never drawn.
        seed: Seed of the draws.
        separator: The text between examples, and between the last one and the row; chat templates
            write their own.
    """

    examples: ListOf[dict[str, Any]] = ()
    data_files: str | Path | None = None
    count: int | None = None
    seed: int = 0
    separator: str = "\n\n"

    def check(self) -> None:
        require(
            bool(self.examples) != (self.data_files is not None),
            "examples",
            "given together with data_files"
            if self.examples
            else "there are none, and no data_files",
            "Give one of the two.",
        )
        require(
            (self.data_files is None) == (self.count is None),
            "count",
            "data_files needs it" if self.count is None else "has no effect without data_files",
            "Give how many are drawn for each row." if self.count is None else "Leave it out.",
        )
        require(
            self.count is None or self.count >= 1,
            "count",
            f"{self.count} examples are too few",
            "Give at least 1, or leave few_shot out.",
        )
        require(
            not self.examples or not self.seed,
            "seed",
            "has no effect on examples that are given",
            "Leave it out.",
        )


@config
class PromptConfig:
    r"""How a row becomes a text, and which of its characters are trained on.

    Args:
        format_type: "chat" (or "openai"): messages of role and content, with or without tool calls,
            through a chat template; "sharegpt": the same from lists of `from` and `value`;
            "alpaca": instruction, input (may be empty) and output; "custom": your template;
            "prompt_completion": two columns in turn; "text": one unchanged column, all of which is
            trained on.
        template: For messages a chat template: a file, its text, or the name of a built-in one
            (chatml, plain, zephyr, alpaca); None takes the tokenizer's own. For "custom" a file or
            a text, with `{column}` or in Jinja2. The other formats have no template.
        input_columns: The columns that are read besides the label: for messages the column that
            holds them, for "custom" the columns that the template names.
        label_column: The column that is trained on; "custom" without one trains on the whole text.
            For messages, the column of the messages that answer the conversation in input_columns.
        rejected_column: The column of the answer that was not preferred; makes pairs of rows for
            train.preference. The second row of a pair has it in place of the label. For "text", and
            for messages without a label, it replaces the column itself. For "text", and for
            messages with train_on "completion", the common beginning is the prompt.
        desirable_column: The column (true or false) that says whether the answer is desirable, for
            train.preference with the losses kto and apo_zero_unpaired.
        tools_column: For messages, the column of tools; None takes the column `tools`, if there is
            one.
        roles: For "sharegpt", the role of each value of `from`: {"bot": "assistant"}. It adds to
            human, gpt, system, function_call, observation, ...
        message_fields: Maps OpenAI's keys (role, content, tool_calls, reasoning_content, train,
            train_ranges, weight), and the `text` of typed parts, to the keys in your messages:
            {role: speaker, content: said}. Who speaks is mapped by `roles`.
        system_prompt: For messages, the system message of conversations without one; otherwise text
            before the row, followed by an empty line.
        few_shot: Examples before every row.
        train_on: For messages, `assistant` (the default), `last_assistant`, `completion` or `all`.
            `completion` is the last message, if it is the assistant's; with a label_column it is
            the default, and means all that the template writes after the prompt. A message's own
            `train` (true or false) overrides train_on. For other formats, `completion` (the default
            if there is a label) or `all`.
        roles_to_train: For messages, the roles whose turns are trained on: `assistant` (what
            train_on `assistant` means), `user`, `system`, `tool`, `developer`. For roles other than
            the assistant, the content is trained on, and also the end of the turn if the
            assistant's turns end in the same way. A message's own `train` overrides it for any
            role; with an empty list, only messages with `train` are trained on.
        train_on_eos: Whether the end of a trained turn (`<|im_end|>`, EOS) is trained on too: of
            every `turn` (default), the `last` one, or `none`; for a text completion, its EOS.
        template_date: The day (2026-01-31) for templates that ask for today's date; None refuses
            rows of such templates.
        chat_template_kwargs: Variables of the template besides messages, as in
            `apply_chat_template` of transformers: {enable_thinking: false}. A row's column
            `chat_template_kwargs` overrides it.
        reasoning: What happens to the reasoning of messages (`reasoning_content`, or `<think>` in
            their content). `keep` (default): it is trained on where the template prints it. `mask`:
            it is in the context, but is not a target. `per_turn`: each trained turn becomes a
            sample that ends with it, so that the reasoning that templates drop from earlier turns
            is trained on. Turns that a later sample renders in the same way are trained on there.
        train_empty_thinking: Whether the empty reasoning block that templates of reasoning models
            write before an answer (`<think>\n\n</think>`) is trained on; None means True, as in
            TRL's training templates. If a template has generation markers, they decide.
    """

    format_type: FormatType = "chat"
    template: str | Path | None = None
    input_columns: ListOf[str] = ()
    label_column: str | None = None
    rejected_column: str | None = None
    desirable_column: str | None = None
    tools_column: str | None = None
    roles: dict[str, str] | None = None
    message_fields: dict[str, str] | None = None
    system_prompt: str | None = None
    few_shot: FewShotConfig | None = None
    train_on: TrainOn | None = None
    roles_to_train: ListOf[str] | None = None
    train_on_eos: TrainOnEos | None = None
    template_date: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    train_empty_thinking: bool | None = None

    def check(self) -> None:
        kind = self.format_type
        options = fields_of(self)
        for name in self._without_effect():
            require(
                options[name] is None,
                name,
                f"has no effect on format_type {kind!r}",
                "Leave it out."
                if name != "template"
                else "Leave it out, or write it with {column}s for format_type: custom.",
            )
        require(
            kind != "custom" or self.template is not None,
            "template",
            "format_type 'custom' needs one",
            "Write '{question}\\n{answer}', or name a file.",
        )
        check_whole(self.template, "template")
        self._check_columns()
        self._check_train_on()
        check_thinking(self)
        known = set(ROLES.values())
        for name, role in (self.roles or {}).items():
            require(role in known, f"roles.{name}", f"{role!r} is not a role", have=sorted(known))
        if self.template_date is not None:
            check_date(self.template_date)
        check_kwargs(self.chat_template_kwargs)
        self._check_ends()
        check_message_fields(self.message_fields)

    def _check_columns(self) -> None:
        """Checks that each column is named once, and that the format has its columns."""
        kind = self.format_type
        least, most = {"alpaca": (1, 2), "custom": (0, len(self.inputs))}.get(kind, (1, 1))
        require(
            least <= len(self.inputs) <= most,
            "input_columns",
            f"{list(self.inputs)} for format_type {kind!r}",
            "Name the columns of instruction and input."
            if kind == "alpaca"
            else "Name one column.",
        )
        require(
            self.rejected_column is None or self.answer is not None,
            "rejected_column",
            "there is no label that it could replace",
            "Name the label_column, which it replaces.",
        )
        every = [(name, f"input_columns[{i}]") for i, name in enumerate(self.inputs)]
        require(
            self.desirable_column is None or self.rejected_column is None,
            "desirable_column",
            "judges one answer, and with rejected_column a row has two",
            "Leave one of them out.",
        )
        for name, at in (
            (self.label, "label_column"),
            (self.rejected_column, "rejected_column"),
            (self.desirable_column, "desirable_column"),
        ):
            every += [] if name is None else [(name, at)]
        seen: set[str] = set()
        for name, at in every:
            require(
                name and name not in seen,
                at,
                f"{name!r} {'appears twice' if name else 'names no column'}",
                "Name each column once.",
            )
            seen.add(name)

    def _check_train_on(self) -> None:
        """Checks train_on and roles_to_train for this format."""
        kind, is_chat = self.format_type, self.format_type in CHAT_FORMATS
        possible = ["completion", "all"]
        if is_chat:
            possible = ["assistant", "last_assistant", *possible]
        elif kind == "custom" and self.label is None:
            possible = ["all"]
        if self.train_on is not None and self.train_on not in possible:
            why = (
                "needs a label_column"
                if kind == "custom" and self.train_on == "completion"
                else f"is nothing that {kind!r} has"
            )
            raise ConfigError(
                at="train_on",
                problem=f"{self.train_on!r} {why}",
                have=possible,
                fix=f"Use {possible[0]!r}.",
            )
        require(
            self.roles_to_train is None or self.train_on is None,
            "roles_to_train",
            f"says whose turns are trained, and train_on {self.train_on!r} says it too",
            "Leave one of them out: train_on 'assistant' is roles_to_train ['assistant'].",
        )
        for i, role in enumerate(self.roles_to_train or ()):
            at = f"roles_to_train[{i}]"
            require(role in SPEAKERS, at, f"{role!r} is not a role", have=SPEAKERS)
        require(
            not is_chat or self.few_shot is None or self.train_on != "all",
            "train_on",
            "'all' would train the few_shot examples of a conversation",
            "Use 'assistant', or leave few_shot out.",
        )

    def _check_ends(self) -> None:
        """Checks train_on_eos and reasoning, which need turns or answers that are trained on."""
        every = self.train_on == "all" or (
            self.format_type in CHAT_FORMATS and self.trains_behind_prompt
        )
        plain = self.format_type == "custom" and self.label is None
        require(
            self.train_on_eos is None or not (every or plain),
            "train_on_eos",
            "has no effect if everything is trained, or all after a prompt",
            "Leave it out, or set train_on to 'assistant' ('completion' of text).",
        )
        require(
            self.reasoning in (None, "keep") or not every,
            "reasoning",
            f"{self.reasoning!r} has no effect if everything is trained, or all after a prompt",
            "Leave it out, or set train_on to 'assistant'.",
        )
        if self.reasoning != "per_turn":
            return
        for name in ("label_column", "rejected_column", "desirable_column"):
            why = f"'per_turn' makes several samples of a row, and {name} names one answer"
            require(fields_of(self)[name] is None, "reasoning", why, "Use 'keep' or 'mask'.")
        require(
            self.train_on_eos != "last",
            "train_on_eos",
            "'last' has no effect with reasoning 'per_turn', whose samples end with their turns",
            "Use 'turn' or 'none'.",
        )

    @property
    def inputs(self) -> Sequence[str]:
        """input_columns, or the format's own if none are given."""
        return self.input_columns or DEFAULT_COLUMNS[self.format_type][0]

    @property
    def label(self) -> str | None:
        """label_column, or the format's own if it is not given."""
        return self.label_column or DEFAULT_COLUMNS[self.format_type][1]

    @property
    def answer(self) -> str | None:
        """The column that `rejected_column` replaces in a row's second text."""
        return self.label or (
            self.inputs[0] if self.format_type in (*CHAT_FORMATS, "text") else None
        )

    @property
    def shares_prompt(self) -> bool:
        """Whether the common beginning of both answers of a pair is their prompt."""
        whole = self.label is None and (self.format_type == "text" or self.train_on == "completion")
        return self.rejected_column is not None and whole

    @property
    def trains_behind_prompt(self) -> bool:
        """Whether everything that follows the prompt of messages is trained on, for any speaker."""
        answers = self.label is not None or self.shares_prompt
        chosen = self.train_on if self.roles_to_train is None else "assistant"
        return answers and chosen in (None, "completion")

    def source(self) -> tuple[str, str]:
        """Returns (text, origin) of a custom template.

        Raises:
            ConfigError: Its file cannot be read.
        """
        text = str(self.template)
        return (
            (without_mark(text), "template")
            if isinstance(self.template, str) and "{" in text
            else given_template(text, at="template")
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every row must have.

        For a custom template without input_columns, they are those that it names.
        """
        named = self.inputs
        if self.format_type == "custom" and not named:
            named = tuple(
                dict.fromkeys(
                    name for name in pieces_of(self.source()[0])[1::2] if name != self.label
                )
            )
        further = (self.label, self.tools_column, self.rejected_column, self.desirable_column)
        return (*named, *(name for name in further if name is not None))

    def _without_effect(self) -> list[str]:
        """Returns the options that have no effect on this format."""
        if self.format_type in CHAT_FORMATS:
            return [] if self.format_type == "sharegpt" else ["roles"]
        names = [
            "tools_column",
            "roles",
            "message_fields",
            "chat_template_kwargs",
            "train_empty_thinking",
            "roles_to_train",
            "reasoning",
        ]
        if self.format_type != "custom":
            names += ["template", "template_date"]
        if self.format_type == "text":
            names += ["label_column", "desirable_column", "system_prompt", "few_shot", "train_on"]
            names += [] if self.rejected_column is not None else ["train_on_eos"]
        return names

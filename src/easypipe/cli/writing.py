"""The three ways `easypipe generate` asks and prints: prompts, a file of messages, a chat."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from easypipe.cli.show import say
from easypipe.core.errors import ConfigError, SourceError, require
from easypipe.core.visible import visible
from easypipe.transforms.chat.conversations import BadJson, loaded
from easypipe.transforms.chat.render import ChatTemplate, load_chat_template, turns_of
from easypipe.transforms.chat.sandbox import Json
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.formats import ChatFormat
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from easypipe.train.model.decoder import Decoder  # loads jax
    from easypipe.train.model.pretrained.save import Seen


def show_text(text: str) -> None:
    """What a model wrote may hold what steers a terminal."""
    say(visible(text, keep="\n\t"))


class Writer:
    """A model with what it writes by. options: of easypipe.generate."""

    def __init__(self, loaded: Loaded, options: dict[str, Any]) -> None:
        tokenizer, ends = load_tokenizer(loaded.tokenizer), loaded.seen.stop_token_ids
        own = tokenizer.eos_token_id
        self._decoder, self._tokenizer, self._options = loaded.decoder, tokenizer, options
        self._ends = ends if own is None else (*ends, own)
        self._given = loaded.seen.chat_template  # None: the tokenizer's own
        self._begin = [] if own is None else [own]  # in the place of an empty prompt

    def written(self, prompts: Sequence[str], *, whole: bool) -> list[str]:
        """What the model writes behind each prompt, behind the prompt itself where `whole`."""
        from easypipe.train.model.generate import generate as write  # jax

        ids = [self._tokenizer.reference_encode(prompt) or self._begin for prompt in prompts]
        lines = write(
            self._decoder,
            ids,
            eos_token_id=self._ends,
            tokenizer=self._tokenizer,
            **self._options,
        )
        decode, texts = self._tokenizer.decode, []
        for prompt, begun, line in zip(prompts, ids, lines, strict=True):
            before = len(decode(begun)) if prompt else 0
            text = decode([*begun, *line] if prompt else line)
            cuts = (text.find(end, before) for end in self._options["stop"])
            text = text[: min((cut for cut in cuts if cut >= 0), default=None)]
            texts.append(text if whole else text[before:])
        return texts

    def opened(self, conversations: Sequence[tuple[str, Json]]) -> list[str]:
        """Prompts that open an answer to each conversation, by the chat template; with the places
        of the conversations, for errors.
        """
        config = PromptConfig(input_columns=["messages"])
        reader = ChatFormat(config, self._template, refuse=())
        asked = [reader.request(row) for _, row in conversations]
        prompts: list[str] = []
        for (at, _), text in zip(conversations, self._template.prompts(asked), strict=True):
            if isinstance(text, Refused):
                raise SourceError(
                    at=at,
                    problem=f"{text.reason}: {text.detail}",
                    fix='Give a list of messages: [{"role": "user", "content": "..."}], or an '
                    "object with messages, and system, tools, chat_template_kwargs as rows have.",
                )
            prompts.append(text)
        return prompts

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        """Its turns end what the model writes, too."""
        template = load_chat_template(
            self._tokenizer, chat_template=self._given, train_on="assistant", date=None
        )
        self._ends = (*self._ends, *turns_of(template, self._tokenizer).stop_token_ids)
        return template


def talk(writer: Writer, system: str | None) -> None:
    """Answers every line that is typed, until the input ends."""
    said = [] if system is None else [{"role": "system", "content": system}]
    for number in itertools.count(1):
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        said.append({"role": "user", "content": line.rstrip("\n")})
        prompt = writer.opened([(f"line {number}", {"messages": said})])
        (answer,) = writer.written(prompt, whole=False)
        said.append({"role": "assistant", "content": answer})
        show_text(answer)


def conversations_of(path: Path) -> list[tuple[str, Json]]:
    """The conversations of a file, each with its place: a JSON list of messages, an object with
    `messages` (or `prompt`, as rows of TRL have it) and what else rows have beside them (`tools`,
    `system`, `chat_template_kwargs`), or one of these in each line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            at=str(path), problem=f"is not UTF-8: {error}", fix="Save it as UTF-8."
        ) from None
    found = [(str(path), loaded(text))]
    if isinstance(found[0][1], BadJson):
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        found = [(f"{path}, line {number}", loaded(line)) for number, line in lines]
    for at, row in found:
        require(not isinstance(row, BadJson), at, f"is not JSON: {row}", "Give a list of messages.")
    rows = [(at, row if isinstance(row, dict) else {"messages": row}) for at, row in found]
    return [(at, {"messages": row.get("prompt"), **row}) for at, row in rows]


class Loaded(NamedTuple):
    """A model, the name of its tokenizer, and what it has seen."""

    decoder: Decoder
    tokenizer: str
    seen: Seen


def load(name: str, tokenizer: str | None, step: int | None, dtype: Any) -> Loaded:
    """The model of a run, or a published one."""
    from easypipe.train import load_pretrained
    from easypipe.train.checkpoint.files import CHECKPOINTS
    from easypipe.train.finished import load_trained
    from easypipe.train.model.pretrained.config import PretrainedConfig
    from easypipe.train.model.pretrained.files import end_tokens
    from easypipe.train.model.pretrained.save import Seen

    if (Path(name).expanduser() / CHECKPOINTS).is_dir():
        trained = load_trained(name, step)
        decoder, own, seen = trained.model, trained.tokenizer, trained.seen
    else:
        require(
            step is None,
            "--step",
            f"{name} is no run that has checkpoints",
            "Leave it out, or give a run's folder.",
        )
        decoder = load_pretrained(name, dtype=dtype)
        _, folder = PretrainedConfig(pretrained=name).resolved()
        own = str(folder) if (folder / "tokenizer.json").is_file() else None
        seen = Seen(stop_token_ids=end_tokens(folder))
    if (chosen := tokenizer or own) is None:
        raise ConfigError(
            at="--tokenizer",
            problem=f"{name} names no tokenizer",
            fix="Give the one that made its tokens.",
        )
    return Loaded(decoder, chosen, seen)

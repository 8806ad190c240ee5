"""Writes texts with a model: after prompts, and in answer to conversations by its chat template."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from easypipe.core.config import require_harmless
from easypipe.core.errors import SourceError
from easypipe.core.values import Arguments
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.generate import generate
from easypipe.train.model.pretrained.save import Seen
from easypipe.transforms.chat.render import ChatTemplate, load_chat_template, turns_of
from easypipe.transforms.chat.sandbox import Json
from easypipe.transforms.prompt.config import PromptConfig
from easypipe.transforms.prompt.formats import ChatFormat
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

SHOWN = 60  # characters of a text that an error message shows


class Loaded(NamedTuple):
    """A model, the name of its tokenizer, and the record of its data."""

    decoder: Decoder
    tokenizer: str
    seen: Seen


class Writer:
    """A model with its tokenizer and the options by which it writes.

    Args:
        loaded: The model.
        options: Options of easypipe.generate.

    Attributes:
        decoder: The model. It may be removed and set again, while its arrays are being trained.
    """

    def __init__(self, loaded: Loaded, options: Arguments) -> None:
        tokenizer, ends = load_tokenizer(loaded.tokenizer), loaded.seen.stop_token_ids
        begin, own = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.decoder: Decoder | None = loaded.decoder
        self._tokenizer, self._options = tokenizer, options
        self._ends = ends if own is None else (*ends, own)
        self._given = loaded.seen.chat_template  # None: the tokenizer's own
        # Replaces an empty prompt: the token that documents begin with, or that ends the one
        # before.
        self._begin = [next((one for one in (begin, own) if one is not None), 0)]

    def written(self, prompts: Sequence[str], *, whole: bool) -> list[str]:
        """Returns the model's continuation of each prompt, with the prompt if `whole`."""
        assert self.decoder is not None
        require_harmless(list(prompts), "prompts")
        ids = [self._tokenizer.reference_encode(prompt) or self._begin for prompt in prompts]
        lines = generate(
            self.decoder,
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
        """Returns the prompts that open an answer to each conversation, by the chat template.

        Args:
            conversations: Pairs of the place of a conversation, for errors, and the conversation.

        Raises:
            SourceError: The chat template refuses a conversation.
        """
        config = PromptConfig(input_columns=["messages"])
        reader = ChatFormat(config, self._template, refuse=())
        asked = [reader.request(reader.as_json(row)) for _, row in conversations]
        prompts: list[str] = []
        for (at, row), text in zip(conversations, self._template.prompts(asked), strict=True):
            if isinstance(text, Refused):
                said = row["messages"]
                if text.reason == "not_json" and isinstance(said, str):
                    key = "prompt" if row.get("prompt") == said else "messages"
                    short = said if len(said) <= SHOWN else f"{said[:SHOWN]} ..."
                    raise SourceError(
                        at=f"{at}, {key}",
                        problem="is text, not messages",
                        fix=f"Give it as an argument: easypipe generate RUN {shlex.quote(short)}.",
                    )
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
        """The chat template.

        Reading it also adds the tokens that end its turns to the tokens that end a text.
        """
        template = load_chat_template(
            self._tokenizer, chat_template=self._given, train_on="assistant", date=None
        )
        self._ends = (*self._ends, *turns_of(template, self._tokenizer).stop_token_ids)
        return template

"""Encodes texts and conversations with transformers' tokenizers; checks the packages needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

from easypipe.core.errors import ConfigError, raising
from easypipe.core.values import Json, JsonValue


class NamedTokenizer(Protocol):
    """The part of transformers' tokenizers that is used."""

    chat_template: str | None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Json],
        *,
        tokenize: bool,
        return_dict: bool,
        **options: JsonValue,
    ) -> Mapping[str, list[int]]: ...


def needed(
    name: str, at: str = "--check", fix: str = "pip install 'easypipe[check]'"
) -> ModuleType:
    """Returns a package of the extra `[check]`, or one that `fix` installs.

    Raises:
        ConfigError: The package is not installed.
    """
    problem = f"needs the package {name}"
    with raising(ConfigError, at, problem, fix, ImportError):
        return importlib.import_module(name)


def applied(
    named: NamedTokenizer, messages: Sequence[Json], **options: JsonValue
) -> Mapping[str, list[int]] | None:
    """Returns `input_ids` of a conversation by transformers, and what `options` request.

    It is None if transformers rejects the conversation.
    """
    errors = importlib.import_module("jinja2").TemplateError, ValueError
    try:
        return named.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except errors:
        return None


def first_difference(own: Sequence[int], found: Sequence[int]) -> int | None:
    """Returns where two lists of tokens first differ; None if they are equal."""
    if list(own) == list(found):
        return None
    pairs = enumerate(zip(own, found, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(own), len(found)))

"""Texts and conversations as tokenizers of transformers encode them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

from easypipe.core.errors import ConfigError, raising
from easypipe.core.values import Json, JsonValue


class NamedTokenizer(Protocol):
    """What is asked of a tokenizer of transformers."""

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
    """A package of the extra `[check]`, or another that `fix` brings. Raises ConfigError where it
    is not installed.
    """
    problem = f"needs the package {name}"
    with raising(ConfigError, at, problem, fix, ImportError):
        return importlib.import_module(name)


def applied(
    named: NamedTokenizer, messages: Sequence[Json], **options: JsonValue
) -> Mapping[str, list[int]] | None:
    """`input_ids` of a conversation as transformers writes it, and what else `options` ask for;
    None where it refuses to.
    """
    errors = importlib.import_module("jinja2").TemplateError, ValueError
    try:
        return named.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    except errors:
        return None


def first_difference(own: Sequence[int], found: Sequence[int]) -> int | None:
    """Where two lists of tokens part; None where they are equal."""
    if list(own) == list(found):
        return None
    pairs = enumerate(zip(own, found, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(own), len(found)))

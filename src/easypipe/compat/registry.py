"""Document 004: CollatorRegistry, collators by name and task; LanguageModelingDataCollator.

A collator is made by a factory: `(task_spec=None, **options) -> function of a list of rows`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from easypipe.compat.collators import (
    called,
    create_causal_lm_collate,
    create_seq2seq_collate,
    default_collate,
    draws,
    recipe_of,
)
from easypipe.compat.foreign import TEXT, Rows, TokenizerLike, as_tokenizer, pad_of
from easypipe.compat.masking import create_masked_lm_collate
from easypipe.compat.vision import MultimodalCollator, create_vision_collate
from easypipe.core.errors import (
    ConfigError,
    SourceError,
    place,
    require,
    require_known,
)
from easypipe.core.schema import INPUT_IDS, TaskSpec
from easypipe.core.values import Batch, Collate, Identity, Row
from easypipe.transforms.tokenizer.tokenizer import Tokenizer

# LanguageModelingDataCollator: rows of tokens or of text → batches.


class LanguageModelingDataCollator:
    """The collator of text that CollatorRegistry chooses, for rows of `text` or of tokens.

    It is `create_causal_lm_collate`, or with mlm `create_masked_lm_collate`.

    Args:
        tokenizer: Encodes rows with `text` instead of `input_ids`, and supplies the padding token.
        max_length: The width of every batch, at which texts are cut.
        options: Options of that function.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike = None,
        mlm: bool = False,
        mlm_probability: float | None = None,
        *,
        max_length: int | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> None:
        if mlm_probability is not None:
            require(
                mlm,
                "mlm_probability",
                "has no effect without mlm",
                "Leave it out, or set mlm=True.",
            )
            options["probability"] = mlm_probability
        known: Any = None if tokenizer is None else as_tokenizer(tokenizer)
        if pad_token_id is None and known is not None and not mlm:
            pad_token_id = pad_of(known)
        options |= {} if pad_token_id is None else {"pad_token_id": pad_token_id}
        self._collate = (
            create_masked_lm_collate(known, max_length=max_length, **options)
            if mlm
            else create_causal_lm_collate(max_length=max_length, **options)
        )
        self._tokenizer = None if known is None else as_tokenizer(tokenizer, max_length=max_length)

    @property
    def recipe(self) -> Identity | None:
        own = recipe_of(self._collate)
        if self._tokenizer is None:
            return own
        length = None
        if isinstance(self._tokenizer, Tokenizer):
            length = self._tokenizer.config.max_length
        return "encoding", self._tokenizer.fingerprint, length, own

    @property
    def draws(self) -> bool:
        return draws(self._collate)

    def __call__(self, rows: Rows, *, keys: Sequence[int] | None = None) -> Batch:
        if self._tokenizer is not None:
            rows = [
                row if INPUT_IDS in row else self._encoded(row, i) for i, row in enumerate(rows)
            ]
        return called(self._collate, rows, keys)

    def _encoded(self, row: Row, number: int) -> Row:
        text = row.get(TEXT)
        if not isinstance(text, str) or self._tokenizer is None:
            raise SourceError(
                at=place(f"row {number} of the batch", column=TEXT),
                problem="no text, and no input_ids either",
                have=row,
                fix="Name the column of text 'text'.",
            )
        others = {name: value for name, value in row.items() if name != TEXT}
        return others | {INPUT_IDS: np.asarray(self._tokenizer.reference_encode(text))}


__all__ = ["LanguageModelingDataCollator"]


log = logging.getLogger("easypipe")

Factory = Callable[..., Collate]
DEFAULT = "default"
TASK = "task_spec"  # the parameter of a factory that is not an option


@dataclass(frozen=True)
class Registered:
    """A registered collator.

    Attributes:
        name: Its name.
        factory: The function that makes it.
        modality: The modality of its tasks.
        task_type: The task type; None for any.
        description: What it is for.
        inner: The function to which the factory passes `**options`, if any.
        builtin: Whether it is easypipe's; a user's collator of the same name replaces it.
    """

    name: str
    factory: Factory
    modality: str
    task_type: str | None
    description: str
    inner: Factory | None = None
    builtin: bool = False

    @property
    def options(self) -> tuple[dict[str, bool], bool]:
        """The options of the factory, each with whether it is required.

        The second value says whether it takes any others.
        """
        named: dict[str, bool] = {}
        anything = False
        for factory in (self.factory, self.inner or self.factory):
            parameters = inspect.signature(factory).parameters
            anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            for name, one in parameters.items():
                if name != TASK and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                    named.setdefault(name, one.default is one.empty)
        return named, anything

    def takes(self, option: str) -> bool:
        """Returns whether the factory takes an option."""
        named, anything = self.options
        return anything or option in named


class CollatorRegistry:
    """The registered collators.

    `CollatorRegistry.get_instance()` is the registry of this process; `CollatorRegistry()` makes a
    new one. A task gets the collator that is registered for its modality and task type; else the
    one with the modality's name; else the only one that was registered for the modality without a
    task type; else "default", with a warning. If several fit, an error names them.
    """

    def __init__(self) -> None:
        self._known = {entry.name: entry for entry in _BUILTINS}

    @classmethod
    def get_instance(cls) -> CollatorRegistry:
        return _instance()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._known))

    def describe(self) -> dict[str, str]:
        """Returns {name: what it is for}."""
        return {name: self._known[name].description for name in self.names}

    def register(
        self,
        name: str,
        *,
        modality: str,
        task_type: str | None = None,
        description: str = "",
        replace: bool = False,
    ) -> Callable[[Factory], Factory]:
        """Returns a decorator that registers a factory.

        A built-in collator of that name is replaced, which is logged. Registering the same function
        again, for example in a notebook cell, also replaces it.

        Args:
            name: The name of the collator.
            modality: Any word.
            task_type: Registers it only for tasks of that type.
            description: What it is for; default: the docstring of the factory.
            replace: Whether it may replace another collator of that name.

        Raises:
            ConfigError: Another factory has the name, and replace is False.
        """
        require(name and modality, "register", "name and modality are words", "Give both.")

        def take(factory: Factory) -> Factory:
            before = self._known.get(name)
            if before is not None and before.builtin:
                log.warning("collator %r: easypipe's own is replaced by %s", name, _called(factory))
            elif before is not None and not replace and _called(before.factory) != _called(factory):
                raise ConfigError(
                    at=f"register({name!r})",
                    problem=f"{_called(before.factory)} has this name already",
                    fix="Choose another name, or pass replace=True.",
                )
            said = description or (factory.__doc__ or "").strip()
            self._known[name] = Registered(name, factory, modality, task_type, said)
            return factory

        return take

    def get_collator(
        self, task_spec: TaskSpec | None = None, collator_name: str | None = None, **options: Any
    ) -> Collate:
        """Returns the collator with a name, else that of a task, else the default one.

        Args:
            task_spec: The task.
            collator_name: The name of a collator.
            options: Options of the collator, which override those of the task.

        Raises:
            ConfigError: The name does not exist, several collators fit the task, or an option is
                unknown or missing.
        """
        entry = self.find(task_spec, collator_name)
        known, anything = entry.options
        values = {**({} if task_spec is None else task_spec.options), **options}
        for key in values:
            if not anything:
                require_known(key, known, f"collator {entry.name!r}, option {key!r}", "unknown")
        for key, needed in known.items():
            require(
                not needed or key in values,
                f"collator {entry.name!r}, option {key!r}",
                "is required, but not given",
                f"Give it to get_collator({key}=...), or to TaskSpec(options={{{key!r}: ...}}).",
            )
        if anything or TASK in inspect.signature(entry.factory).parameters:
            values[TASK] = task_spec
        return entry.factory(**values)

    def find(
        self, task_spec: TaskSpec | None = None, collator_name: str | None = None
    ) -> Registered:
        """Returns the entry of the collator that get_collator would make.

        Raises:
            ConfigError: The name does not exist, or several collators fit the task.
        """
        if collator_name is not None:
            require_known(
                collator_name,
                self.names,
                "collator_name",
                f"no collator {collator_name!r}",
                "Register it.",
            )
            return self._known[collator_name]
        if task_spec is None:
            return self._known[DEFAULT]
        if not isinstance(task_spec, TaskSpec):  # usually a name
            raise ConfigError(
                at="task_spec",
                problem=f"{task_spec!r} is not a TaskSpec",
                fix="Give one, or choose by collator_name.",
            )
        of_modality = [e for e in self._known.values() if e.modality == task_spec.modality]
        for fitting in (
            [entry for entry in of_modality if entry.task_type == task_spec.task_type],
            [entry for entry in of_modality if entry.name == task_spec.modality],
            [entry for entry in of_modality if entry.task_type is None],
        ):
            require(
                len(fitting) <= 1,
                f"task {task_spec.name!r}",
                f"several collators fit modality {task_spec.modality!r} and task type "
                f"{task_spec.task_type!r}",
                "Choose one by collator_name.",
                [entry.name for entry in fitting],
            )
            if fitting:
                return fitting[0]
        log.warning(
            "task %r: no collator for modality %r; rows are stacked as they are",
            task_spec.name,
            task_spec.modality,
        )
        return self._known[DEFAULT]


@functools.cache
def _instance() -> CollatorRegistry:
    return CollatorRegistry()


def _masked_lm(
    tokenizer: TokenizerLike = None, max_length: int | None = None, **options: Any
) -> Collate:
    return LanguageModelingDataCollator(tokenizer, True, max_length=max_length, **options)


def _text(
    tokenizer: TokenizerLike = None,
    max_length: int | None = None,
    pad_token_id: int | None = None,
    **options: Any,
) -> Collate:
    return LanguageModelingDataCollator(
        tokenizer, max_length=max_length, pad_token_id=pad_token_id, **options
    )


def _multimodal(
    tokenizer: TokenizerLike = None, max_length: int | None = None, **vision: Any
) -> Collate:
    of_both = {key: vision[key] for key in ("return_tensors", "schema") if key in vision}
    return MultimodalCollator(
        vision=create_vision_collate(**vision), text=_text(tokenizer, max_length, **of_both)
    )


_own = functools.partial(Registered, builtin=True)
_BUILTINS = [
    _own("text", _text, "text", None, "next token: padding, masks, labels shifted once",
         create_causal_lm_collate),
    _own("masked_lm", _masked_lm, "text", "masked_lm",
         "hidden tokens, 80/10/10; whole words on request", create_masked_lm_collate),
    _own("seq2seq", create_seq2seq_collate, "text", "seq2seq", "encoder and decoder inputs"),
    _own("vision", create_vision_collate, "vision", None, "images: decode, resize, normalise"),
    _own("multimodal", _multimodal, "multimodal", None, "an image and tokens in each row",
         create_vision_collate),
    _own(DEFAULT, lambda: default_collate, DEFAULT, None, "arrays stacked as they are"),
]  # fmt: skip


def _called(factory: Factory) -> str:
    return f"{factory.__module__}.{factory.__qualname__}"


__all__ = ["CollatorRegistry", "Registered"]

"""TokenizerConfig: options of a tokenizer, padding widths, and options that a dataset may set."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, Protocol

from easypipe.core.config import ListOf, config
from easypipe.core.errors import ConfigError, require, require_known
from easypipe.core.values import Settings
from easypipe.transforms.tokenizer.special import SpecialPolicy

PaddingSide = Literal["left", "right"]


class Padding(Protocol):
    """The options that say how rows of several lengths become a rectangle."""

    @property
    def padding(self) -> Literal["longest", "max_length"] | bool: ...

    @property
    def padding_side(self) -> PaddingSide: ...

    @property
    def pad_to_multiple_of(self) -> int | None: ...

    @property
    def length_buckets(self) -> int | Sequence[int]: ...


def check_padding(rule: Padding) -> None:
    """Checks that widths are valid and that the options do not contradict each other.

    Raises:
        ConfigError: A width is not valid, or two options contradict each other.
    """
    multiple, buckets = rule.pad_to_multiple_of, rule.length_buckets
    require(
        multiple is None or multiple >= 1,
        "pad_to_multiple_of",
        f"{multiple} is not a number of slots",
        "Give at least 1.",
    )
    require(
        not isinstance(buckets, int) or buckets >= 1,
        "length_buckets",
        f"{buckets} widths hold nothing",
        "Give at least 1, or the widths themselves.",
    )
    widths = [] if isinstance(buckets, int) else list(buckets)
    require(
        all(a < b for a, b in itertools.pairwise((0, *widths))),
        "length_buckets",
        f"{widths} do not ascend",
        "Give widths of at least 1 in ascending order, for example [128, 256, 512].",
    )
    require(
        multiple is None or not buckets,
        "pad_to_multiple_of",
        "length_buckets say every width already",
        "Leave one of them out, and give buckets that are multiples.",
    )
    for name, value in (("pad_to_multiple_of", multiple), ("length_buckets", buckets)):
        require(
            not value or rule.padding in ("longest", True),
            name,
            f"padding={rule.padding!r} leaves it nothing to do",
            "Leave it out, or set padding='longest'.",
        )
    require(
        rule.padding_side != "left" or rule.padding is not False,
        "padding_side",
        "padding=False puts padding nowhere",
        "Leave it out, or set padding='longest'.",
    )


def length_limit(config: TokenizerConfig) -> int | None:
    """Returns the most tokens that a document may have, with special tokens; None: no limit."""
    return config.max_length if config.truncation else None


@config
class TokenizerConfig:
    """A tokenizer, and how it encodes a text.

    Args:
        name_or_path: A tokenizer.json, a folder that holds one, or a Hub name; a name that looks
            like a path is never looked up on the Hub.
        max_length: The most tokens of a document, special tokens included; None keeps all.
        truncation: False keeps documents longer than max_length, which then is only the width for
            padding="max_length".
        padding: How rows that are not packed are padded: to the "longest" of the batch (also True)
            or to "max_length"; False refuses rows of unequal length.
        padding_side: "left" puts the padding before the tokens, in every column, as generation
            needs it.
        pad_to_multiple_of: With "longest", round the width up to a multiple of this, so that there
            are fewer shapes.
        length_buckets: Widths (ascending): every batch gets the first one that holds its longest
            row; a longer row is an error. If a number is given instead, that many widths are chosen
            from the lengths of all documents, with the least padding; the last is that of the
            longest document.
        add_special_tokens: Whether to add what the tokenizer's own post-processor adds.
        special_strings: What happens to strings such as "<|endoftext|>" in raw text: "allow" makes
            them special tokens, counted in the ledger; "escape" makes them ordinary text; "error"
            makes the row a bad row.
        return_attention_mask: Whether batches have an `attention_mask` (1 for a token, 0 for
            padding).
        trust_remote_code: Refused, because easypipe reads tokenizer.json files, which hold no code.
        backend: "auto" uses gigatoken if a check found it equal; "gigatoken" raises an error if it
            cannot be used; "tokenizers" is the reference.
    """

    name_or_path: str
    max_length: int | None = None
    truncation: bool = True
    padding: Literal["longest", "max_length"] | bool = "longest"
    padding_side: PaddingSide = "right"
    pad_to_multiple_of: int | None = None
    length_buckets: int | ListOf[int] = ()
    add_special_tokens: bool = True
    special_strings: SpecialPolicy = "allow"
    return_attention_mask: bool = False
    trust_remote_code: bool = False
    backend: Literal["auto", "gigatoken", "tokenizers"] = "auto"

    def check(self) -> None:
        require(
            self.name_or_path,
            "name_or_path",
            "names no tokenizer",
            "Give a tokenizer.json, its folder, or a Hub name.",
        )
        require(
            self.max_length is None or self.max_length >= 1,
            "max_length",
            f"{self.max_length} is not a length",
            "Give at least 1, or null for no limit.",
        )
        require(
            self.padding != "max_length" or self.max_length is not None,
            "padding",
            "'max_length' needs a max_length",
            "Set max_length, or padding='longest'.",
        )
        check_padding(self)
        require(
            not self.trust_remote_code,
            "trust_remote_code",
            "easypipe never runs code that comes with a tokenizer",
            "Leave it out; convert such a tokenizer to a tokenizer.json with transformers.",
        )


# These options of a tokenizer may be set by a dataset, by our names or those of transformers.


USE_FAST = "use_fast"  # the option of transformers


def with_options(tokenizer: TokenizerConfig | str, options: Settings | None) -> TokenizerConfig:
    """Returns the config of `tokenizer` with `options` in place of its own.

    use_fast=False encodes with the reference, as backend="tokenizers" does; True changes nothing,
    as there is no slow tokenizer here.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or `name_or_path` is given, which would
            name another tokenizer.
    """
    config = TokenizerConfig(name_or_path=tokenizer) if isinstance(tokenizer, str) else tokenizer
    if not options:
        return config
    known = [
        field.name for field in dataclasses.fields(TokenizerConfig) if field.name != "name_or_path"
    ]
    values = dict(options)
    require(
        "name_or_path" not in values,
        "name_or_path",
        "names another tokenizer",
        "Set the dataset's tokenizer.",
    )
    for key in values:
        require_known(key, [*known, USE_FAST], key, "unknown key")
    if USE_FAST in values:
        fast = values.pop(USE_FAST)
        require(
            isinstance(fast, bool),
            USE_FAST,
            f"expected true or false, got {fast!r}",
        )
        if not fast and values.get("backend", "tokenizers") != "tokenizers":
            problem = f"False means backend='tokenizers', and backend is {values['backend']!r}"
            raise ConfigError(at=USE_FAST, problem=problem, fix="Leave one of them out.")
        if not fast:
            values["backend"] = "tokenizers"
    return dataclasses.replace(config, **values)

"""What decides the batches of a collator is in its recipe, by which a loader's state knows it: every
option of every collator is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from easypipe.compat.collators import (
    create_causal_lm_collate,
    create_collate_fn,
    create_seq2seq_collate,
)
from easypipe.compat.masking import create_masked_lm_collate
from easypipe.compat.registry import LanguageModelingDataCollator
from easypipe.compat.vision import MultimodalCollator, create_vision_collate
from easypipe.core.schema import OutputSchema
from easypipe.loader.rows.items import describe_collator
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import tokenizer


def stack(rows: Any) -> dict[str, np.ndarray]:
    return {"rows": np.array(rows)}


def other_stack(rows: Any) -> dict[str, np.ndarray]:
    return {"rows": np.array(rows)}


PADDING: dict[str, Any] = {
    "pad_token_id": 1,
    "label_pad_token_id": -1,
    "padding_side": "left",
    "max_length": 9,
    "return_tensors": "jax",
    "schema": OutputSchema(dtypes={"input_ids": "int64"}),
}
IMAGES: dict[str, Any] = {
    "normalize": False,
    "preset": "cifar10",
    "image_size": (8, 9),
    "channels": 1,
    "channels_last": False,
    "return_tensors": "jax",
    "schema": OutputSchema(dtypes={"pixel_values": "float16"}),
}
MASKED: dict[str, Any] = {"mask_token_id": 4, "vocab_size": 9, "special_token_ids": [1, 2]}
OWN: dict[str, Any] = {"mean": (0.1,) * 3, "std": (0.1,) * 3}
BOTH: dict[str, Any] = {"vision": create_vision_collate(), "text": create_collate_fn()}
# how it is made, from what, and what is changed of that
COLLATORS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "padding": (create_collate_fn, {}, PADDING),
    "causal": (create_causal_lm_collate, {}, PADDING),
    "seq2seq": (
        create_seq2seq_collate,
        {"decoder_start_token_id": 3},
        PADDING | {"decoder_start_token_id": 4, "max_target_length": 5},
    ),
    "masked": (
        create_masked_lm_collate,
        MASKED,
        PADDING
        | {"mask_token_id": 5, "vocab_size": 10, "special_token_ids": [1, 3], "probability": 0.3}
        | {"whole_word": True, "seed": 1, "tokenizer": tokenizer()},
    ),
    "images": (create_vision_collate, {}, IMAGES),
    "images with numbers of one's own": (
        create_vision_collate,
        OWN,
        {"mean": (0.1, 0.1, 0.2), "std": (0.1, 0.1, 0.2)},
    ),
    "both": (
        MultimodalCollator,
        BOTH,
        {"vision": create_vision_collate(channels=1), "text": create_collate_fn(1)},
    ),
    "own text": (MultimodalCollator, BOTH | {"text": stack}, {"text": other_stack}),
    "encoding": (
        LanguageModelingDataCollator,
        {"tokenizer": tokenizer()},
        {"tokenizer": tokenizer(330), "max_length": 9, "pad_token_id": 1},
    ),
    "encoding as long as its tokenizer says": (
        LanguageModelingDataCollator,
        {"tokenizer": load_tokenizer(TokenizerConfig(name_or_path=tokenizer(), max_length=8))},
        {"tokenizer": load_tokenizer(TokenizerConfig(name_or_path=tokenizer(), max_length=9))},
    ),
    "encoding and masking": (
        LanguageModelingDataCollator,
        MASKED | {"mlm": True},
        {"mlm_probability": 0.3, "max_length": 9, "pad_token_id": 1},
    ),
}


@pytest.mark.parametrize("name", COLLATORS)
def test_every_option_is_in_the_recipe_of_a_collator(name: str) -> None:
    make, base, changes = COLLATORS[name]
    recipes = [describe_collator(make(**base))]
    recipes += [describe_collator(make(**{**base, option: v})) for option, v in changes.items()]
    assert len(set(recipes)) == len(recipes), recipes
    assert describe_collator(make(**base)) == recipes[0]


@pytest.mark.parametrize(
    "make", dict.fromkeys(make for make, *_ in COLLATORS.values()), ids=lambda m: m.__name__
)
def test_every_option_of_a_collator_is_tried(make: Callable[..., Any]) -> None:
    tried = {option for one, _, more in COLLATORS.values() if one is make for option in more}
    if make is LanguageModelingDataCollator:
        tried |= {"mlm", "options"}  # a collator of another name; options of that
    if make is create_seq2seq_collate:
        tried |= {"tokenizer"}  # supplies the tokens that are not given
    assert set(inspect.signature(make).parameters) <= tried

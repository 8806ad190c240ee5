"""Characters to tokens: what a target is at the borders, specials that are never doubled, masks
that are cut with their tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from chat_support import SHARED, chat_tokenizer, needs_shared
from easypipe.core.errors import TokenizerError
from easypipe.transforms.tokenizer import proof
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.masked import (
    MASKED_END,
    NO_END,
    TRAINED_END,
    encode_masked,
    has_target,
    token_mask,
)
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer
from strategies import examples
from token_support import small_tokenizer, small_tokenizer_folder


def one(
    tokenizer: Tokenizer, text: str, spans: list[list[int]], end: int = NO_END, *, raw: bool = False
) -> tuple[list[int], list[int]]:
    found = encode_masked(tokenizer, pa.array([text], pa.large_string()), [spans], [end], raw=raw)
    assert len(found.ids) == len(found.mask) == found.offsets[-1]
    return found.ids.tolist(), found.mask.tolist()


def test_a_token_that_reaches_into_a_range_is_a_target() -> None:
    # the third stands for no character of its own
    starts, stops = np.array([0, 2, 4, 4, 6]), np.array([2, 4, 4, 6, 8])
    assert token_mask(starts, stops, [[2, 6]]).tolist() == [0, 1, 1, 1, 0]
    assert token_mask(starts, stops, [[3, 5]]).tolist() == [0, 1, 1, 1, 0]
    assert token_mask(starts, stops, [[4, 6]]).tolist() == [0, 0, 0, 1, 0]
    assert token_mask(starts, stops, [[0, 1], [7, 8]]).tolist() == [1, 0, 0, 0, 1]
    assert token_mask(starts, stops, []).tolist() == [0] * 5


def test_a_first_token_alone_is_nothing_to_train() -> None:
    assert has_target(np.array([1, 0, 0, 1], np.uint8), np.array([0, 2, 2, 4, 4])).tolist() == [
        False,
        False,
        True,
        False,
    ]


@examples(60)
@given(st.lists(strategies.texts(min_size=1), min_size=1, max_size=4), st.integers(0, 3))
def test_every_trained_character_is_in_a_target_and_no_other_token_is_one(
    pieces: list[str], which: int
) -> None:
    tokenizer = small_tokenizer(backend="gigatoken")  # whatever the size
    text = "".join(pieces)
    begin = sum(map(len, pieces[: which % len(pieces)]))
    end = begin + len(pieces[which % len(pieces)])
    ids, mask = one(tokenizer, text, [[begin, end]])
    assert ids == tokenizer.reference_encode(text)
    ((_, starts, stops),) = tokenizer.encode_with_characters([text])
    for flag, start, stop in zip(mask, starts.tolist(), stops.tolist(), strict=True):
        if start < stop:
            assert flag == (start < end and stop > begin)


def test_the_eos_token_follows_where_it_is_asked_for_and_is_never_doubled() -> None:
    tokenizer = load_tokenizer(chat_tokenizer())
    eos = tokenizer.eos_token_id
    plain = tokenizer.reference_encode("the quick")
    assert one(tokenizer, "the quick", [[0, 9]]) == (plain, [1] * len(plain))
    assert one(tokenizer, "the quick", [[0, 3]], TRAINED_END)[0] == [*plain, eos]
    assert one(tokenizer, "the quick", [[0, 3]], TRAINED_END)[1][-1] == 1
    assert one(tokenizer, "the quick", [[0, 9]], MASKED_END)[1][-1] == 0
    assert one(tokenizer, "the quick<|im_end|>", [[0, 9]], TRAINED_END)[0] == [*plain, eos]
    for end, last in ((NO_END, 1), (MASKED_END, 0), (TRAINED_END, 1)):  # the text's own
        found = one(tokenizer, "the quick<|im_end|>", [[0, 19]], end, raw=True)
        assert found == ([*plain, eos], [*[1] * len(plain), last])


@needs_shared
@pytest.mark.shared
def test_the_bos_token_is_never_doubled() -> None:
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / "mistral_v1"))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for text in ("Hello", "<s>Hello", "<s> Hello"):
        ids, mask = one(tokenizer, text, [[0, len(text)]], TRAINED_END, raw=True)
        assert ids[0] == bos
        assert ids.count(bos) == 1
        assert ids[-1] == eos
        assert len(mask) == len(ids)
    # what a chat template writes has those that it prints
    for text, count in (("<s>Hello</s>", 1), ("Hello", 0)):
        assert one(tokenizer, text, [[0, len(text)]])[0].count(bos) == count
    whole = one(tokenizer, "Hello", [[0, 5]], TRAINED_END, raw=True)[0]
    assert whole[:-1] == tokenizer.reference_encode("Hello")


def test_masks_are_cut_with_their_tokens_and_a_text_that_was_cut_has_no_eos() -> None:
    text = "the quick brown fox the quick brown fox"
    full = load_tokenizer(chat_tokenizer())
    ids, mask = one(full, text, [[0, 3], [20, 39]])
    for length in range(1, len(ids) + 3):
        tokenizer = load_tokenizer(
            TokenizerConfig(name_or_path=chat_tokenizer(), max_length=length)
        )
        found = encode_masked(
            tokenizer,
            pa.array([text], pa.large_string()),
            [[[0, 3], [20, 39]]],
            [TRAINED_END],
            raw=False,
        )
        kept = min(length, len(ids))
        assert found.ids[:kept].tolist() == ids[:kept]
        assert found.mask[:kept].tolist() == mask[:kept]
        assert found.truncated.tolist() == [len(ids) - kept]
        assert found.added.tolist() == [int(length > len(ids))]
        assert len(found.ids) == kept + found.added[0]


def test_a_tokenizer_without_eos_cannot_end_what_is_trained() -> None:
    tokenizer = load_tokenizer(chat_tokenizer())
    tokenizer.eos_token_id = None
    with pytest.raises(TokenizerError, match="names no EOS token"):
        one(tokenizer, "the", [[0, 3]], TRAINED_END)
    assert one(tokenizer, "the", [[0, 3]])[1]


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2", "olmo_neox", "mistral_v1", "torchtitan_tiny"])
def test_bytes_of_tokens_say_what_characters_say(name: str) -> None:
    """On text that has broken tokenizers before, with spans everywhere, the fast masks are those of
    `tokenizers`.
    """
    tokenizer = load_tokenizer(str(SHARED / "tokenizers" / name))
    texts = proof.torture(tokenizer.special_tokens)
    plain = texts.to_pylist()
    for step in (1, 2, 7, 19):
        spans = [
            [[a, min(len(text), a + 1 + a % 3)] for a in range(step // 2, len(text), step + 3)]
            for text in plain
        ]
        fast = encode_masked(tokenizer, texts, spans, [NO_END] * len(texts), raw=False)
        slow = encode_masked(
            tokenizer, texts, spans, [NO_END] * len(texts), raw=False, reference=True
        )
        assert np.array_equal(fast.ids, slow.ids)
        assert np.array_equal(fast.mask, slow.mask)
    if name in ("gpt2", "olmo_neox"):
        found = tokenizer.encode_fast(texts)
        assert found is not None
        offsets, ids, pieces = found
        # the others hold what a normalizer changes
        assert pieces.ranges(texts, offsets, ids).known.mean() > 0.8


TRIMS = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
KEEPS = TRIMS | {"trim_offsets": False}


@pytest.mark.parametrize(
    ("post_processor", "trims"),
    [
        (None, False),
        (KEEPS, False),
        (TRIMS, True),
        ({"type": "Sequence", "processors": [KEEPS]}, False),
        ({"type": "Sequence", "processors": [KEEPS, TRIMS]}, True),
    ],
)
def test_the_post_processor_says_whether_a_token_has_its_spaces(
    tmp_path: Path, post_processor: object, trims: bool
) -> None:
    shutil.copytree(small_tokenizer_folder(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text()) | {"post_processor": post_processor}
    *_, last = values["added_tokens"]
    values["added_tokens"].append(last | {"id": 500, "content": "<|more|>"})  # not in the model's
    path.write_text(json.dumps(values))
    tokenizer = load_tokenizer(TokenizerConfig(name_or_path=str(tmp_path), backend="gigatoken"))
    text = "def small of  the<|more|>"
    texts, spans = (
        pa.array([text] * len(text), pa.large_string()),
        [[[i, i + 1]] for i in range(len(text))],
    )
    fast, slow = (
        encode_masked(tokenizer, texts, spans, [NO_END] * len(texts), raw=False, reference=r)
        for r in (False, True)
    )
    assert fast.ids.tolist() == slow.ids.tolist()
    assert fast.mask.tolist() == slow.mask.tolist()
    space = slice(*fast.offsets[3:5])
    assert fast.mask[space].any() != trims


@examples(40)
@given(
    st.lists(strategies.texts(min_size=1), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_fast_masks_are_those_of_the_reference(texts: list[str], start: int, length: int) -> None:
    tokenizer = small_tokenizer(backend="gigatoken")  # whatever the size
    column = pa.array(["", *texts], pa.large_string()).slice(1)
    spans = [[[min(start, len(text) - 1), min(len(text), start + length)]] for text in texts]
    fast, slow = (
        encode_masked(tokenizer, column, spans, [NO_END] * len(texts), raw=False, reference=r)
        for r in (False, True)
    )
    assert fast.ids.tolist() == slow.ids.tolist()
    assert fast.mask.tolist() == slow.mask.tolist()

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.core.errors import ConfigError
from easypipe.train import load_pretrained
from easypipe.train.model.attention import KVCache
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.generate import (
    PIECE,
    STEPS,
    Sampling,
    _choice,
    _Rows,
    _write,
    cache_bytes,
    generate,
)
from train.hf_support import CONFIGS, tensors, write_model

VOCAB = 31
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
)
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]
logits_of = nnx.jit(lambda model, ids: model(ids))


@functools.cache
def model() -> Decoder:
    return Decoder(CONFIG, nnx.Rngs(1))


@functools.cache
def logits_after_7() -> np.ndarray:
    """Float32[V]: what tests of sampling draw from."""
    return np.asarray(logits_of(model(), np.array([[7]], np.int32))[0, -1])


def test_greedy_is_the_likeliest_token_of_the_growing_row():
    for prompt, new in zip(
        PROMPTS, generate(model(), PROMPTS, max_new_tokens=6, temperature=0), strict=True
    ):
        row = np.full((1, 11), 30, np.int32)  # what stands after a token must not matter
        row[0, : len(prompt)] = prompt
        for place, token in enumerate(new, len(prompt)):
            assert token == int(logits_of(model(), row)[0, place - 1].argmax())
            row[0, place] = token
        assert len(new) == 6


@pytest.mark.parametrize(
    ("family", "longest"),
    [("mistral", PIECE + 2), ("gemma2", PIECE + 40), ("gemma3", PIECE + 40)],
)
def test_the_cache_changes_no_token(family: str, longest: int, tmp_path: Path) -> None:
    """Families with a window in all layers, in some, with a cap, with two rotations. Over several
    pieces of a prompt, beyond the window, rows of unequal lengths: each new token is the likeliest
    one that the model sees without a cache.
    """
    config = CONFIGS[family]
    loaded = load_pretrained(write_model(tmp_path, config, tensors(config)))
    prompts = [np.arange(n) * 7 % 60 + 1 for n in (longest, 1, 90)]
    rows = generate(loaded, prompts, max_new_tokens=2 * STEPS, temperature=0)
    lengths = [len(prompt) for prompt in prompts]
    whole = np.zeros((len(rows), max(lengths) + 2 * STEPS), np.int32)
    for row, prompt, new in zip(whole, prompts, rows, strict=True):
        row[: len(prompt) + len(new)] = [*prompt, *new]
    likeliest = np.asarray(logits_of(loaded, whole).argmax(axis=-1))
    for seen, length, new in zip(likeliest, lengths, rows, strict=True):
        assert new == seen[length - 1 : length - 1 + 2 * STEPS].tolist()


def test_the_cache_has_the_bytes_that_are_said() -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    assert cache_bytes(config, 3, 2 * PIECE + 1) == 2 * 2 * 3 * (3 * PIECE) * 1 * 8 * 2
    cache = KVCache.empty(CONFIG, 3, 3 * PIECE)
    assert cache_bytes(CONFIG, 3, 3 * PIECE) == cache.keys.nbytes + cache.values.nbytes


def test_writing_holds_the_cache_once_and_one_layer_of_it_again() -> None:
    config, count, length = dataclasses.replace(CONFIG, num_layers=8), 4, 8 * PIECE
    graph, state = nnx.split(Decoder(config, nnx.Rngs(1)))
    none = np.zeros(count, np.int32)
    rows = _Rows(KVCache.empty(config, count, length), none, none, none > 0, None)  # type: ignore[arg-type]
    drawn = Sampling(0.0, None, None, None, 1.0).drawn(0, [1])
    steps = (np.int32(0), np.int32(STEPS))
    program = _write.lower(graph, state, rows, drawn, steps, None).compile()
    memory, said = program.memory_analysis(), cache_bytes(config, count, length)
    assert memory.alias_size_in_bytes >= said  # the old cache is the new one
    assert memory.temp_size_in_bytes < 1.5 * said / config.num_layers


def test_padding_on_the_left_is_left_out() -> None:
    padded = np.zeros((len(PROMPTS), 6), np.int32)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[6 - len(prompt) :] = prompt
    mask = padded != 0
    assert generate(model(), padded, attention_mask=mask, max_new_tokens=5, seed=3) == generate(
        model(), PROMPTS, max_new_tokens=5, seed=3
    )


class Numbers:
    """Token 12 is the text "12."."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{number}." for number in ids)


def test_a_row_ends_with_the_token_that_completes_a_stop_string() -> None:
    length = STEPS + 8
    whole = generate(model(), PROMPTS, max_new_tokens=length, seed=5)
    first = whole[0]
    for begin, end in ((STEPS + 2, STEPS + 4), (0, 1), (STEPS - 2, STEPS + 1)):
        text = Numbers().decode(first[begin:end])
        found = generate(
            model(),
            PROMPTS,
            max_new_tokens=length,
            seed=5,
            stop=["never", text],
            tokenizer=Numbers(),
        )
        for row, short in zip(whole, found, strict=True):
            said = Numbers().decode(row)
            expected = said[: said.index(text) + len(text)] if text in said else said
            assert Numbers().decode(short) == expected
        assert len(found[0]) <= end < length


def test_a_repetition_penalty_weighs_what_the_row_holds() -> None:
    prompts = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (8, 12))
    logits = np.asarray(logits_of(model(), prompts.astype(np.int32))[:, -1])
    for penalty in (1.3, 5.0):
        weighed = logits.copy()
        for row, prompt in zip(weighed, prompts, strict=True):
            for token in set(prompt.tolist()):
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        new = generate(
            model(), prompts.tolist(), max_new_tokens=1, temperature=0, repetition_penalty=penalty
        )
        assert new == weighed.argmax(axis=-1)[:, None].tolist()
    assert new != logits.argmax(axis=-1)[:, None].tolist()
    (row,) = generate(
        model(), [[3, 1, 4]], max_new_tokens=20, temperature=0, repetition_penalty=1e9
    )
    assert len(set(row)) == 20, "what the row wrote counts too"
    unlikely, seen = jnp.array([[-1.0, -1.5, -4.0]]), jnp.array([[True, False, False]])
    drawn = Sampling(0, None, None, None, 2.0).drawn(0, ())
    keys = jax.random.split(drawn.key, 1)
    assert _choice(unlikely, keys, seen, drawn, None).tolist() == [1], "no token gains by it"


def test_min_p_keeps_to_a_share_of_the_likeliest_ones_odds() -> None:
    odds = np.asarray(jax.nn.softmax(logits_after_7() / 2.0))
    order = np.argsort(-odds)
    share = float((odds[order][3] + odds[order][4]) / 2 / odds.max())
    drawn = {
        generate(model(), [[7]], max_new_tokens=1, min_p=share, temperature=2.0, seed=seed)[0][0]
        for seed in range(40)
    }
    assert drawn == set(order[:4].tolist())


def test_the_likeliest_one_has_the_whole_of_its_own_odds() -> None:
    greedy = generate(model(), PROMPTS, max_new_tokens=3, temperature=0)
    assert generate(model(), PROMPTS, max_new_tokens=3, min_p=1.0) == greedy


def test_top_1_is_greedy_and_top_k_keeps_to_the_k_likeliest():
    assert generate(model(), PROMPTS, max_new_tokens=5, top_k=1) == generate(
        model(), PROMPTS, max_new_tokens=5, temperature=0
    )
    likeliest = set(np.argsort(-logits_after_7())[:4].tolist())
    drawn = {
        generate(model(), [[7]], max_new_tokens=1, top_k=4, temperature=3.0, seed=seed)[0][0]
        for seed in range(40)
    }
    assert drawn == likeliest


def test_top_p_keeps_to_the_likeliest_that_have_this_share() -> None:
    odds = np.asarray(jax.nn.softmax(logits_after_7() / 2.0))
    order = np.argsort(-odds)
    share = float(odds[order][:3].sum() + odds[order][3] / 2)  # it takes four to have that much
    drawn = {
        generate(model(), [[7]], max_new_tokens=1, top_p=share, temperature=2.0, seed=seed)[0][0]
        for seed in range(40)
    }
    assert drawn == set(order[:4].tolist())
    assert generate(model(), PROMPTS, max_new_tokens=5, top_p=1e-9) == generate(
        model(), PROMPTS, max_new_tokens=5, temperature=0
    )


def test_greedy_tokens_are_those_of_transformers(tmp_path) -> None:
    """What `generate(do_sample=False)` of transformers 5.23 wrote once with this model, prompts of
    unequal lengths, each on its own.
    """
    loaded = load_pretrained(write_model(tmp_path, CONFIGS["llama3"], tensors(CONFIGS["llama3"])))
    prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6]]
    assert generate(loaded, prompts, max_new_tokens=12, temperature=0) == [
        [43, 61, 47, 60, 60, 60, 5, 45, 45, 55, 1, 60],
        [22, 60, 19, 19, 19, 60, 10, 16, 60, 23, 49, 34],
        [16, 39, 56, 60, 60, 60, 60, 60, 60, 60, 60, 60],
    ]


def test_temperature_flattens_the_odds():
    counts = [
        len(
            {
                generate(model(), [[7]], max_new_tokens=1, temperature=t, seed=s)[0][0]
                for s in range(40)
            }
        )
        for t in (0.001, 100.0)
    ]
    assert counts[0] < 3 < 12 < counts[1]


def test_a_row_depends_on_its_seed_and_place_alone():
    rows = generate(model(), PROMPTS, max_new_tokens=8, seed=5)
    assert rows == generate(model(), PROMPTS, max_new_tokens=8, seed=5)
    assert rows != generate(model(), PROMPTS, max_new_tokens=8, seed=6)
    assert (
        rows[0]
        == generate(model(), [PROMPTS[0], [8], [7, 7, 7, 7, 7, 7, 7]], max_new_tokens=8, seed=5)[0]
    )


def test_a_row_ends_before_eos():
    whole = generate(model(), PROMPTS, max_new_tokens=STEPS + 8, seed=5)
    # one row ends before the host looks, and another goes on
    eos = next(one for one in whole[0][:STEPS] if any(one not in row for row in whole))
    for row, short in zip(
        whole,
        generate(model(), PROMPTS, max_new_tokens=STEPS + 8, seed=5, eos_token_id=eos),
        strict=True,
    ):
        assert short == (row[: row.index(eos)] if eos in row else row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "prompts: no prompt"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: no tokens. Start with the tokenizer's EOS"),
        ({"prompts": [1, 2]}, r"prompts\[0\]: 1 is not a list of token ids. Encode the prompt"),
        ({"prompts": ["ab"]}, r"prompts\[0\]: 'ab' is not a list of token ids"),
        ({"prompts": [[1.5]]}, r"prompts\[0\]: \[1\.5\] is not a list of token ids"),
        ({"prompts": [[1, 31]]}, r"prompts\[0\]: token 31 is outside the vocabulary of 31"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is not a length"),
        ({"temperature": -0.1}, "temperature: -0.1 is negative"),
        ({"top_p": 0.0}, "top_p: 0.0 is not a share"),
        ({"top_p": 0.5, "temperature": 0}, "top_p: has no effect with temperature 0"),
        ({"min_p": 1.5}, "min_p: 1.5 is not a share"),
        ({"min_p": 0.5, "temperature": 0}, "min_p: has no effect with temperature 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0 is not a factor"),
        ({"stop": "x"}, "stop: is text, and tokens are known only by their ids"),
        ({"stop": "", "tokenizer": Numbers()}, "stop: is an empty text, which every text holds"),
        ({"stop": ["a", ""], "tokenizer": Numbers()}, "stop: is an empty text"),
        ({"attention_mask": [[1, 1]]}, r"attention_mask: has the shape \(1, 2\)"),
        ({"seed": 2**70}, "seed: 1180591620717411303424 does not fit 64 bits"),
        ({"top_k": 32}, "top_k: 32 of a vocabulary of 31. Give 1 to 31"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        generate(model(), **{"prompts": PROMPTS, "max_new_tokens": 4, **change})

"""A look at what a model has learned: sampling with fixed shapes, one compiled program per shape.

Each new token runs the whole row again, without a cache of keys and values: right for a few lines
at the end of a run, not for serving.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from easypipe.core.errors import ConfigError, require
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.pretrained.files import as_tokens


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """The tokens that `model` adds to each of `prompts` (token ids), at most `max_new_tokens`,
    without the prompt.

    temperature: 0 takes the likeliest token every time; otherwise logits are divided by it. top_k:
    only the k likeliest are drawn from (and any that tie with the last of them). top_p: only the
    likeliest, as many as it takes to have that share of the odds together (Holtzman et al., 2020),
    after temperature and top_k. A row ends before `eos_token_id`, or the first of these; when all
    have, no more is computed. Row r draws from `seed` and r alone, so its text does not depend on
    the other prompts of the call.

    Raises ConfigError for an empty prompt, a token outside the vocabulary, a negative temperature,
    a top_k outside 1..vocabulary, a top_p outside (0, 1], and for either beside temperature 0,
    which draws nothing.
    """
    vocab = model.config.vocabulary
    _check(prompts, vocab, max_new_tokens, temperature, top_k, top_p)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max()) + max_new_tokens), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    ends = as_tokens(eos_token_id)
    graph, state = nnx.split(model)
    drawn = Drawn(jax.random.key(seed), jnp.float32(temperature or 1.0), jnp.array(ends, jnp.int32))
    how = Sampling(
        steps=max_new_tokens,
        greedy=temperature == 0,
        top_k=None if top_k == vocab else top_k,
        top_p=None if top_p == 1.0 else top_p,
    )
    filled = _fill(graph, state, tokens, lengths, drawn, how)
    rows = []
    for row, length in zip(np.asarray(filled), lengths, strict=True):
        new = row[length : length + max_new_tokens].tolist()
        rows.append(new[: next((at for at, token in enumerate(new) if token in ends), len(new))])
    return rows


class Sampling(NamedTuple):
    """What a program is compiled for."""

    steps: int
    greedy: bool
    top_k: int | None
    top_p: float | None


class Drawn(NamedTuple):
    """What a program takes beside the prompts: `ends` are the tokens that end a row."""

    key: Array
    temperature: Array
    ends: Array


@functools.partial(jax.jit, static_argnums=(0, 5))
def _fill(
    graph: nnx.GraphDef,
    state: nnx.State,
    tokens: Array,
    lengths: Array,
    drawn: Drawn,
    how: Sampling,
) -> Array:
    """`tokens`, Int[B, S], with `how.steps` more in each row after its `lengths`; all shapes are
    fixed, so one program serves every step.
    """
    model = nnx.merge(graph, state)
    rows = jnp.arange(tokens.shape[0])
    row_keys = jax.vmap(lambda row: jax.random.fold_in(drawn.key, row))(rows)

    def add_one(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, tokens, ended = carry
        last = lengths + step - 1
        hidden = model.hidden(tokens)  # slots after `last` hold zeros; the causal mask hides them
        logits = model.logits(hidden[rows, last])
        if how.greedy:
            choice = logits.argmax(axis=-1)
        else:
            if how.top_k is not None:
                threshold = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
                logits = jnp.where(logits < threshold, -jnp.inf, logits)
            logits = logits / drawn.temperature
            if how.top_p is not None:
                logits = _nucleus(logits, how.top_p)
            keys = jax.vmap(lambda row_key: jax.random.fold_in(row_key, step))(row_keys)
            choice = jax.vmap(jax.random.categorical)(keys, logits)
        return (
            step + 1,
            tokens.at[rows, last + 1].set(choice.astype(tokens.dtype)),
            ended | jnp.isin(choice, drawn.ends),
        )

    def goes_on(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[0] < how.steps) & ~carry[2].all()

    return jax.lax.while_loop(
        goes_on, add_one, (jnp.int32(0), jnp.asarray(tokens), jnp.zeros(tokens.shape[0], bool))
    )[1]


def _nucleus(logits: Array, top_p: float) -> Array:
    """`logits`, [B, V], without those whose likelier ones have `top_p` of the odds already."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    odds = jax.nn.softmax(ordered, axis=-1)
    kept = jnp.cumsum(odds, axis=-1) - odds < top_p
    least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def _check(
    prompts: Sequence[Sequence[int]],
    vocab: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    require(prompts, "prompts", "no prompt", "Give at least one list of token ids.")
    for index, prompt in enumerate(prompts):
        require(
            len(prompt) > 0,
            f"prompts[{index}]",
            "no tokens",
            "Start with the tokenizer's EOS or BOS token.",
        )
        outside = [token for token in prompt if not 0 <= token < vocab]
        if outside:
            fix = "Encode the prompt with the tokenizer that the model was trained with."
            raise ConfigError(
                at=f"prompts[{index}]",
                problem=f"token {outside[0]} is outside the vocabulary of {vocab}",
                fix=fix,
            )
    require(
        max_new_tokens >= 1,
        "max_new_tokens",
        f"{max_new_tokens} is no length",
        "Give at least 1.",
    )
    require(
        temperature >= 0,
        "temperature",
        f"{temperature} is negative",
        "Give 0 for the likeliest token, 1 for the model's own odds.",
    )
    require(
        top_k is None or 1 <= top_k <= vocab,
        "top_k",
        f"{top_k} of a vocabulary of {vocab}",
        f"Give 1 to {vocab}, or None for all.",
    )
    require(
        top_p is None or 0 < top_p <= 1,
        "top_p",
        f"{top_p} is no share",
        "Give more than 0 and at most 1; 0.9 is usual.",
    )
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        require(
            value is None or temperature != 0,
            name,
            "has no effect with temperature 0",
            "Leave it out, or give a temperature.",
        )

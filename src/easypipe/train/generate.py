"""A look at what a model has learned: sampling with fixed shapes, one compiled program per shape.

Each new token runs the whole row again, without a cache of keys and values: right for a few lines at the end of a run, not for serving.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from easypipe.core.errors import ConfigError
from easypipe.train.model import Decoder


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """The tokens that `model` adds to each of `prompts` (token ids), at most `max_new_tokens`, without the prompt.

    temperature: 0 takes the likeliest token every time; otherwise logits are divided by it. top_k: only the k likeliest are drawn from
    (and any that tie with the last of them). A row ends before `eos_token_id`. Row r draws from `seed` and r alone, so its text does not
    depend on the other prompts of the call.

    Raises ConfigError for an empty prompt, a token outside the vocabulary, a negative temperature, a top_k outside 1..vocabulary.
    """
    vocab = model.config.vocabulary
    _check(prompts, vocab, max_new_tokens, temperature, top_k)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max()) + max_new_tokens), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    graph, state = nnx.split(model)
    filled = _fill(
        graph,
        state,
        tokens,
        lengths,
        jax.random.key(seed),
        jnp.float32(temperature or 1.0),
        steps=max_new_tokens,
        greedy=temperature == 0,
        top_k=None if top_k == vocab else top_k,
    )
    rows = []
    for row, length in zip(np.asarray(filled), lengths, strict=True):
        new = row[length : length + max_new_tokens].tolist()
        rows.append(new[: new.index(eos_token_id)] if eos_token_id in new else new)
    return rows


@functools.partial(jax.jit, static_argnums=0, static_argnames=("steps", "greedy", "top_k"))
def _fill(
    graph: nnx.GraphDef,
    state: nnx.State,
    tokens: Array,
    lengths: Array,
    key: Array,
    temperature: Array,
    *,
    steps: int,
    greedy: bool,
    top_k: int | None,
) -> Array:
    """`tokens`, Int[B, S], with `steps` more in each row after its `lengths`; all shapes are fixed, so one program serves every step."""
    model = nnx.merge(graph, state)
    rows = jnp.arange(tokens.shape[0])
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)

    def add_one(step: Array, tokens: Array) -> Array:
        last = lengths + step - 1
        hidden = model.hidden(tokens)  # slots after `last` hold zeros; the causal mask hides them
        logits = model.logits(hidden[rows, last])
        if greedy:
            choice = logits.argmax(axis=-1)
        else:
            if top_k is not None:
                threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
                logits = jnp.where(logits < threshold, -jnp.inf, logits)
            keys = jax.vmap(lambda row_key: jax.random.fold_in(row_key, step))(row_keys)
            choice = jax.vmap(jax.random.categorical)(keys, logits / temperature)
        return tokens.at[rows, last + 1].set(choice.astype(tokens.dtype))

    return jax.lax.fori_loop(0, steps, add_one, jnp.asarray(tokens))


def _check(prompts: Sequence[Sequence[int]], vocab: int, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if not prompts:
        raise ConfigError(at="prompts", problem="no prompt", fix="Give at least one list of token ids.")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(at=f"prompts[{index}]", problem="no tokens", fix="Start with the tokenizer's EOS or BOS token.")
        outside = [token for token in prompt if not 0 <= token < vocab]
        if outside:
            fix = "Encode the prompt with the tokenizer that the model was trained with."
            raise ConfigError(at=f"prompts[{index}]", problem=f"token {outside[0]} is outside the vocabulary of {vocab}", fix=fix)
    if max_new_tokens < 1:
        raise ConfigError(at="max_new_tokens", problem=f"{max_new_tokens} is no length", fix="Give at least 1.")
    if temperature < 0:
        raise ConfigError(
            at="temperature", problem=f"{temperature} is negative", fix="Give 0 for the likeliest token, 1 for the model's own odds."
        )
    if top_k is not None and not 1 <= top_k <= vocab:
        raise ConfigError(at="top_k", problem=f"{top_k} of a vocabulary of {vocab}", fix=f"Give 1 to {vocab}, or None for all.")

"""Text generation over a cache of keys and values; sampling and its checks, stop strings.

Prompts are read into the cache a piece at a time, then each step reads one token of every row. All
shapes are fixed, so that two programs serve every call of one size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from numpy.typing import ArrayLike, NDArray

from easypipe.core.errors import ConfigError, require
from easypipe.train.model.attention import KVCache
from easypipe.train.model.config import ModelConfig
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.pretrained.files import as_tokens

PIECE = 128  # tokens of prompts that are read at once; the slots of a cache are a multiple of it
STEPS = 32  # tokens that are sampled on the device before the host reads them


class Decodes(Protocol):
    """A tokenizer that can write tokens as text, for stop strings."""

    def decode(self, ids: Sequence[int], /) -> str: ...


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | NDArray[np.integer],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    tokenizer: Decodes | None = None,
    attention_mask: ArrayLike | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Returns the tokens that `model` adds to each of `prompts`, without the prompt.

    Row r is sampled from `seed` and r alone, so its text does not depend on the other prompts of
    the call.

    Args:
        model: The model.
        prompts: Token ids, rows of any lengths.
        max_new_tokens: The most new tokens of a row.
        temperature: 0 always takes the likeliest token; otherwise logits are divided by it.
        top_k: Sample only from the k likeliest tokens (and any that tie with the last of them).
        top_p: Sample only from the likeliest tokens that together reach this probability (Holtzman
            et al., 2020), after temperature and top_k.
        min_p: Sample only tokens with at least this share of the probability of the likeliest
            (Nguyen et al., 2024), after the others.
        repetition_penalty: Logits of tokens that are in the row (including the prompt) are divided
            by it if positive, and multiplied by it otherwise (Keskar et al., 2019); 1 for none.
        eos_token_id: A row ends before this token, or the first of these.
        stop: A row ends with the token that completes one of these texts.
        tokenizer: Writes tokens as text, for `stop`.
        attention_mask: [B, S] for prompts that are padded to one length; tokens where it is 0 are
            left out.
        seed: The seed of the sampling.

    Raises:
        ConfigError: A prompt is empty, a token is outside the vocabulary, or an option is out of
            range or without effect.
    """
    if attention_mask is not None:
        prompts = _unpadded(prompts, np.asarray(attention_mask))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    vocab = model.config.vocabulary
    _check_prompts(prompts, vocab)
    require(
        max_new_tokens >= 1,
        "max_new_tokens",
        f"{max_new_tokens} is not a length",
        "Give at least 1.",
    )
    require(-(2**63) <= seed < 2**63, "seed", f"{seed} does not fit 64 bits", "Give a smaller one.")
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    sampling.check(vocab)
    require(
        not stops or tokenizer is not None,
        "stop",
        "is text, and tokens are known only by their ids",
        "Give the tokenizer beside it.",
    )
    require(all(stops), "stop", "is an empty text, which every text holds", "Leave it out.")
    ends = frozenset(as_tokens(eos_token_id))
    drawn = sampling.drawn(seed, ends)
    rows: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(rows)))
    with _mesh_of(model):
        for new in _written(model, prompts, drawn, max_new_tokens, top_k):
            for r in tuple(going):
                fresh = new[r].tolist()
                rows[r] += itertools.takewhile(lambda token: token not in ends, fresh)
                length = _stopped(rows[r], len(fresh), stops, tokenizer)
                rows[r] = rows[r][:length]
                if length is not None or not ends.isdisjoint(fresh):
                    going.remove(r)
            if not going:
                break
    return rows


def _stopped(
    row: Sequence[int], fresh: int, stops: Sequence[str], tokenizer: Decodes | None
) -> int | None:
    """Returns the length of `row` up to the end of the first stop string, or None without one.

    No stop string may have ended before the last `fresh` tokens.
    """
    if tokenizer is None or not stops:
        return None
    found = [text for text in stops if text in tokenizer.decode(row)]
    lengths = range(max(0, len(row) - fresh) + 1, len(row) + 1)
    return next(
        (n for n in lengths if any(text in tokenizer.decode(row[:n]) for text in found)), None
    )


def cache_bytes(config: ModelConfig, rows: int, tokens: int) -> int:
    """Returns the bytes of the cache for `rows` of this many tokens each.

    The tokens are those of the prompts and the new ones.
    """
    cache = jax.eval_shape(functools.partial(KVCache.empty, config, rows, _slots(tokens)))
    return sum(array.size * array.dtype.itemsize for array in cache)


def _slots(tokens: int) -> int:
    return -(-tokens // PIECE) * PIECE


class Sampling(NamedTuple):
    """How a token is chosen; see `generate` for the options."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float

    def drawn(self, seed: int, ends: Collection[int]) -> Drawn:
        """Returns the options that have an effect, as arrays."""
        values = (
            (self.temperature, 0),
            (self.top_p or 1.0, 1),
            (self.min_p or 0.0, 0),
            (self.repetition_penalty, 1),
        )
        ended_by = jnp.array(sorted(ends), jnp.int32)
        options = (None if value == off else jnp.float32(value) for value, off in values)
        return Drawn(jax.random.key(seed), ended_by, *options)

    def check(self, vocab: int) -> None:
        """Checks the ranges of the options.

        Raises:
            ConfigError: An option is out of range, or has no effect.
        """
        temperature, top_k, top_p, min_p, repetition_penalty = self
        ranges = (
            (
                "temperature",
                0 <= temperature < float("inf"),
                f"{temperature} is {'negative' if temperature < 0 else 'not a number'}",
                "Give 0 for the likeliest token, 1 for the model's own odds.",
            ),
            (
                "top_k",
                top_k is None or 1 <= top_k <= vocab,
                f"{top_k} of a vocabulary of {vocab}",
                f"Give 1 to {vocab}, or None for all.",
            ),
            (
                "top_p",
                top_p is None or 0 < top_p <= 1,
                f"{top_p} is not a share",
                "Give more than 0 and at most 1; 0.9 is usual.",
            ),
            (
                "min_p",
                min_p is None or 0 <= min_p <= 1,
                f"{min_p} is not a share",
                "Give 0 to 1; 0.05 is usual.",
            ),
            (
                "repetition_penalty",
                0 < repetition_penalty < float("inf"),
                f"{repetition_penalty} is not a factor",
                "Give 1 for none, more to avoid what was written; 1.1 is usual.",
            ),
        )
        for name, holds, problem, fix in ranges:
            require(holds, name, problem, fix)
        for name, value in (("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            require(
                value is None or temperature != 0,
                name,
                "has no effect with temperature 0",
                "Leave it out, or give a temperature.",
            )


class Drawn(NamedTuple):
    """The arguments of a compiled program besides the rows.

    An option that is off is None, and no code is compiled for it. `ends` are the tokens that end a
    row.
    """

    key: Array
    ends: Array
    temperature: Array | None  # None: take the likeliest token
    top_p: Array | None
    min_p: Array | None
    repetition_penalty: Array | None


class _Rows(NamedTuple):
    """The state of the rows between two calls: what was read, and the tokens to read next."""

    cache: KVCache
    last: Array  # Int32[B]
    places: Array  # Int32[B]: the place of `last` in its row
    ended: Array  # Bool[B]
    seen: Array | None  # Bool[B, V], for the penalty


def _written(
    model: Decoder,
    prompts: Sequence[Sequence[int]] | NDArray[np.integer],
    drawn: Drawn,
    max_new_tokens: int,
    top_k: int | None,
) -> Iterator[NDArray[np.int32]]:
    """Yields the new tokens of all rows, Int32[B, at most STEPS], until all have ended.

    After its end a row continues with meaningless tokens.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest, count = int(lengths.max()), len(prompts)
    tokens = np.zeros((count, _slots(longest)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    graph, state = nnx.split(model)
    cache = _empty(model.config, count, _slots(longest + max_new_tokens))
    # The first step reads the last token of each prompt.
    for start in range(0, longest - 1, PIECE):
        cache = _read(graph, state, tokens[:, start : start + PIECE], jnp.int32(start), cache)
    seen = None
    if drawn.repetition_penalty is not None:
        seen = np.zeros((count, model.config.vocabulary), bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[np.asarray(prompt)] = True
    last = tokens[np.arange(count), lengths - 1]
    rows = _Rows(cache, last, lengths - 1, np.zeros(count, bool), seen)  # type: ignore[arg-type]
    for begin in range(0, max_new_tokens, STEPS):
        steps = min(STEPS, max_new_tokens - begin)
        new, rows = _write(graph, state, rows, drawn, (jnp.int32(begin), jnp.int32(steps)), top_k)
        yield np.asarray(new)[:, :steps]
        if np.asarray(rows.ended).all():
            return


def _mesh_of(model: Decoder) -> AbstractContextManager[object]:
    """Sets the mesh of the model, so that its cache is divided in the same way as its heads."""
    lies = model.embedding[...].sharding
    mesh = lies.mesh if isinstance(lies, NamedSharding) else None
    return jax.set_mesh(mesh) if isinstance(mesh, Mesh) else nullcontext()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(config: ModelConfig, rows: int, slots: int) -> KVCache:
    return KVCache.empty(config, rows, slots)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _read(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State[Hashable, nnx.Variable[Array]],
    tokens: Array,
    start: Array,
    cache: KVCache,
) -> KVCache:
    """Returns `cache` with a piece of the prompts, Int32[B, T] from place `start` on.

    Slots after a row's prompt are written too; its new tokens overwrite them before they are seen.
    """
    places = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    return nnx.merge(graph, state).extend(tokens, places, cache)[1]


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def _write(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State[Hashable, nnx.Variable[Array]],
    rows: _Rows,
    drawn: Drawn,
    steps: tuple[Array, Array],
    top_k: int | None,
) -> tuple[Array, _Rows]:
    """Samples the next tokens of all rows.

    Args:
        graph: The model without its arrays.
        state: The arrays of the model.
        rows: The state of the rows.
        drawn: The options of sampling.
        steps: How many tokens were sampled before, and how many to sample now.
        top_k: The number of tokens to sample from.

    Returns:
        The new tokens, Int32[B, STEPS], the first `steps[1]` of which count; and the state of the
        rows after them.
    """
    model = nnx.merge(graph, state)
    count = rows.last.shape[0]
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, drawn.key))(jnp.arange(count))

    def add_one(carry: tuple[Array, Array, _Rows]) -> tuple[Array, Array, _Rows]:
        step, new, (cache, last, places, ended, seen) = carry
        hidden, cache = model.extend(last[:, None], places[:, None], cache)
        keys = jax.vmap(lambda key: jax.random.fold_in(key, steps[0] + step))(row_keys)
        choice = _choice(model.logits(hidden[:, 0]), keys, seen, drawn, top_k)
        if seen is not None:
            seen = seen.at[jnp.arange(count), choice].set(True)
        ended |= jnp.isin(choice, drawn.ends)
        after = _Rows(cache, choice, places + 1, ended, seen)
        return step + 1, new.at[:, step].set(choice), after

    def goes_on(carry: tuple[Array, Array, _Rows]) -> Array:
        return (carry[0] < steps[1]) & ~carry[2].ended.all()

    begin = (jnp.int32(0), jnp.zeros((count, STEPS), jnp.int32), rows)
    _, new, rows = jax.lax.while_loop(goes_on, add_one, begin)
    return new, rows


def _choice(
    logits: Array, keys: Array, seen: Array | None, drawn: Drawn, top_k: int | None
) -> Array:
    """Chooses one token for each row of `logits`, Float32[B, V]: Int32[B]."""
    if seen is not None and drawn.repetition_penalty is not None:
        penalty = drawn.repetition_penalty
        weaker = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, weaker, logits)
    if drawn.temperature is None:
        return logits.argmax(axis=-1).astype(jnp.int32)
    if top_k is not None:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    logits = logits / drawn.temperature
    if drawn.top_p is not None:
        logits = _nucleus(logits, drawn.top_p)
    if drawn.min_p is not None:
        least = logits.max(axis=-1, keepdims=True) + jnp.log(drawn.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _nucleus(logits: Array, top_p: Array) -> Array:
    """Masks the logits, [B, V], of tokens outside the nucleus.

    A token is outside if likelier tokens already have a total probability of `top_p`.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    odds = jax.nn.softmax(ordered, axis=-1)
    kept = jnp.cumsum(odds, axis=-1) - odds < top_p
    least = jnp.where(kept, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)


def _unpadded(
    prompts: Sequence[Sequence[int]] | NDArray[np.integer], mask: NDArray[np.generic]
) -> list[list[int]]:
    """Returns the prompts without the tokens that the mask leaves out.

    Raises:
        ConfigError: The mask has another shape than the prompts.
    """
    lengths = sorted({len(prompt) for prompt in prompts})
    require(
        (len(prompts), *lengths) == mask.shape,
        "attention_mask",
        f"has the shape {mask.shape}, and {len(prompts)} prompts have lengths {lengths}",
        "Give prompts that are padded to one length, and a mask of their shape.",
    )
    return [
        np.asarray(row)[kept.astype(bool)].tolist() for row, kept in zip(prompts, mask, strict=True)
    ]


def _check_prompts(prompts: Sequence[Sequence[int]] | NDArray[np.integer], vocab: int) -> None:
    """Checks that there are prompts, that none is empty, and that tokens are in the vocabulary.

    Raises:
        ConfigError: One of these conditions does not hold.
    """
    require(len(prompts) > 0, "prompts", "no prompt", "Give at least one list of token ids.")
    for index, prompt in enumerate(prompts):
        at, tokens = f"prompts[{index}]", np.asarray(prompt)
        fix = "Encode the prompt with the tokenizer that the model was trained with."
        listed = tokens.ndim == 1 and (tokens.size == 0 or tokens.dtype.kind in "iu")
        require(listed, at, f"{prompt!r:.80} is not a list of token ids", fix)
        require(tokens.size > 0, at, "no tokens", "Start with the tokenizer's EOS or BOS token.")
        outside = tokens[(tokens < 0) | (tokens >= vocab)]
        if outside.size:
            problem = f"token {outside[0]} is outside the vocabulary of {vocab}"
            raise ConfigError(at=at, problem=problem, fix=fix)

"""The model as lm-eval calls it: batches, log-likelihoods of texts, generation up to a stop.

The rules of tokens, windows and batches are those of lm-eval's own `hf` model, so that the scores
are the same.

B rows of a batch · S tokens of a row · C of them that are scored · V vocabulary
"""
# ruff: noqa: F722  (shapes in annotations are jaxtyping's, not Python)

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from easypipe.core.errors import ConfigError, did_you_mean, raising, require, require_known
from easypipe.core.values import Arguments, JsonObject
from easypipe.train.callbacks.config import LmEvalConfig
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.generate import generate
from easypipe.train.model.pretrained.save import Seen
from easypipe.transforms.chat.render import ChatTemplate, load_chat_template, turns_of
from easypipe.transforms.chat.sandbox import Json
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

LOGITS = 2**28  # the most logits that exist at one time: a gigabyte
STEP = 64  # row lengths are multiples of it: few lengths, few programs
MAX_NEW_TOKENS = 256  # if a task does not say
UNKNOWN_LENGTH = 2048  # max_length of a model that does not say
# The names that tasks use for the options of `generate`.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


class Request(Protocol):
    """A request of lm-eval: a text and its continuation, a text alone, or a text and options."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class Tasks(Protocol):
    """An index of lm-eval's: the names of tasks, and of everything that can be asked for."""

    all_subtasks: Sequence[str]
    all_tasks: Sequence[str]


class Scored(NamedTuple):
    """The score of a continuation."""

    log_prob: float  # the sum over its tokens, in nats
    is_greedy: bool  # whether each token is the likeliest


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A model and what is needed to evaluate it.

    Attributes:
        model: The model.
        tokenizer: The tokenizer of the model.
        ends: Tokens that end a generated text, besides the tokenizer's EOS.
        chat_template: The chat template; None for the tokenizer's own.
        max_length: The most tokens that the model sees.
        batch_size: The most rows of a batch.
    """

    model: Decoder
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    chat_template: str | None
    max_length: int
    batch_size: int


class HarnessModel:
    """The methods of lm_eval.api.model.LM; `as_lm` makes a subclass of both.

    Raises:
        ConfigError: The tokenizer has neither BOS nor EOS.
    """

    def __init__(self, asked: Asked) -> None:
        tokenizer = asked.tokenizer
        found = [n for n in (tokenizer.bos_token_id, tokenizer.eos_token_id) if n is not None]
        require(
            found,
            "tokenizer",
            "names neither BOS nor EOS, but one of them must come before the scored text",
            "Name one in its tokenizer_config.json.",
        )
        self.asked, self.prefix = asked, found[0]
        self._ends = {*asked.ends, found[-1]}

    @property
    def tokenizer_name(self) -> str:
        return self.asked.tokenizer.name

    def loglikelihood(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[Scored]:
        """Scores each continuation after its text."""
        return self._scored([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(
        self, requests: Sequence[Request], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of each text, in windows if it is longer than one."""
        windows = [list(self._windows(self._encoded(*request.args))) for request in requests]
        scores = iter(self._scored([*itertools.chain(*windows)]))
        return [math.fsum(next(scores).log_prob for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Returns the model's continuation of each text, up to the first stop."""
        alike: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(i)
        texts: dict[int, str] = {}
        for options, indices in alike.items():
            prompts = {i: self._encoded(requests[i].args[0]) for i in indices}
            ordered = sorted(indices, key=lambda i: (-len(prompts[i]), requests[i].args[0]))
            size = self.asked.batch_size
            for some in (ordered[at : at + size] for at in range(0, len(ordered), size)):
                written = self._written([prompts[i] for i in some], json.loads(options))
                texts |= zip(some, written, strict=True)
        return [texts[i] for i in range(len(requests))]

    def apply_chat_template(
        self, chat_history: list[Json], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as text.

        It opens an answer, or ends with the last message.
        """
        rows = [{"messages": chat_history, "tools": None}]
        if add_generation_prompt:
            (found,) = self._template.prompts(rows)
            return _taken(found)
        (seen,) = self._template.render(rows)
        text = _taken(seen if isinstance(seen, Refused) else seen.text)
        last = str(chat_history[-1]["content"])
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template.source if chat_template else None

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        template = load_chat_template(
            self.asked.tokenizer,
            chat_template=self.asked.chat_template,
            train_on="assistant",
            date=None,
        )
        self._ends |= {*turns_of(template, self.asked.tokenizer).stop_token_ids}
        return template

    def _encoded(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that the tokenizer adds.

        They are not added to a text that already begins with them.
        """
        if text.startswith(self.asked.tokenizer.decode([self.prefix])):
            return self._bare(text)
        return self.asked.tokenizer.reference_encode(text, whole=True)

    def _bare(self, text: str) -> list[int]:
        """Returns the tokens of a text without added ones."""
        return next(iter(self.asked.tokenizer.encode_with_characters([text])))[0]

    def _pair(self, text: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a text and of its continuation.

        Spaces at the end of the text belong to the continuation.
        """
        if text == "":
            ids = self._bare(continuation)
            own = ids[0] == self.prefix
            return (ids[:1], ids[1:]) if own else ([self.prefix], ids)
        kept = text.rstrip()
        before = self._encoded(kept)
        return before, self._encoded(text + continuation)[len(before) :]

    def _windows(self, ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yields (context, scored tokens), each token once, with as much context as fits."""
        length = self.asked.max_length
        if ids:
            yield [self.prefix], ids[:length]
        for begin in range(length, len(ids), length):
            end = min(begin + length, len(ids))
            yield ids[end - length - 1 : begin], ids[begin:end]

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Scored]:
        """Scores pairs of (context tokens, scored tokens).

        Pairs that differ only in the last token are read once.

        Raises:
            ConfigError: A continuation is longer than the model sees.
        """
        length = self.asked.max_length
        same: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        for i, (before, scored) in enumerate(pairs):
            require(
                0 < len(scored) <= length,
                "tasks",
                f"a continuation of {len(scored)} tokens, and the model sees {length}",
                "Give a longer max_length, or another task.",
            )
            read = (*before, *scored)[-(length + 1) : -1]
            same[read, len(scored)].append(i)
        found: dict[int, Scored] = {}
        for rows in self._batches(list(same)):
            for row, (inner, hits, last) in zip(rows, self._read(rows), strict=True):
                likeliest = int(last.argmax())
                for i in same[row]:
                    token = pairs[i][1][-1]
                    log_prob = math.fsum([*inner.tolist(), float(last[token])])
                    found[i] = Scored(log_prob, bool(hits.all()) and token == likeliest)
        return [found[i] for i in range(len(pairs))]

    def _batches(
        self, rows: list[tuple[tuple[int, ...], int]]
    ) -> Iterator[list[tuple[tuple[int, ...], int]]]:
        """Yields batches of rows with about as many scored tokens, longest first."""
        rows.sort(key=lambda row: (-_wide(row[1]), -len(row[0]), row[0]))
        vocab = self.asked.model.config.vocabulary
        for wide, alike in itertools.groupby(rows, key=lambda row: _wide(row[1])):
            size = max(1, min(self.asked.batch_size, LOGITS // (vocab * wide)))
            own = list(alike)
            yield from (own[at : at + size] for at in range(0, len(own), size))

    def _read(
        self, rows: Sequence[tuple[tuple[int, ...], int]]
    ) -> Iterator[tuple[Float[np.ndarray, " C"], Bool[np.ndarray, " C"], Float[np.ndarray, " V"]]]:
        """Yields the results of each row.

        Yields:
            The log-probabilities of the scored tokens except the last, whether each was the
            likeliest, and the log-probabilities of all tokens at the last place.
        """
        count = 1 << (len(rows) - 1).bit_length()  # a power of two, for few programs
        width = -(-max(len(ids) for ids, _ in rows) // STEP) * STEP
        tokens, lengths = np.zeros((count, width), np.int32), np.ones(count, np.int32)
        for r, (ids, _) in enumerate(rows):
            tokens[r, : len(ids)], lengths[r] = ids, len(ids)
        wide = max(_wide(scored) for _, scored in rows)
        graph, state = nnx.split(self.asked.model)
        arrays = _log_probs(graph, wide, state, tokens, lengths)
        inner, hits, last = (np.asarray(array) for array in arrays)
        for r, (_, scored) in enumerate(rows):
            yield inner[r, : scored - 1], hits[r, : scored - 1], last[r]

    def _written(self, prompts: list[list[int]], options: JsonObject) -> list[str]:
        """Generates the texts of prompts that have the same options.

        Raises:
            ConfigError: The new tokens leave no space for a prompt.
        """
        until = options.pop("until", [])
        stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
        given = [options.pop(name) for name in _LENGTHS if name in options]
        new = int(given[0]) if given else MAX_NEW_TOKENS
        room = self.asked.max_length - new
        require(
            room >= 1,
            "tasks",
            f"{new} new tokens leave no room in the {room + new} that the model sees",
            "Give a longer max_length, or max_gen_toks to the task.",
        )
        lines = generate(
            self.asked.model,
            [prompt[-room:] for prompt in prompts],
            max_new_tokens=new,
            eos_token_id=sorted(self._ends),
            stop=stops,
            tokenizer=self.asked.tokenizer,
            **_sampling(options),
        )
        texts = [self.asked.tokenizer.decode(line, skip_special_tokens=True) for line in lines]
        for stop in stops:
            texts = [text.split(stop)[0] for text in texts]
        return texts


def _taken(text: str | Refused) -> str:
    """Returns a rendered text.

    Raises:
        ConfigError: The chat template refused the conversation.
    """
    if isinstance(text, Refused):
        raise ConfigError(
            at="chat_template",
            problem=f"refuses a conversation: {text.reason}: {text.detail}",
            fix="Leave chat out, or give a template that takes it.",
        )
    return text


def _sampling(options: JsonObject) -> Arguments:
    """Returns the options of `generate` from those of a task.

    Raises:
        ConfigError: `generate` does not have the option.
    """
    known = sorted({"do_sample", "temperature", *_SAMPLING})
    for name in options:
        require_known(name, known, f"generation_kwargs.{name}", "is not an option of generate")
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") and not temperature:
        temperature = 1.0
    if options.get("do_sample") is False or temperature == 0:
        return {"temperature": 0.0}
    drawn = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    return {"temperature": temperature, **drawn}


def _wide(scored: int) -> int:
    """Returns how many places of a row are read to score this many tokens: a power of 4."""
    return 4 ** math.ceil(math.log(scored, 4)) if scored > 1 else 1


@functools.partial(jax.jit, static_argnums=(0, 1))
def _log_probs(
    graph: nnx.GraphDef[Decoder],
    wide: int,
    state: nnx.State[Hashable, nnx.Variable[Array]],
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B C-1"], Bool[Array, "B C-1"], Float[Array, "B V"]]:
    """Reads the last `wide` places of each row, counted from its end.

    Returns:
        For all but the last place, the log-probability of the next token, and whether it is the
        likeliest; for the last place, the log-probabilities of all next tokens.
    """
    model = nnx.merge(graph, state)
    places = lengths[:, None] - 1 - jnp.arange(wide)
    read = jnp.maximum(places, 0)
    hidden = jnp.take_along_axis(model.hidden(tokens), read[:, :, None], axis=1)
    found = jax.nn.log_softmax(model.logits(hidden), axis=-1)
    behind = jnp.take_along_axis(tokens, read[:, 1:] + 1, axis=1)
    inner = jnp.take_along_axis(found[:, 1:], behind[:, :, None], axis=2)[:, :, 0]
    return inner, found[:, 1:].argmax(axis=-1) == behind, found[:, 0]


def check_needed() -> None:
    """Checks that lm-eval is installed.

    Raises:
        ConfigError: It is not installed.
    """
    fix = "pip install 'easypipe[eval]'"
    with raising(ConfigError, "lm_eval", "needs the package lm-eval", fix, ImportError):
        importlib.import_module("lm_eval")


def as_lm(asked: Asked) -> Any:
    """Returns the model in the form for `lm_eval.simple_evaluate(model=...)`.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    check_needed()
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    kind: Any = type("EasypipeLM", (HarnessModel, LM), {})
    found = kind(asked)
    LM.__init__(found)
    return found


def scores(
    config: LmEvalConfig, model: Decoder, tokenizer: str, seen: Seen
) -> dict[str, JsonObject]:
    """Returns the results of lm-eval for a model, by task.

    Args:
        config: The tasks.
        model: The model that is evaluated.
        tokenizer: The name or path of the model's tokenizer.
        seen: How its conversations were written, what ended them, how long rows were.

    Raises:
        ConfigError: lm-eval is not installed, or has no task of that name.
    """
    asked = Asked(
        model=model,
        tokenizer=load_tokenizer(tokenizer),
        ends=seen.stop_token_ids,
        chat_template=seen.chat_template,
        max_length=config.max_length or _length(model, seen),
        batch_size=config.batch_size,
    )
    lm = as_lm(asked)
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    asked_for, where = {*config.tasks}, config.include_path
    alone = where and asked_for <= {*_tasks(TaskManager, where, with_own=False).all_subtasks}
    manager = _tasks(TaskManager, where, with_own=not alone)
    known = {*manager.all_tasks}
    for i, name in enumerate(config.tasks):
        fix = did_you_mean(name, known) or "Name the folder of its YAML as include_path."
        require(name in known, f"tasks[{i}]", f"lm-eval has no task {name!r}", fix)
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(config.tasks),
        task_manager=manager,
        limit=config.limit,
        num_fewshot=config.num_fewshot,
        apply_chat_template=config.chat,
        log_samples=False,
    )
    return {name: dict(own) for name, own in found["results"].items()}


@functools.lru_cache(maxsize=2)
def _tasks(manager: Callable[..., Tasks], include_path: str | None, *, with_own: bool) -> Tasks:
    """Returns an index of tasks, which is kept: lm-eval's own are 14,000 files, read in a minute.

    Args:
        manager: lm-eval's class of such an index.
        include_path: A folder of tasks.
        with_own: Whether lm-eval's own tasks are in it too.
    """
    return manager(include_path=include_path, include_defaults=with_own)


def _length(model: Decoder, seen: Seen) -> int:
    """Returns how many tokens a model sees: as published, or the longest row of the run."""
    published = json.loads(model.hf_config or "{}").get("max_position_embeddings")
    return max(published or 0, seen.max_length or 0) or UNKNOWN_LENGTH

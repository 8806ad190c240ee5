"""`export --check`: logits and tokens of an export in transformers (and PEFT) against its run."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from easypipe.core.errors import ConfigError, TokenizerError
from easypipe.interop.hf_tokens import NamedTokenizer, applied, first_difference, needed
from easypipe.train.finished import Trained
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.lora import merge_lora
from easypipe.train.model.pretrained.files import as_tokens, model_folder
from easypipe.transforms.chat.render import ChatTemplate, load_chat_template
from easypipe.transforms.chat.sandbox import Json
from easypipe.transforms.refused import Refused
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

# How much logits in float32 may differ if the largest is 1 or less; else it is a fraction of the
# largest.
CLOSE = 1e-4
ROWS, LENGTH = 2, 256  # the rows and tokens per row whose logits are compared
TEXTS = (
    "Hello, world!  Two  spaces,\n\na tab\t and 12345.67",
    " a space before, ünïcödé, 中文, עברית and \N{SLIGHTLY SMILING FACE}",
    "def f(x):\n    return {'a': x[0]}  # <b>tags</b>\r\n",
)
_USER, _MORE = "What is 2 + 2?", "And  doubled?\n"
CONVERSATIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("a question", (("user", _USER),)),
    ("two turns", (("user", _USER), ("assistant", "4."), ("user", _MORE))),
    ("a system message", (("system", "Be brief."), ("user", _USER))),
    ("a finished answer", (("user", _USER), ("assistant", "4."))),
)


def check_needed(*, adapters: bool) -> None:
    """Checks that transformers, torch and, for adapters, PEFT are installed.

    Raises:
        ConfigError: One of them is missing.
    """
    for name in ("torch", "transformers", *(["peft"] if adapters else [])):
        needed(name)


def differences(trained: Trained, folder: Path, *, adapters: bool = False) -> Iterator[str]:
    """Yields a sentence for each difference between `folder`, read with transformers, and the run.

    It compares logits of random tokens (within CLOSE, both in float32), and what
    `token_differences` compares.

    Args:
        trained: The model of the run, with its tokenizer and chat template.
        folder: The folder that `save_pretrained` or `save_adapters` wrote.
        adapters: Whether the folder holds adapters, which PEFT adds to their base model; the
            tokenizer is then that of the base model.

    Raises:
        ConfigError: transformers, torch or PEFT is not installed, or the base model of the adapters
            is unknown.
    """
    check_needed(adapters=adapters)
    base = folder
    if adapters:
        if trained.base is None:
            raise ConfigError(
                at="--check",
                problem="these adapters belong to no published model, which PEFT could open",
                fix="Export without --adapters: the adapters are then merged.",
            )
        base = model_folder(trained.base, None)
    theirs = _opened(base, folder if adapters else None, scores=trained.model.score is not None)
    yield from _logits(in_float32(trained.model, first_merged=not adapters), theirs)
    yield from token_differences(trained, base)


def token_differences(trained: Trained, folder: Path) -> Iterator[str]:
    """Yields differences of the tokens of texts and conversations, and of what ends generation.

    torch is not needed. Nothing is compared if the run has no known tokenizer.
    """
    if trained.tokenizer is None:
        return
    transformers, tokenizer = needed("transformers"), load_tokenizer(trained.tokenizer)
    if not (folder / "tokenizer.json").is_file():
        yield "the folder has no tokenizer, and the run has one"
        return
    named = transformers.AutoTokenizer.from_pretrained(str(folder))
    yield from _texts(tokenizer, named)
    yield from _conversations(tokenizer, trained.seen.chat_template, named)
    own = {*trained.seen.stop_token_ids, *as_tokens(tokenizer.eos_token_id)}
    began_with = json.loads(trained.model.hf_config or "{}").get("eos_token_id")
    generation = transformers.GenerationConfig.from_pretrained(str(folder))
    ends = {*as_tokens(generation.eos_token_id)}
    if not own <= ends <= own | {*as_tokens(began_with)}:
        yield f"generation ends at the tokens {sorted(ends)}, and the run's at {sorted(own)}"


def _opened(base: Path, adapters: Path | None, *, scores: bool) -> Any:
    """Opens the model with transformers, and with PEFT if there are adapters; in float32."""
    torch, transformers = needed("torch"), needed("transformers")
    kind = transformers.AutoModelForSequenceClassification if scores else None
    found = (kind or transformers.AutoModelForCausalLM).from_pretrained(
        str(base), attn_implementation="eager", dtype=torch.float32
    )
    if adapters is not None:
        found = needed("peft").PeftModel.from_pretrained(found, str(adapters))
    return found.eval()


def in_float32(model: Decoder, *, first_merged: bool) -> Decoder:
    """Returns the model with all arrays and products in float32.

    Args:
        model: The model.
        first_merged: Whether its adapters are first rounded to the dtype of the weights that they
            are merged into, as in the files of a whole model.
    """

    def wide(module: Decoder) -> Decoder:
        graph, state = nnx.split(module)
        return nnx.merge(graph, jax.tree.map(lambda array: array.astype(jnp.float32), state))

    merged = wide(merge_lora(model)) if first_merged else merge_lora(wide(model))
    config = dataclasses.replace(
        model.config, dtype="float32", param_dtype="float32", attention=None
    )
    found = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    found.score = merged.score
    nnx.update(found, nnx.state(merged, nnx.Param))
    return found


def _logits(ours: Decoder, theirs: Any) -> Iterator[str]:
    """Yields a sentence if the logits of random tokens differ."""
    torch, vocab = needed("torch"), ours.config.vocabulary
    ids = np.random.default_rng(0).integers(0, vocab, (ROWS, LENGTH))

    def asked(model: Decoder, ids: jax.Array) -> jax.Array:
        if model.score is None:
            return model(ids)
        return model.scores(model.hidden(ids)[:, -1:])[..., None]  # scores of rows: [B, 1, 1]

    own = np.asarray(nnx.jit(asked)(ours, jnp.asarray(ids, jnp.int32)))
    # Rows are passed one by one, because scores of several need a padding token.
    with torch.no_grad():
        rows = [theirs(torch.from_numpy(row[None])).logits.numpy() for row in ids]
    found: NDArray[np.float32] = np.concatenate(rows).reshape(ROWS, -1, rows[0].shape[-1])
    if own.shape != found.shape:
        yield f"logits are of {found.shape[-1]} tokens, and the run's of {own.shape[-1]}"
        return
    away, largest = np.abs(own - found), max(1.0, float(np.abs(own).max()))
    if not away.max() <= CLOSE * largest:  # nan is not close
        row, place, token = np.unravel_index(away.argmax(), away.shape)
        yield (
            f"logits differ by up to {away.max():.2g}, where the largest is {largest:.3g} "
            f"(token {token} behind {place + 1} tokens: {found[row, place, token]:.6g}, "
            f"and the run's {own[row, place, token]:.6g})"
        )


def texts_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns texts whose tokens are compared; the last one has all special tokens."""
    return *TEXTS, " and ".join(tokenizer.special_tokens)


def _texts(tokenizer: Tokenizer, named: NamedTokenizer) -> Iterator[str]:
    special_too = tokenizer.config.add_special_tokens
    for text in texts_of(tokenizer):
        yield from unlike(
            f"the text {text!r:.60}",
            tokenizer.reference_encode(text, whole=True),
            named(text, add_special_tokens=special_too)["input_ids"],
        )


def _conversations(tokenizer: Tokenizer, given: str | None, named: NamedTokenizer) -> Iterator[str]:
    """Yields differences of the tokens of conversations, and of the chat template."""
    template = template_of(tokenizer, given)
    if template is None:
        if named.chat_template is not None:
            yield "the folder has a chat template, and the run's tokenizer none"
        return
    for what, turns in CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in turns]
        asks = turns[-1][0] == "user"
        own = written_text(template, messages, asks)
        found = applied(named, messages, add_generation_prompt=asks)
        if own is None or found is None:
            if own is not found:
                which = "transformers" if found is None else "the run's template"
                yield f"conversation with {what}: {which} refuses it"
            continue
        ids = next(iter(tokenizer.encode_with_characters([own])))[0]
        yield from unlike(f"conversation with {what}", ids, found["input_ids"])


def template_of(tokenizer: Tokenizer, given: str | None) -> ChatTemplate | None:
    """Returns the chat template of a run, else the tokenizer's own; None without one."""
    today = datetime.date.today().isoformat()
    try:
        return load_chat_template(tokenizer, chat_template=given, train_on="assistant", date=today)
    except TokenizerError:
        return None


def written_text(template: ChatTemplate, messages: list[Json], asks: bool) -> str | None:
    """Returns the text of a conversation, with the generation prompt if it `asks` for an answer.

    It is None if the template rejects the conversation.
    """
    rows = [{"messages": messages, "tools": None}]
    if asks:
        (prompt,) = template.prompts(rows)
        return None if isinstance(prompt, Refused) else prompt
    (seen,) = template.render(rows)
    return None if isinstance(seen, Refused) else seen.text


def unlike(what: str, own: Sequence[int], found: Sequence[int]) -> Iterator[str]:
    at = first_difference(own, found)
    if at is not None:
        yield (
            f"{what}: {len(found)} tokens, and the run's {len(own)}; from token {at} on "
            f"{list(found[at : at + 4])}, and the run's {list(own[at : at + 4])}"
        )

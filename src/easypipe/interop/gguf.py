"""`export --gguf --check`: compares a GGUF file, opened with llama.cpp, with its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from easypipe.interop.exported import (
    CONVERSATIONS,
    in_float32,
    template_of,
    texts_of,
    unlike,
    written_text,
)
from easypipe.interop.hf_tokens import first_difference, needed
from easypipe.train.finished import Trained
from easypipe.train.model.decoder import Decoder
from easypipe.train.model.generate import generate
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer

STEPS = 32  # the number of greedy tokens that are compared
LENGTHS = (4, 24, 160)  # tokens of the random prompts


class Opened(Protocol):
    """The part of llama-cpp-python's model that is used."""

    metadata: dict[str, str]

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]: ...

    def generate(self, tokens: Sequence[int], *, temp: float) -> Iterator[int]: ...


def needed_llama_cpp() -> ModuleType:
    """Returns the module of llama-cpp-python.

    Raises:
        ConfigError: It is not installed.
    """
    fix = "pip install llama-cpp-python, which compiles llama.cpp: minutes."
    return needed("llama_cpp", fix=fix)


def gguf_differences(trained: Trained, path: Path) -> Iterator[str]:
    """Yields a sentence for each difference between a file, opened with llama.cpp, and the run.

    It compares the tokens of texts and conversations, the chat template, what ends a text, and
    STEPS greedy tokens after prompts, in float32 as far as the file has it.

    Args:
        trained: The model of the run.
        path: The GGUF file made from it.

    Raises:
        ConfigError: llama-cpp-python is not installed.
    """
    llama_cpp = needed_llama_cpp()
    assert trained.tokenizer is not None  # every GGUF file has one
    tokenizer = load_tokenizer(trained.tokenizer)
    whole = llama_cpp.GGML_TYPE_F32
    opened = llama_cpp.Llama(
        str(path), n_ctx=max(LENGTHS) + STEPS, type_k=whole, type_v=whole, verbose=False
    )
    yield from _tokens(tokenizer, trained, opened)
    vocabulary = llama_cpp.llama_model_get_vocab(opened.model)
    own = dict.fromkeys((*trained.seen.stop_token_ids, tokenizer.eos_token_id))
    for token in own:
        if token is not None and not llama_cpp.llama_vocab_is_eog(vocabulary, token):
            yield f"generation does not end at the token {token}, and the run's does"
    model = in_float32(trained.model, first_merged=True)
    known = opened.metadata
    room = int(known[f"{known['general.architecture']}.context_length"]) - STEPS
    rng = np.random.default_rng(0)
    lengths = {min(length, max(room, LENGTHS[0])) for length in LENGTHS}
    prompts = [rng.integers(0, tokenizer.vocab_size, length).tolist() for length in sorted(lengths)]
    yield from _greedy(model, opened, prompts)


def _tokens(tokenizer: Tokenizer, trained: Trained, opened: Opened) -> Iterator[str]:
    """Yields differences of the tokens of texts and conversations, and of the chat template."""
    for text in texts_of(tokenizer):
        own = tokenizer.reference_encode(text, whole=True)
        found = opened.tokenize(text.encode(), add_bos=True, special=True)
        yield from unlike(f"the text {text!r:.60}", own, found)
    template = template_of(tokenizer, trained.seen.chat_template)
    if opened.metadata.get("tokenizer.chat_template") != (template and template.source):
        yield "the chat template is not the run's"
    if template is None:
        return
    for what, turns in CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in turns]
        text = written_text(template, messages, turns[-1][0] == "user")
        if text is not None:
            own = next(iter(tokenizer.encode_with_characters([text])))[0]
            found = opened.tokenize(text.encode(), add_bos=False, special=True)
            yield from unlike(f"conversation with {what}", own, found)


def _greedy(model: Decoder, opened: Opened, prompts: list[list[int]]) -> Iterator[str]:
    lines = generate(model, prompts, max_new_tokens=STEPS, temperature=0)
    for prompt, own in zip(prompts, lines, strict=True):
        found = [token for token, _ in zip(opened.generate(prompt, temp=0.0), own, strict=False)]
        at = first_difference(own, found)
        if at is not None:
            logits = model(jnp.asarray([[*prompt, *own[:at]]], jnp.int32))[0, -1]
            apart = float(logits[own[at]] - logits[found[at]])
            yield (
                f"greedy tokens behind {len(prompt)} tokens: token {at + 1} of {len(own)} is "
                f"{found[at]}, and the run's {own[at]}, whose logit is {apart:.2g} larger"
            )

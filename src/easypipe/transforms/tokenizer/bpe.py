"""Training a byte-level BPE tokenizer on one's own text, by `tokenizers`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from easypipe.core.errors import TokenizerError, require
from easypipe.core.storage import commit_bytes, commit_json

log = logging.getLogger("easypipe")

END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # one token per byte comes first, so that every text can be encoded


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    path: str | Path,
    *,
    named: Mapping[str, str] | None = None,
) -> Path:
    """Trains a byte-level BPE and writes it into the folder `path`, which it returns.

    The files are `tokenizer.json` and `tokenizer_config.json` (eos and bos "<|endoftext|>").

    special_tokens: further tokens that are never split; "<|endoftext|>" is always the first.
    vocab_size counts them and the 256 bytes; with little text fewer tokens come out. named: what
    tokenizer_config.json calls some of them, such as {"pad_token": "[PAD]"}. The same texts in the
    same order give the same files. Raises ConfigError where vocab_size is too small, TokenizerError
    where there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    specials = list(dict.fromkeys([END_OF_TEXT, *special_tokens]))
    least = BYTES + len(specials)
    require(
        vocab_size >= least,
        "vocab_size",
        f"{vocab_size} tokens do not hold {BYTES} bytes and {len(specials)} special tokens",
        f"Give at least {least}.",
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() == least:
        raise TokenizerError(
            at=str(path),
            problem="no pair of bytes to merge: there is no text to learn from",
            fix="Give more text.",
        )
    if tokenizer.get_vocab_size() < vocab_size:
        log.warning(
            "%s: the text gives %d tokens, and vocab_size is %d",
            path,
            tokenizer.get_vocab_size(),
            vocab_size,
        )
    folder = Path(path)
    definition = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1)
    options = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "add_prefix_space": False}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    commit_json(folder / "tokenizer_config.json", {**kind, **options, **(named or {})})
    commit_bytes(folder / "tokenizer.json", (definition + "\n").encode())
    return folder

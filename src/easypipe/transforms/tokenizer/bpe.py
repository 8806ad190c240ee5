"""Trains a byte-level BPE tokenizer on one's own text, with `tokenizers`."""

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
    """Trains a byte-level BPE into the folder `path`; the same texts in order make the same files.

    Args:
        vocab_size: Counts the 256 bytes and the special tokens too; little text results in fewer
            tokens.
        special_tokens: Never split; "<|endoftext|>", which is eos and bos, comes before them.
        named: What tokenizer_config.json calls some of them, such as {"pad_token": "[PAD]"}.

    Raises:
        ConfigError: vocab_size is too small.
        TokenizerError: There is no text.
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
    size = tokenizer.get_vocab_size()
    if size == least < vocab_size:
        raise TokenizerError(
            at=str(path),
            problem="no pair of bytes to merge: there is no text to learn from",
            fix="Give more text.",
        )
    if size < vocab_size:
        log.warning("%s: the text gives %d tokens, and vocab_size is %d", path, size, vocab_size)
    folder = Path(path)
    definition = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1)
    options = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "add_prefix_space": False}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    commit_json(folder / "tokenizer_config.json", {**kind, **options, **(named or {})})
    commit_bytes(folder / "tokenizer.json", (definition + "\n").encode())
    return folder

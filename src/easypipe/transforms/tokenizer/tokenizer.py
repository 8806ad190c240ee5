"""Tokenizer: texts to ids by gigatoken or `tokenizers`; added tokens of tokenizer_config.json.

In this file:
    reference: The tokenizer of the `tokenizers` package, which decides what is right.
    fast: gigatoken, a faster encoder for the same tokenizer.json.
    content: The tokens of the text itself.
    special: The tokens that the tokenizer's own post-processor puts before and after a text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import re
import threading
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from easypipe.core.config import digest
from easypipe.core.errors import EasypipeError, TokenizerError
from easypipe.core.schema import offsets_of, token_dtype
from easypipe.core.text import bytes_of
from easypipe.core.values import Int32, Int64, Integers, attribute_of
from easypipe.transforms.tokenizer import proof
from easypipe.transforms.tokenizer.config import TokenizerConfig, length_limit
from easypipe.transforms.tokenizer.fast import FastEngine, engine_of
from easypipe.transforms.tokenizer.fast import version as fast_version
from easypipe.transforms.tokenizer.files import (
    SPECIAL_NAMES,
    DeclaredToken,
    TokenizerFiles,
    content_of,
    declared_tokens,
    find_tokenizer,
)
from easypipe.transforms.tokenizer.lost import LostCharacters
from easypipe.transforms.tokenizer.proof import Verdict
from easypipe.transforms.tokenizer.ragged import EncodedTexts, Tokens
from easypipe.transforms.tokenizer.special import SpecialStrings
from easypipe.transforms.tokenizer.token_bytes import TokenBytes, text_bytes, token_bytes

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Reference

logger = logging.getLogger("easypipe")

GOLDEN = "The quick brown fox, 1234 × naïve 日本語 😀\n\tdef f(x): return '  '  # end"
_PROBES = ("a", "Hello world", "1 2", "x\ny")
_EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
MOST_IDS = 1 << 24  # the largest vocabulary: tables over it take 16 bytes or more for each id
_ADDED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
# bytes of UTF-8 that do not begin a character
_WITHIN = [bytes([byte]) for byte in range(0x80, 0xC0)]
_PREFIXED = re.compile(r'"continuing_subword_prefix"\s*:\s*"(?!")')
_ADDED_IDS = re.compile(r'"id"\s*:\s*(\d{8,})')
# Texts of at most this many bytes go to the reference: a call of gigatoken costs 0.4 to 4 ms,
# depending on its vocabulary, and the reference takes 0.4 to 0.7 ms for a thousand bytes.
_FEW_BYTES = 1000
_REFERENCE_BYTES = 2 << 20  # `tokenizers` keeps about 100 bytes per token until a batch is done


class Backend(NamedTuple):
    """The encoder that was chosen, and why."""

    name: Literal["gigatoken", "tokenizers"]
    version: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.why})"


def load_tokenizer(config: TokenizerConfig | str | Path) -> Tokenizer:
    """Finds a tokenizer's files and loads them.

    Raises:
        TokenizerError: The files are not found or cannot be used; the message says what was looked
            for, what was found, and what helps.
    """
    if isinstance(config, str | Path):
        config = TokenizerConfig(name_or_path=str(config))
    elif not isinstance(config, TokenizerConfig):
        fix = "Give a tokenizer.json, its folder, a Hub name, or TokenizerConfig(...)."
        raise TokenizerError(
            at="tokenizer", problem=f"{type(config).__name__} does not name a tokenizer", fix=fix
        )
    files = find_tokenizer(config.name_or_path)
    with _failing(files.origin):
        return Tokenizer(config, files)


def added_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the tokens that are found in a text before it is split, special or not."""
    return tuple(one.content for one in tokenizer._reference.get_added_tokens_decoder().values())


class UnencodableError(TokenizerError):
    """A text that the libraries refuse to encode, or at which they panic."""


@contextlib.contextmanager
def _failing(at: str, texts: Sequence[str] | pa.LargeStringArray | None = None) -> Generator[None]:
    """Turns the libraries' errors into a TokenizerError; a Rust panic is not an Exception.

    With the `texts` that are encoded, it is an UnencodableError, which names the first bad one.
    """
    try:
        yield
    except (EasypipeError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        kind = TokenizerError if texts is None else UnencodableError
        first = str(texts[0])[:60] if texts is not None and len(texts) else ""
        problem = "cannot be used" if texts is None else f"{first!r} cannot be encoded"
        raise kind(
            at=at,
            problem=f"{problem}: {error}",
            fix="Give the tokenizer.json and tokenizer_config.json that transformers wrote.",
        ) from error


class Tokenizer:
    """A loaded tokenizer. Thread-safe.

    Law: `encode_column(texts)` is row-wise, and row i equals `reference_encode(texts[i])`, whatever
    backend runs.
    """

    def __init__(self, config: TokenizerConfig, files: TokenizerFiles) -> None:
        self.config = config
        self.name = config.name_or_path
        self.origin = files.origin
        self._files = files
        self._reference: Reference
        self._reference, self._definition, self.vocab_size = _load_reference(
            files.definition, files.origin, declared_tokens(files.options)
        )
        self._options = files.options
        self.bos_token_id, self.eos_token_id, self.pad_token_id = map(
            self._named, ("bos_token", "eos_token", "pad_token")
        )
        if self.eos_token_id is None:
            self.eos_token_id = self._likely_eos()
        self._prefix, self._suffix = (
            _specials(self._reference, self.name) if config.add_special_tokens else ((), ())
        )
        self.specials_per_text = len(self._prefix) + len(self._suffix)
        limit = length_limit(config)
        # The most content tokens that are kept of a text; None keeps all.
        self.content_limit = None if limit is None else limit - self.specials_per_text
        if self.content_limit is not None and self.content_limit <= 0:
            raise TokenizerError(
                at=self.name,
                problem=f"max_length {limit} is filled by {self.specials_per_text} special tokens",
                fix="Give a larger max_length.",
            )
        self.special = SpecialStrings(
            self._reference, self._definition, config.special_strings, self.name
        )
        self.lost = LostCharacters(self._reference, self.name)
        golden = self._reference.encode(GOLDEN, add_special_tokens=config.add_special_tokens).ids
        self.fingerprint: str = digest(
            "tokenizer",
            _sha256(self._definition),
            [self.bos_token_id, self.eos_token_id, self.pad_token_id, config.add_special_tokens],
            golden,
        )
        self._lock = threading.Lock()
        self._chosen: tuple[Backend, FastEngine | None] | None = None
        self._memo: Path | None = None

    @property
    def backend(self) -> Backend:
        """The encoder and why it was chosen; decided at the first access, or by `prove`."""
        return self._decide()[0]

    def remember_in(self, memo: Path | None) -> None:
        """Sets the cache folder for results of the check of gigatoken; None changes nothing."""
        with self._lock:
            self._memo = memo or self._memo

    def prove(self, sample: pa.Array, *, of: str, memo: Path | None) -> Backend:
        """Chooses gigatoken if it agrees with the reference on hostile text and on `sample`.

        Args:
            sample: Texts of the data that will be encoded.
            of: Where the sample is from, for the message.
            memo: The cache folder in which results of the check are kept.

        Raises:
            TokenizerError: The config asks for backend="gigatoken", but it does not agree.
        """
        self.remember_in(memo)
        _, engine = self._decide()
        if engine is not None:
            column = sample.cast(pa.large_string())
            verdict = self._compared(engine, column, f"texts of {of}")
            if not verdict.equal:
                with self._lock:
                    proof.remember(self._memo, self.fingerprint, verdict)
                    self._chosen = self._without_fast(verdict.why)
        return self._decide()[0]

    def by_reference(self, texts: pa.LargeStringArray) -> bool:
        """Whether `texts` are so few that the reference encodes them sooner than gigatoken.

        No check of gigatoken is needed then.
        """
        ends, _ = bytes_of(texts)
        return self.config.backend == "auto" and int(ends[-1] - ends[0]) <= _FEW_BYTES

    def encodes_fast(self, texts: pa.LargeStringArray) -> bool:
        """Whether there are texts and gigatoken encodes them."""
        return len(texts) > 0 and not self.by_reference(texts) and self._decide()[1] is not None

    def refute(self, why: str) -> None:
        """Records that gigatoken wrote wrong tokens.

        From now on the reference encodes, and nothing that gigatoken wrote is used.
        """
        with self._lock:
            proof.remember(self._memo, self.fingerprint, Verdict(False, why, after_use=True))

    def refuted(self, memo: Path) -> bool:
        """Whether gigatoken was found wrong after it had written tokens into the folder `memo`."""
        verdict = proof.recall(memo, self.fingerprint)
        return verdict is not None and verdict.after_use

    def with_length(self, max_length: int | None) -> Tokenizer:
        """Returns the same tokenizer with another max_length; None sets no limit."""
        return Tokenizer(
            dataclasses.replace(self.config, max_length=max_length, truncation=True), self._files
        )

    def encode_column(self, texts: pa.Array, *, whole: bool = False) -> EncodedTexts:
        """Encodes a string column without nulls; every token of a text is a target.

        Args:
            texts: The column.
            whole: Whether max_length is ignored.

        Raises:
            TokenizerError: The column has nulls.
            UnencodableError: A text cannot be encoded.
        """
        column = texts.cast(pa.large_string())
        if column.null_count:
            raise TokenizerError(
                at=self.name,
                problem=f"{column.null_count} of {len(column)} texts are null",
                fix="Drop them first.",
            )
        engine = None if self.by_reference(column) else self._decide()[1]
        with _failing(self.origin, column):
            offsets, wide = (
                engine.encode(column) if engine is not None else self._encode_reference(column)
            )
        # narrowed at once, because the next steps then read half the bytes
        ids = wide.astype(token_dtype(self.vocab_size), copy=False)
        del wide
        tokens, special = self.special.settle(
            column,
            Tokens(offsets, ids),
            lambda text, _: (self._reference_batch([text], escaped=True)[0].ids, None),
        )
        cut = np.zeros(len(column), np.int64)
        if not whole and self.content_limit is not None:
            cut = np.maximum(tokens.sizes - self.content_limit, 0)
        every = np.ones(len(column), np.bool_)
        tokens = tokens.shortened(cut).framed(self._prefix, self._suffix, every, every)
        before = np.full(len(column), len(self._prefix))
        return EncodedTexts(*tokens, before, before + len(self._suffix), cut, special)

    def reference_encode(self, text: str, *, whole: bool = False) -> list[int]:
        """Encodes one text with `tokenizers` and its own post-processor, whatever backend runs.

        Args:
            whole: Whether max_length is ignored.
        """
        reference = self.special.escaped if self.special.policy == "escape" else self._reference
        with _failing(self.origin, [text]):
            # encode_batch_fast computes no offsets
            ids = reference.encode_batch_fast(
                [text], add_special_tokens=self.config.add_special_tokens
            )[0].ids
            limit = None if whole else self.content_limit
            if limit is not None and len(ids) > limit + self.specials_per_text:
                content = reference.encode(text, add_special_tokens=False).ids[:limit]
                return [*self._prefix, *content, *self._suffix]
            return ids

    def encode_with_characters(
        self, texts: Sequence[str], *, escaped: bool = False
    ) -> Iterator[tuple[list[int], Int64, Int64]]:
        """Encodes texts with `tokenizers`, without special tokens, and locates every token.

        Args:
            escaped: Whether special strings are treated as ordinary text.

        Yields:
            For each text (ids, Int64[tokens] first characters, Int64[tokens] ends of the
            characters); both arrays ascend.
        """
        for encoding in self._reference_batch(list(texts), escaped=escaped, offsets=True):
            edges = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
            yield (
                encoding.ids,
                np.maximum.accumulate(edges[:, 0]),
                np.maximum.accumulate(edges[:, 1]),
            )

    def encode_fast(
        self, column: pa.LargeStringArray
    ) -> tuple[Int64, NDArray[np.uint32], TokenBytes] | None:
        """Encodes a column with gigatoken, without special tokens.

        Returns:
            (Int64[n+1] offsets, UInt32[total] ids, the bytes of the vocabulary's tokens); None if
            gigatoken is not used or the bytes of its tokens are not known.
        """
        engine = None if self.by_reference(column) else self._decide()[1]
        pieces = None if engine is None else token_bytes(self._definition)
        if engine is None or pieces is None:
            return None
        with _failing(self.origin, column):
            return (*engine.encode(column), pieces)

    def text_bytes(self) -> Int32 | None:
        """Returns Int32[vocabulary]: how many bytes of text each token is, 0 if it is special.

        The result is None if tokens are not bytes of the text.
        """
        return text_bytes(self._definition)

    @property
    def surrounding(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(before, after): the special tokens that are put around each text."""
        return self._prefix, self._suffix

    @property
    def special_strings(self) -> dict[str, str]:
        """The named special tokens by their names in chat templates, such as `bos_token`."""
        return {
            kind: token for kind in SPECIAL_NAMES if (token := content_of(self._options.get(kind)))
        }

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token of the vocabulary, in the order of ids."""
        added = self._reference.get_added_tokens_decoder()
        return tuple(added[i].content for i in sorted(added) if added[i].special)

    def token(self, number: int) -> str | None:
        """Returns the token with this id as it is written in the vocabulary, or None."""
        return self._reference.id_to_token(number)

    def definition_with(self, tokens: Sequence[str]) -> str:
        """Returns the text of a tokenizer.json with further tokens, whose ids follow its own.

        Raises TokenizerError for a token that it already has, or if its ids have gaps.
        """
        import tokenizers

        grown = tokenizers.Tokenizer.from_str(self._definition)
        for number, token in enumerate(tokens, self.vocab_size):
            if grown.token_to_id(token) is not None:
                problem = f"has the token {token!r} already"
                raise TokenizerError(at=self.name, problem=problem, fix="Leave it out.")
            grown.add_tokens([tokenizers.AddedToken(token, normalized=False)])
            if grown.token_to_id(token) != number:
                problem = f"gives {token!r} the id {grown.token_to_id(token)}, not {number}"
                raise TokenizerError(at=self.name, problem=problem, fix="Its ids have gaps.")
        return grown.to_str()

    def decode(self, ids: Sequence[int] | Integers, *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids, as `tokenizers` decodes them."""
        return self._reference.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, "
            f"eos_token_id={self.eos_token_id})"
        )

    def _decide(self) -> tuple[Backend, FastEngine | None]:
        with self._lock:
            if self._chosen is None:
                self._chosen = self._choose()
            return self._chosen

    def _choose(self) -> tuple[Backend, FastEngine | None]:
        """Picks the backend by the config, the kept verdict, or a check on hostile text."""
        if self.config.backend == "tokenizers":
            return self._without_fast("asked for by backend='tokenizers'", logging.INFO)
        verdict, engine = proof.recall(self._memo, self.fingerprint), None
        if verdict is None or verdict.equal:
            try:
                engine = engine_of(self._definition)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 (a Rust panic is not an Exception; whatever gigatoken refuses, the reference encodes)
                reason = " ".join(str(error).split())[:200]
                verdict = Verdict(False, f"gigatoken {fast_version()} cannot load it: {reason}")
        if verdict is None and engine is not None:
            added = self._reference.get_added_tokens_decoder()
            hostile = proof.torture([added[i].content for i in sorted(added)])
            verdict = self._compared(engine, hostile, "hostile texts")
            proof.remember(self._memo, self.fingerprint, verdict)
        assert verdict is not None
        if not verdict.equal:
            return self._without_fast(verdict.why)
        backend = Backend("gigatoken", fast_version(), verdict.why)
        logger.info("tokenizer %s: %s", self.name, backend)
        return backend, engine

    def _without_fast(self, why: str, level: int = logging.WARNING) -> tuple[Backend, None]:
        """Returns the reference as the backend; raises if only gigatoken is allowed."""
        import tokenizers

        if self.config.backend == "gigatoken":
            raise TokenizerError(
                at=self.name,
                problem=f"backend='gigatoken' cannot be used: {why}",
                fix="Set backend='auto'.",
            )
        backend = Backend("tokenizers", tokenizers.__version__, why)
        logger.log(level, "tokenizer %s: %s", self.name, backend)
        return backend, None

    def _compared(self, engine: FastEngine, texts: pa.LargeStringArray, kind: str) -> Verdict:
        """Returns whether gigatoken equals the reference on texts that both can encode."""
        try:
            with _failing(self.origin, [kind]):
                return proof.prove(engine, self._plain, texts, kind)
        except UnencodableError as error:
            return Verdict(False, f"gigatoken {fast_version()} cannot be checked: {error.problem}")

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._reference_batch(texts)]

    def _reference_batch(
        self, texts: list[str], *, escaped: bool = False, offsets: bool = False
    ) -> list[Encoding]:
        reference = self.special.escaped if escaped else self._reference
        encode = reference.encode_batch if offsets else reference.encode_batch_fast
        with _failing(self.origin, texts):
            return encode(texts, add_special_tokens=False)

    def _encode_reference(self, column: pa.LargeStringArray) -> tuple[Int64, NDArray[np.uint32]]:
        """Encodes a column with the reference, some MB at a time: (offsets, ids)."""
        starts, _ = bytes_of(column)
        lengths, pieces, row = np.zeros(len(column), np.int64), [], 0
        while row < len(column):
            full = int(np.searchsorted(starts, starts[row] + _REFERENCE_BYTES, side="right")) - 1
            stop = max(row + 1, full)
            some = self._reference_batch(column.slice(row, stop - row).to_pylist())
            # a third faster than NumPy reads lists
            encoded = [np.frombuffer(array("I", one.ids), np.uint32) for one in some]
            lengths[row:stop] = [len(ids) for ids in encoded]
            pieces += encoded
            row = stop
        return offsets_of(lengths), np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)

    def _named(self, kind: str) -> int | None:
        """Returns the id of a named special token; warns if the vocabulary lacks it."""
        token = content_of(self._options.get(kind))
        if not token:
            return None
        found = self._reference.token_to_id(token)
        if found is None:
            logger.warning(
                "tokenizer %s: its %s %r is not in its vocabulary and is not used",
                self.name,
                kind,
                token,
            )
        return found

    def _likely_eos(self) -> int | None:
        """Returns the id of the token that ends documents, if no file names it.

        A tokenizer.json does not say which token that is. If exactly one token has a name that
        always means it, that token is taken, with a warning.
        """
        if self._options.get("eos_token"):
            return None
        found = [name for name in _EOS_NAMES if name in added_tokens(self)]
        if len(found) != 1:
            return None
        logger.warning(
            "tokenizer %s: no tokenizer_config.json names its eos_token; taking %r",
            self.name,
            found[0],
        )
        return self._reference.token_to_id(found[0])


@functools.lru_cache(maxsize=1)
def _sha256(definition: str) -> str:
    return hashlib.sha256(definition.encode()).hexdigest()


# A run loads its tokenizer for every dataset and every held-out set, and nothing changes it.
@functools.lru_cache(maxsize=1)
def _load_reference(
    definition: str, origin: str, declared: tuple[DeclaredToken, ...]
) -> tuple[Reference, str, int]:
    """Loads the reference, with the tokens that are declared next to tokenizer.json.

    Returns:
        (tokenizer, its definition with the declared tokens, its highest id + 1).

    Raises:
        TokenizerError: The definition is not a tokenizer, or cannot be used.
    """
    import tokenizers

    _check_merges(definition, origin)
    try:
        reference = tokenizers.Tokenizer.from_str(definition)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (a plain Exception; a Rust panic is not one)
        try:
            json.loads(definition)
            cause = f"not a tokenizer: {error}"
        except (ValueError, RecursionError) as broken:
            cause = f"not JSON: {broken}"
        raise TokenizerError(
            at=origin,
            problem=cause,
            fix="Give the tokenizer.json that `tokenizers` or transformers wrote.",
        ) from None
    _check_added(reference, definition, origin)
    if _declare(reference, declared, origin):
        definition = reference.to_str()
    # A tokenizer.json may carry both; length and padding are options of easypipe instead.
    reference.no_truncation()
    reference.no_padding()
    if attribute_of(reference.model, "dropout"):
        raise TokenizerError(
            at=origin,
            problem=f"its dropout of {reference.model.dropout} makes tokens random",
            fix="Set model.dropout to null in the file.",
        )
    return reference, definition, _vocab_size(reference, definition, origin)


def _check_merges(definition: str, origin: str) -> None:
    """Raises TokenizerError for a merge whose second piece is cut inside a character.

    `tokenizers` would cut the bytes of the prefix off it, and abort the process.
    """
    if not _PREFIXED.search(definition):
        return
    cut_within: list[str] = []
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        model = json.loads(definition)["model"]
        cut = len(model["continuing_subword_prefix"].encode())
        pairs = (one.split(" ") if isinstance(one, str) else one for one in model["merges"])
        cut_within = [two for _, two in pairs if two.encode()[cut:][:1] in _WITHIN]
    if cut_within:
        raise TokenizerError(
            at=f"{origin}, model.merges",
            problem=f"{cut_within[0]!r} does not begin with the prefix of continuing pieces",
            fix="Correct the merge.",
        )


def _check_added(reference: Reference, definition: str, origin: str) -> None:
    """Raises TokenizerError for an added token of the file that has another token's id."""
    begins = _ADDED.search(definition)
    if begins is None:
        return
    added = json.JSONDecoder().raw_decode(definition, begins.end())[0]
    named: dict[int, str] = {}
    for token in added:
        number, content = token["id"], token["content"]
        other = named.setdefault(number, content)
        if other == content and reference.token_to_id(content) != number:
            other = reference.id_to_token(number) or content
        if other != content:
            raise TokenizerError(
                at=f"{origin}, added_tokens",
                problem=f"{content!r} has the id {number}, and so has {other!r}",
                fix="Give each token an id of its own.",
            )


def _vocab_size(reference: Reference, definition: str, origin: str) -> int:
    """Returns the highest id + 1; warns of ids that several tokens share."""
    vocabulary: dict[str, int] = reference.get_vocab(with_added_tokens=True)
    vocab_size = max(vocabulary.values(), default=-1) + 1
    if twins := [i for i, count in Counter(vocabulary.values()).items() if count > 1]:
        logger.warning(
            "tokenizer %s: token %d stands for each of %s, and so do %d ids in all",
            origin,
            first := min(twins),
            sorted(token for token, i in vocabulary.items() if i == first),
            len(twins),
        )
    # `tokenizers` gives added tokens with such ids other ids; the fast encoder keeps their ids.
    highest = (
        max(map(int, _ADDED_IDS.findall(definition)), default=0)
        if vocab_size <= MOST_IDS
        else vocab_size - 1
    )
    if highest >= MOST_IDS:
        token = next(
            (repr(token) for token, number in vocabulary.items() if number == highest),
            "an added token",
        )
        raise TokenizerError(
            at=origin,
            problem=f"{token} has the id {highest}, and encoders hold a table of all ids up to the "
            "highest",
            fix=f"Correct the id: there are {len(vocabulary)} tokens, and ids below {MOST_IDS} are "
            "read.",
        )
    if vocab_size == 0:
        raise TokenizerError(
            at=origin,
            problem="the vocabulary is empty",
            fix="Train it first: easypipe.transforms.tokenizer.bpe.train_bpe.",
        )
    return vocab_size


def _declare(reference: Reference, declared: Sequence[DeclaredToken], origin: str) -> bool:
    """Adds the declared tokens that tokenizer.json lacks, as transformers does.

    Otherwise their strings would be ordinary text.

    Returns:
        Whether any token was added.
    """
    import tokenizers

    had = {token.content for token in reference.get_added_tokens_decoder().values()}
    missing = [token for token in declared if token.content not in had]
    added = False
    for token in missing:
        own = reference.token_to_id(token.content)
        number = reference.get_vocab_size(with_added_tokens=True) if own is None else own
        if token.number is None and own is None:
            continue  # no vocabulary has this named token; `_named` warns where it is asked for
        if token.number not in (None, number):
            problem = (
                "tokenizer %s: tokenizer_config.json says that %r is token %d, and it would "
                "be %d: it is not used"
            )
            logger.warning(problem, origin, token.content, token.number, number)
            continue
        add = reference.add_special_tokens if token.special else reference.add_tokens
        add([tokenizers.AddedToken(token.content, special=token.special, **dict(token.flags))])
        added = True
    return added


def _specials(reference: Reference, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (before, after): the special tokens that the post-processor puts around texts."""
    found: set[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    for probe in _PROBES:
        content = reference.encode(probe, add_special_tokens=False).ids
        whole = reference.encode(probe, add_special_tokens=True).ids
        extra = len(whole) - len(content)
        fits = {
            (tuple(whole[:p]), tuple(whole[p + len(content) :]))
            for p in range(extra + 1)
            if whole[p : p + len(content)] == content
        }
        found = fits if found is None else found & fits
    if not found:
        raise TokenizerError(
            at=name,
            problem="its post-processor does more than put fixed tokens before and after a text",
            fix="Set add_special_tokens=False, and add what is needed to the text.",
        )
    return max(found, key=lambda around: len(around[0]))

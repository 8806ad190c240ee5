"""Document 001: PreprocessedDataset and StreamingPreprocessedDataset encode rows; subsets."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from easypipe.compat.collators import create_causal_lm_collate, is_number
from easypipe.compat.foreign import pad_of, row_number, tokenizer_config
from easypipe.compat.loaders import require_rows
from easypipe.core.config import digest
from easypipe.core.errors import SourceError, require
from easypipe.core.random import fold
from easypipe.core.schema import INPUT_IDS
from easypipe.core.values import Array, Collate, Dataset, Item, Row, attribute_of
from easypipe.interop.workers import known_to_torch, shares_rows, torch_worker
from easypipe.loader.rows.items import fingerprint_of
from easypipe.loader.rows.ranks import check_rank
from easypipe.plan.order import permute
from easypipe.sources.external.objects import is_arrow_dataset, is_streamed
from easypipe.stages.source.config import DatasetConfig
from easypipe.stages.tokenize.engine import PromptEngine
from easypipe.transforms.chat.conversations import cleaned

log = logging.getLogger("easypipe")

Encoded = dict[str, Array]


class PreprocessedDataset:
    """The rows of a map-style dataset as tokens, kept once they are made.

    `dataset[i]` is the result of `prompt_engine.encode` for row i. A loader over it
    (DataLoaderBuilder) reads the Pipeline's token cache instead, which has the same bytes, and
    leaves out rows with nothing to train on, like the Pipeline. With your own engine (any object
    whose `encode(row)` returns `input_ids`) it reads the rows. It is thread-safe.

    Args:
        hf_dataset: A `datasets.Dataset`, a list of dicts, or any object that returns dicts by
            index.
        cache_enabled: Keep encoded rows in memory; False encodes a row on each request.

    Raises:
        SourceError: A row that is read cannot be encoded; the error names the row.
    """

    def __init__(
        self, hf_dataset: Dataset, prompt_engine: PromptEngine, cache_enabled: bool = True
    ) -> None:
        _require_engine(prompt_engine)
        require(
            not is_streamed(hf_dataset),
            "hf_dataset",
            f"{type(hf_dataset).__name__} does not return rows by number",
            "Use create_preprocessed_dataset(..., streaming=True).",
        )
        require_rows(hf_dataset, at="hf_dataset")
        self._data, self._engine = hf_dataset, prompt_engine
        self._kept: dict[int, Encoded] = {}
        self._keeps = cache_enabled

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Encoded:
        """Returns `input_ids` Int32[n] and `loss_mask` UInt8[n], which is 1 for targets.

        The arrays are the caller's own.
        """
        number = self._number(index)
        made = self._kept.get(number)
        if made is None:
            made = _encode(self._engine, self._data, self._data[number], number)
            if not self._keeps:
                return made
            self._kept[number] = made
        return {name: array.copy() for name, array in made.items()}

    def _number(self, index: int) -> int:
        fix = "For several rows take dataset.select(range(...))."
        number = row_number(index, len(self), "PreprocessedDataset", fix)
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return number

    def __iter__(self) -> Iterator[Encoded]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Iterable[int]) -> PreprocessedDataset:
        """Returns some of the rows, in that order, as a new dataset.

        Rows that were already encoded are kept.
        """
        chosen = [self._number(index) for index in indices]
        made = PreprocessedDataset(subset(self._data, chosen), self._engine, self._keeps)
        kept = self._kept
        made._kept = {new: kept[old] for new, old in enumerate(chosen) if old in kept}
        return made

    @property
    def fingerprint(self) -> str:
        return digest(fingerprint_of(self._data), _recipe(self._engine))

    @property
    def collate_fn(self) -> Collate:
        """The default collator of its rows. Batches are those of a Pipeline's loader."""
        return _collator_of(self._engine)

    def as_dataset_config(self) -> DatasetConfig | None:
        """Returns how a Pipeline reads the same rows; None if the engine is the user's own."""
        engine = self._engine
        if type(engine) is not PromptEngine:
            return None
        return DatasetConfig(
            name="dataset1",
            data_files=self._data,
            prompt=engine.config,
            tokenizer=tokenizer_config(engine.tokenizer, return_attention_mask=True),
        )


class StreamingPreprocessedDataset:
    """The rows of an iterable as tokens, encoded while they are read.

    Every iteration begins at its start. Workers of a torch DataLoader share the rows of a rank, so
    each row appears once over all ranks and workers. A torch IterableDataset, such as a stream of
    `datasets`, divides its rows over workers itself. Ranks that skip rows may have different
    lengths.

    Args:
        buffer_size: The number of rows in a block, which is held in memory and shuffled by the
            seed; 0 keeps the order.
        skip_errors: Leave out rows that cannot be encoded, counted by reason in `skipped`; else the
            first one raises SourceError.
        rank: The number of this process: it reads one of every world_size consecutive rows.
        world_size: The number of processes that share the rows.
    """

    def __init__(
        self,
        hf_iterable: Iterable[Row],
        prompt_engine: PromptEngine,
        buffer_size: int = 0,
        skip_errors: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _require_engine(prompt_engine)
        sized = is_number(buffer_size, int) and buffer_size >= 0
        require(sized, "buffer_size", f"{buffer_size!r} rows", "Give 0 to keep the order.")
        require(is_number(seed, int), "seed", f"{seed!r} is no whole number", "Give 0 or another.")
        check_rank(rank, world_size)
        readable = attribute_of(hf_iterable, "__iter__", "__getitem__") is not None
        require(
            readable and not isinstance(hf_iterable, str | bytes | Mapping),
            "hf_iterable",
            f"{type(hf_iterable).__name__} yields no rows",
            "Give a dataset: one of its splits, where it has several.",
        )
        require(
            iter(hf_iterable) is not hf_iterable,
            "hf_iterable",
            f"{type(hf_iterable).__name__} can be read once, and every iteration begins anew",
            "Give what makes the iterator: a dataset, or a class with __iter__.",
        )
        known_to_torch(StreamingPreprocessedDataset)
        self._data, self._engine = hf_iterable, prompt_engine
        self.buffer_size, self.skip_errors, self.seed = buffer_size, skip_errors, seed
        self.rank, self.world_size, self.epoch = rank, world_size, 0
        self.skipped: Counter[str] = Counter()  # rows left out of the newest iteration, by reason

    def __iter__(self) -> Iterator[Encoded]:
        worker, workers = torch_worker()
        skipped = self.skipped = Counter[str]()
        first, step = self.rank, self.world_size
        if not shares_rows(self._data):
            first, step = first + step * worker, step * workers
        mine = itertools.islice(enumerate(self._data), first, None, step)
        turn = ("epoch", self.epoch) if self.epoch else ()
        for number, row in _shuffled(
            mine, self.buffer_size, fold(self.seed, "stream", "shuffle", self.rank, worker, *turn)
        ):
            try:
                made = _encode(self._engine, self._data, row, number)
            except SourceError as error:
                if not self.skip_errors:
                    raise
                skipped[error.problem.partition(":")[0]] += 1
                log.debug("%s", error)
                continue
            yield made
        if skipped:
            log.warning(
                "stream: %d rows were left out: %s", skipped.total(), dict(skipped.most_common(5))
            )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iterations those of pass `epoch`; every pass has a different order.

        Loaders call it; with a torch DataLoader, call it yourself.
        """
        self.epoch = epoch
        if (passed_on := attribute_of(self._data, "set_epoch")) is not None:
            passed_on(epoch)

    def sharded(self, rank: int, world_size: int) -> StreamingPreprocessedDataset:
        """Returns the same dataset for another rank."""
        options = (self.buffer_size, self.skip_errors, self.seed, rank, world_size)
        return StreamingPreprocessedDataset(self._data, self._engine, *options)

    @property
    def fingerprint(self) -> str:
        shuffled = [self.buffer_size, self.seed] if self.buffer_size else []
        return digest(fingerprint_of(self._data), _recipe(self._engine), shuffled, self.skip_errors)

    @property
    def collate_fn(self) -> Collate:
        """The collator of its rows, as in PreprocessedDataset."""
        return _collator_of(self._engine)


def create_preprocessed_dataset(
    hf_dataset: Dataset, prompt_engine: PromptEngine, streaming: bool = False, **options: Any
) -> PreprocessedDataset | StreamingPreprocessedDataset:
    """Makes a PreprocessedDataset, or with `streaming` a StreamingPreprocessedDataset.

    Args:
        hf_dataset: The rows.
        prompt_engine: Encodes a row.
        streaming: Whether rows are encoded while they are read.
        options: Options of the class.
    """
    kind = StreamingPreprocessedDataset if streaming else PreprocessedDataset
    return kind(hf_dataset, prompt_engine, **options)


class Subset:
    """Some rows of a map-style dataset, in a given order."""

    def __init__(self, data: Dataset, indices: Sequence[int]) -> None:
        self._data, self._indices = data, np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Item:
        return self._data[int(self._indices[index])]

    @property
    def fingerprint(self) -> str:
        return digest(fingerprint_of(self._data), self._indices.tolist())


def subset(data: Dataset, indices: Sequence[int]) -> Any:
    """Returns some rows: by the dataset's `select`, as a list from a list, or as a Subset."""
    if isinstance(data, list | tuple):
        return [data[i] for i in indices]
    select = attribute_of(data, "select")
    return Subset(data, indices) if select is None else select(indices)


def _require_engine(engine: Any) -> None:
    """Checks that an object encodes rows.

    Raises:
        ConfigError: It does not.
    """
    require(
        not isinstance(engine, str | bytes) and callable(attribute_of(engine, "encode")),
        "prompt_engine",
        f"{type(engine).__name__} does not encode rows",
        'Give PromptEngine("my-tokenizer", PromptConfig()).',
    )


def _encode(engine: PromptEngine, data: Dataset, row: Item, number: int) -> Encoded:
    """Encodes a row of `data`; an error names the row."""
    if isinstance(engine, PromptEngine) and isinstance(row, Mapping) and is_arrow_dataset(data):
        # typed columns: as in a pipeline, a null is a key that only other rows have
        row = {name: cleaned(value, ("role", "content")) for name, value in row.items()}
    try:
        return _with_ids(engine, engine.encode(row))
    except SourceError as error:
        raise type(error)(
            at=f"row {number}, {error.at}" if error.at else f"row {number}",
            problem=error.problem,
            have=error.have,
            fix=error.fix,
        ) from None


def _with_ids(engine: Any, made: Item) -> Encoded:
    """Returns the result of a user's engine for a row, as NumPy arrays.

    Raises:
        SourceError: There are no tokens in it.
    """
    if type(engine) is PromptEngine:
        return made
    if not isinstance(made, Mapping) or INPUT_IDS not in made:
        have = sorted(made) if isinstance(made, Mapping) else [type(made).__name__]
        fix = (
            "Let encode(row) return a dict with input_ids, and loss_mask or labels if not "
            "every token is a target."
        )
        raise SourceError(
            at="",
            problem=f"{type(engine).__name__}.encode returned no {INPUT_IDS}",
            have=have,
            fix=fix,
        )
    return {str(name): np.array(values) for name, values in made.items()}


def _collator_of(engine: PromptEngine) -> Collate:
    return create_causal_lm_collate(pad_of(attribute_of(engine, "tokenizer")))


def _recipe(engine: PromptEngine) -> str:
    """Returns a digest of what decides the tokens of an engine."""
    if type(engine) is not PromptEngine:  # nothing more is known of it
        return digest(type(engine).__module__, type(engine).__qualname__)
    return digest(engine.config, engine.tokenizer.fingerprint, engine.tokenizer.config.max_length)


def _shuffled(rows: Iterator[tuple[int, Any]], size: int, key: int) -> Iterator[tuple[int, Any]]:
    """Yields the rows, permuted within consecutive blocks of `size`."""
    if size <= 1:
        yield from rows
        return
    for block in itertools.count():
        held = list(itertools.islice(rows, size))
        if not held:
            return
        for i in permute(np.arange(len(held)), len(held), fold(key, block)).tolist():
            yield held[i]


__all__ = [
    "PreprocessedDataset",
    "StreamingPreprocessedDataset",
    "Subset",
    "create_preprocessed_dataset",
    "subset",
]

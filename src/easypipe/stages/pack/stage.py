"""The pack stage: documents in rows of a fixed length, EOS and padding ids, and its warnings."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pyarrow as pa

from easypipe.core.aligned import DESIRABLE, LOOK_AHEAD_WEIGHT, LOSS_WEIGHTS
from easypipe.core.errors import ConfigError, require
from easypipe.core.protocols import (
    BaseStage,
    PipelineContext,
    ShardedSource,
    SourceInfo,
    Sources,
    TokenInfo,
)
from easypipe.core.schema import (
    INPUT_IDS,
    LOOK_AHEAD,
    POSITION_IDS,
    SEGMENT_IDS,
    SOURCE,
    is_list,
    offsets_of,
    token_dtype,
)
from easypipe.core.values import Int64
from easypipe.plan.windows import PlanSpec
from easypipe.stages.config import settings_of
from easypipe.stages.mix.mixture import Mixture, PlannedSource, planned_of
from easypipe.stages.pack.config import PackStageConfig
from easypipe.stages.tokenize.documents import prompts_of, require_documents, token_info

logger = logging.getLogger("easypipe")


PROVENANCE = pa.field(SOURCE, pa.large_list(pa.string()), nullable=False)


class PackStage(BaseStage):
    """The pack stage: every dataset becomes a PackedShardedSource.

    Args:
        chosen: False if a compat API sets options that its user cannot; warnings do not mention
            them.
    """

    config: PackStageConfig

    def __init__(self, config: PackStageConfig, *, chosen: bool = True) -> None:
        super().__init__(config)
        self._chosen = chosen

    @property
    def name(self) -> str:
        return "pack"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Wraps the datasets in packed sources; it reads no rows."""
        if not self.config.enabled:
            return data
        if self.config.num_packers is not None and self.config.strategy != "pool":
            logger.warning(
                "pack.num_packers has no effect on strategy %r: it applies only to 'pool'",
                self.config.strategy,
            )
        if not self.config.include_segment_ids:
            logger.warning("pack.include_segment_ids is False: documents in one row see each other")
        if self.config.segments == "row" and self._chosen:
            logger.warning("pack.segments is 'row': documents in one row see each other")
        packed = {
            name: PackedShardedSource(mixture_of(name, source, context, stage="pack"), self.config)
            for name, source in data.items()
        }
        for source in packed.values() if self.config.holds else ():
            _tell_uncut(source.mixture, self.config.seq_length)
        return {**packed}


def mixture_of(
    name: str, source: ShardedSource, context: PipelineContext, *, stage: str
) -> Mixture:
    """Returns the mixture that a source belongs to, packed or not.

    A single dataset is a mixture of one, in which every document comes once per epoch.
    """
    if (planned := planned_of(source)) is not None:
        return planned.mixture
    return Mixture(
        parts={name: require_documents(name, source, context, stage=stage)},
        spec=PlanSpec(
            seed=context.seed,
            weights=(1,),
            stop="all_exhausted",
            num_epochs=None,
            order=settings_of(context).order,
        ),
        context=context,
    )


class PackedShardedSource(PlannedSource):
    """Packed rows of `seq_length` slots.

    Their columns are `input_ids`, `segment_ids`, `position_ids`, and `loss_mask` if a dataset has
    one. With strategy `concat` they also have `look_ahead`: the label of the last slot, which is
    the first token of another row. Opening it reads nothing; `prepare()` counts its rows unless the
    mixture is endless.
    """

    kind = "packed"

    def __init__(self, mixture: Mixture, config: PackStageConfig) -> None:
        super().__init__(mixture)
        self.config, self.packing = config, config.spec()
        self.joined, self.train_continued = config.segments == "row", config.train_continued
        self.shuffle_buffer_factor = config.shuffle_buffer_factor
        self.include_segment_ids = config.include_segment_ids
        require(
            not self.joined or not mixture.provenance,
            "mix.provenance",
            "names the dataset of every segment, and under pack.segments 'row' "
            "documents have none of their own",
            "Leave it out, or set pack.segments to 'document'.",
        )
        if mixture.paired or DESIRABLE in mixture.aligned:
            _check_whole(config, "pairs" if mixture.paired else "answers with verdicts")
        self.eos_token_ids = _eos(mixture, config)
        self._pad_token_id = _pad(mixture, config, self.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        return self._pad_token_id

    @property
    def info(self) -> SourceInfo:
        aligned = tuple(column.name for column in self.mixture.aligned)
        return SourceInfo(tokens=self.tokens, bytes_per_row=self.bytes_per_row, aligned=aligned)

    @property
    def tokens(self) -> TokenInfo | None:
        """The tokens of the mixture, with the EOS, padding and row length of these rows."""
        info = self.mixture.tokens
        return info and dataclasses.replace(
            info,
            eos_token_id=self.eos_token_id,
            pad_token_id=self.pad_token_id,
            seq_length=self.config.seq_length,
        )

    @property
    def schema(self) -> pa.Schema:
        ids, places = (
            pa.from_numpy_dtype(token_dtype(self.mixture.vocab_size)),
            pa.from_numpy_dtype(token_dtype(self.config.seq_length + 1)),
        )
        fields = [pa.field(INPUT_IDS, pa.large_list(ids), nullable=False)]
        fields += self.mixture.mask_fields
        fields += [
            pa.field(name, pa.large_list(places), nullable=False)
            for name in (SEGMENT_IDS, POSITION_IDS)
        ]
        fields += [column.field for column in self.mixture.aligned]
        if self.config.concat:
            fields.append(pa.field(LOOK_AHEAD, pa.int32(), nullable=False))
            if any(column.name == LOSS_WEIGHTS for column in self.mixture.aligned):
                fields.append(pa.field(LOOK_AHEAD_WEIGHT, pa.float32(), nullable=False))
        return pa.schema(fields + ([PROVENANCE] if self.mixture.provenance else []))

    @property
    def bytes_per_row(self) -> int:
        """The bytes of a row's values, equal for all rows.

        The names in `__source__` are not counted, because each of them is stored once.
        """
        aligned = self.mixture.aligned
        names = [SOURCE, *(column.name for column in aligned)]
        fields = [field for field in self.schema if field.name not in names]
        lists = [field.type.value_type for field in fields if is_list(field.type)]
        sizes = [kind.bit_width // 8 for kind in lists] + [column.num_bytes for column in aligned]
        return sum(size * self.config.seq_length + 8 for size in sizes) + 4 * (
            len(fields) - len(lists)
        )

    def _ends(self) -> list[int | str | None]:
        told = {
            "provenance": self.mixture.provenance,
            "joined": self.joined,
            "held": self.config.holds and self.mixture.has_loss_mask,
        }
        more = [name for name, holds in told.items() if holds]
        return [self.eos_token_id, self.pad_token_id, *more]

    def read(self, shard: int, start: int, stop: int) -> pa.RecordBatch:
        assert shard == 0, f"packed rows are one shard, not {shard + 1}"
        numbers = np.arange(start, stop, dtype=np.int64)
        rows = self.rows().gather(numbers)
        ends = np.arange(stop - start + 1, dtype=np.int64) * self.config.seq_length
        offsets, aligned = pa.array(ends), {one.name: one for one in self.mixture.aligned}
        arrays = []
        for field in self.schema:
            if field.name == SOURCE:
                arrays.append(self._provenance(numbers))
                continue
            if field.name in (LOOK_AHEAD, LOOK_AHEAD_WEIGHT):
                arrays.append(pa.array(rows[field.name]))
                continue
            if field.name in aligned:
                arrays.append(aligned[field.name].lists(ends, rows[field.name]))
                continue
            values = np.ascontiguousarray(rows[field.name].reshape(-1)).astype(
                field.type.value_type.to_pandas_dtype()
            )
            arrays.append(pa.LargeListArray.from_arrays(offsets, pa.array(values)))
        return pa.record_batch(arrays, schema=self.schema)

    def _provenance(self, rows: Int64) -> pa.Array:
        """Returns for every row the datasets of its segments, in the order of the segments."""
        pieces = self.plan().pieces(rows)
        each = 2 if self.mixture.paired else 1  # segments of a piece
        offsets = offsets_of(np.bincount(pieces.row, minlength=len(rows)) * each)
        names = pa.DictionaryArray.from_arrays(
            pa.array(np.repeat(pieces.dataset, each)),
            pa.array(list(self.mixture.parts), pa.string()),
        )
        return pa.LargeListArray.from_arrays(pa.array(offsets), names.cast(pa.string()))


def _tell_uncut(mixture: Mixture, seq_length: int) -> None:
    """Logs which conversations are trained on only in their first row."""
    for name, source in mixture.parts.items():
        prompts = prompts_of(source)
        if prompts is not None and prompts.splits and prompts.room != seq_length:
            logger.info(
                "dataset %s: conversations longer than a row of %d tokens are trained in their "
                "first row alone: tokenize() cuts them"
                " between turns only where no stage of your own stands in between",
                name,
                seq_length,
            )


def _check_whole(config: PackStageConfig, what: str) -> None:
    """Checks that no option cuts what must stay in one row: pairs, and answers with verdicts.

    Raises:
        ConfigError: An option cuts it.
    """
    require(
        not config.concat,
        "pack.strategy",
        f"{config.strategy!r} cuts documents wherever a row ends, and {what} must stay whole",
        "Use 'first_fit'.",
    )
    require(
        config.oversize not in ("split", "truncate"),
        "pack.oversize",
        f"{config.oversize!r} would cut {what} that are longer than a row, which must stay whole",
        "Set it to 'drop' or 'error'; max_length cuts each answer by itself.",
    )


def _eos(mixture: Mixture, config: PackStageConfig) -> tuple[int, ...]:
    """Returns the id that ends the documents of each dataset.

    It is (), with a warning, if each row is one segment and the only dataset has no EOS.

    Raises:
        ConfigError: Tokenizer and config disagree, or neither has an EOS.
    """
    given = config.eos_token_id
    found: list[int] = []
    for name, source in mixture.parts.items():
        info = token_info(source)
        own = None if info is None else info.eos_token_id
        if info is not None and given is not None and own is not None and given != own:
            raise ConfigError(
                at="pack.eos_token_id",
                problem=f"{given}, but the tokenizer {info.tokenizer!r} of dataset {name!r} ends "
                f"documents with {own}",
                fix=f"Leave it out, or give {own}.",
            )
        eos = own if given is None else given
        if (
            eos is None
            and info is not None
            and config.segments == "row"
            and len(mixture.parts) == 1
        ):
            logger.warning(
                "dataset %s: %s has no end-of-sequence token, so nothing separates its documents",
                name,
                info.tokenizer,
            )
            return ()
        if eos is None:
            whose = (
                f"the tokenizer {info.tokenizer!r}"
                if info is not None
                else "what is known of the tokens"
            )
            raise ConfigError(
                at="pack.eos_token_id",
                problem=f"{whose} of dataset {name!r} has no end-of-sequence token",
                fix="Give the id of one.",
            )
        found.append(eos)
    for eos in dict.fromkeys(found):
        _in_vocabulary("pack.eos_token_id", eos, mixture)
    return tuple(found)


def _pad(mixture: Mixture, config: PackStageConfig, eos: int | None) -> int:
    """Returns the id that fills the rest of a row: the config's, the padding, the EOS or 0."""
    if config.pad_token_id is not None:
        _in_vocabulary("pack.pad_token_id", config.pad_token_id, mixture)
        return config.pad_token_id
    info = mixture.tokens
    return info.pad_token_id if info is not None and info.pad_token_id is not None else eos or 0


def _in_vocabulary(at: str, token: int, mixture: Mixture) -> None:
    """Raises ConfigError for an id that the vocabulary does not have."""
    require(
        0 <= token < mixture.vocab_size,
        at,
        f"{token} lies outside the vocabulary of {mixture.vocab_size}",
        "Give an id of the tokenizer.",
    )

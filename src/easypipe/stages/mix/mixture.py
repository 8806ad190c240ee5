"""Mixture and PlannedSource: weighted datasets, their common tokenizer and padding id, their plans.

Nothing is tokenized before a plan is requested.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from easypipe.cache.reader import TokenCache
from easypipe.core import storage
from easypipe.core.aligned import AlignedColumn
from easypipe.core.checked import recall_checked, remember_checked
from easypipe.core.config import digest
from easypipe.core.errors import require
from easypipe.core.protocols import (
    PipelineContext,
    Shard,
    ShardedSource,
    Source,
    TokenInfo,
    info_of,
)
from easypipe.core.schema import HAS_EOS, LOSS_MASK
from easypipe.core.values import Int32, Int64, Json, Record, UInt8
from easypipe.loader.config import LoadStageConfig
from easypipe.loader.rows.aligned import joined_columns
from easypipe.loader.rows.documents import Documents as Tokens
from easypipe.loader.rows.documents import gather_documents
from easypipe.loader.rows.planned import PlannedRows
from easypipe.plan.mix_schedule import Schedule
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import pass_docs
from easypipe.plan.windows import Plan, PlanDataset, PlanSpec, WindowState, window_docs
from easypipe.stages.mix.schedule import batch_sizes_of
from easypipe.stages.tokenize.documents import Documents, aligned_of, token_info


@dataclass(frozen=True)
class Mixture:
    """Datasets and how often each is drawn; a single dataset is a mixture of one.

    Attributes:
        parts: The datasets by name.
        spec: How they are drawn; each plan adds packing, windows and epochs.
        context: The context of the pipeline.
        batch_size: The rows of a step of its schedule, if mix.batch_size sets it.
        provenance: Whether packed rows name the dataset of every segment.
    """

    parts: Mapping[str, Documents]
    spec: PlanSpec
    context: PipelineContext
    batch_size: int | None = None
    provenance: bool = False
    _plans: dict[tuple[PackSpec | None, int | None, int | None], Plan] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # for each plan, the number of checkpoints that this process has committed or found
    _remembered: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def restarts(self) -> bool:
        """Whether exhausted datasets restart; the mixture then has no epochs."""
        return not self.spec.has_epochs

    @property
    def endless(self) -> bool:
        """Whether it restarts, and a dataset has no limit on its passes."""
        return self.restarts and None in self.spec.caps

    def for_load(self, load: LoadStageConfig) -> Mixture:
        """Returns a mixture that knows, under a schedule, how many rows a training step has.

        Without a schedule it returns itself.

        Raises:
            ConfigError: mix.batch_size is a different number.
        """
        if self.spec.schedule is None:
            return self
        sizes = batch_sizes_of(load)
        require(
            self.batch_size is None or sizes == ((0, self.batch_size),),
            "mix.batch_size",
            f"{self.batch_size}, but load() makes batches of "
            f"{', then '.join(str(size) for _, size in sizes)} rows",
            "Leave mix.batch_size out, or give load.batch_size the same.",
        )
        schedule = dataclasses.replace(self.spec.schedule, batch_sizes=sizes)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, schedule=schedule))

    @property
    def steps(self) -> Schedule | None:
        """The schedule.

        Raises:
            ConfigError: It is unknown how many rows a step has.
        """
        schedule = self.spec.schedule
        require(
            schedule is None or schedule.batch_sizes,
            "mix.weight_schedule",
            "its steps are training steps, and the number of rows in one is unknown",
            "Set load.batch_size in the pipeline's config or call load() first, or set "
            "mix.batch_size.",
        )
        return schedule

    def requested(self, rows: int) -> dict[str, float]:
        """Returns the share of the first `rows` rows that each dataset should have.

        It is a share of the mixture's unit, documents or tokens.
        """
        if (schedule := self.steps) is not None:
            return dict(zip(self.parts, map(float, schedule.mean_shares(rows)), strict=True))
        weights = self.spec.weights
        shares = (weight / sum(weights) for weight in weights)
        return dict(zip(self.parts, shares, strict=True))

    @property
    def tokens(self) -> TokenInfo | None:
        """The tokens of the first dataset; those of others may differ only if that is allowed."""
        info = token_info(next(iter(self.parts.values())))
        return info and dataclasses.replace(info, vocab_size=self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """The size of the largest vocabulary of the datasets; 2^32 if one is unknown."""
        return max(
            1 << 32 if (info := token_info(source)) is None else info.vocab_size
            for source in self.parts.values()
        )

    @property
    def pad_token_id(self) -> int:
        """The id that pads rows that are not packed: the padding token, else the EOS, else 0."""
        info = self.tokens
        known = () if info is None else (info.pad_token_id, info.eos_token_id)
        return next((token for token in known if token is not None), 0)

    @property
    def has_loss_mask(self) -> bool:
        """Whether a dataset has a loss mask."""
        return any(LOSS_MASK in source.schema.names for source in self.parts.values())

    @property
    def mask_fields(self) -> list[pa.Field]:
        """The field of the loss mask, if there is one."""
        kind = pa.large_list(pa.uint8())
        return [pa.field(LOSS_MASK, kind, nullable=False)] if self.has_loss_mask else []

    @property
    def aligned(self) -> tuple[AlignedColumn, ...]:
        """The aligned columns, without the loss mask.

        Raises:
            ConfigError: The datasets have different ones.
        """
        return joined_columns([(name, aligned_of(part)) for name, part in self.parts.items()])

    @property
    def paired(self) -> bool:
        """Whether every document is a preference pair."""
        return any(info_of(source).pairs for source in self.parts.values())

    @property
    def description(self) -> str:
        """A digest of what is mixed and how, which is known before any text is read."""
        parts = [[name, part.fingerprint] for name, part in self.parts.items()]
        one, weights = self.spec, self.spec.schedule or self.spec.weights
        how = (weights, one.block, one.stop, one.seed, one.unit, one.max_epochs, one.order)
        return digest(parts, *how, self.provenance)

    def prepare(self) -> tuple[TokenCache, ...]:
        """Returns the token cache of each dataset; tokenizes what is not tokenized yet.

        Raises:
            ConfigError: The config streams, so that tokens are not stored.
        """
        return self._caches

    @cached_property
    def _caches(self) -> tuple[TokenCache, ...]:
        require(
            not self.context.config.streaming,
            "streaming",
            "streamed data is not counted or cached, so there is no plan, and "
            "no token cache to look into",
            "Iterate over the loader, ask loader.ledger() for what was read so far, or "
            "leave streaming out.",
        )
        return tuple(source.materialize() for source in self.parts.values())

    def without_eos(self) -> tuple[int, ...]:
        """Returns how many documents of each dataset do not end with their tokenizer's EOS.

        It prepares the datasets if that was not done.
        """
        return self._without_eos

    @cached_property
    def _without_eos(self) -> tuple[int, ...]:
        return tuple(cache.count_without_eos() for cache in self._caches)

    def plan(
        self, pack: PackSpec | None, *, num_epochs: int | None = 1, eos: int | None = None
    ) -> Plan:
        """Returns the plan, one object for each choice of arguments.

        Args:
            pack: How documents are packed; None: each is a row.
            num_epochs: How many epochs; None: endless. Mixtures that restart have no epochs.
            eos: The id that ends documents without an EOS; None adds none.
        """
        choice = pack, None if self.restarts else num_epochs, eos
        if choice not in self._plans:
            self._plans[choice] = self._make(*choice)
        return self._plans[choice]

    def gather(self, dataset: Int32, docs: Int64) -> Tokens:
        """Returns the stored tokens of some documents.

        Args:
            dataset: Int32[n], the number of each document's dataset.
            docs: Int64[n], the number of each document in its dataset.
        """
        return gather_documents(
            self._caches, dataset, docs, with_mask=self.has_loss_mask, aligned=self.aligned
        )

    def has_eos(self, dataset: Int32, docs: Int64) -> UInt8:
        """Returns for each document whether packing adds no EOS after it: UInt8[n]."""
        found = np.zeros(len(docs), np.uint8)
        for i, cache in enumerate(self._caches):
            found[dataset == i] = cache.has_eos(docs[dataset == i])
        return found

    def remember(self, plan: Plan) -> None:
        """Commits the checkpoints of a plan in the cache folder, for the next process."""
        known = plan.checkpoints()
        if len(known) <= self._remembered.get(plan.fingerprint, 0):
            return
        self._remembered[plan.fingerprint] = len(known)
        path = self._checkpoint_path(plan)
        if len(self._recalled(plan)) < len(known):
            remember_checked(
                path, {"plan": plan.fingerprint, "states": [state.to_json() for state in known]}
            )
        else:  # another process that wrote it may have been killed
            storage.sweep(path.parent)

    def _make(self, pack: PackSpec | None, num_epochs: int | None, eos: int | None) -> Plan:
        """Makes a plan, with the checkpoints that an earlier process committed."""
        datasets = [self._dataset(i, name, eos) for i, name in enumerate(self.parts)]
        length = None if pack is None else pack.seq_length
        sizes = [window_docs(datasets, one, length) for one in self.spec.all_weights]
        if length is not None and not self.spec.has_epochs:
            unit = self.spec.unit
            sizes += [pass_docs(datasets, one, length, unit) for one in self.spec.all_weights]
        spec = dataclasses.replace(
            self.spec,
            num_epochs=num_epochs,
            pack=pack,
            window_docs=min(sizes),
            schedule=self.steps,
        )
        plan = Plan(datasets, spec)
        self._recalled(plan)
        return plan

    def _recalled(self, plan: Plan) -> Sequence[WindowState[int]]:
        """Returns the checkpoints that `remember` committed, from which the plan continues.

        It returns () if they are missing or cannot be those of this plan; they are then computed
        again.
        """

        def states(kept: Json) -> Sequence[WindowState[int]]:
            if kept["plan"] != plan.fingerprint:
                raise ValueError(f"it is of the plan {kept['plan']}")
            found = [WindowState.from_json(state) for state in kept["states"]]
            for before, after in itertools.pairwise(found):
                if before.index >= after.index or before.first_row > after.first_row:
                    raise ValueError("its states do not ascend")
            for state in found:
                plan.resume(state)
            return found

        return recall_checked(self._checkpoint_path(plan), states, what="the plan") or ()

    def _dataset(self, i: int, name: str, eos: int | None) -> PlanDataset:
        """Returns a dataset for plans; `eos` adds a token to documents without one."""
        cache = self._caches[i]
        tokens, fingerprint, lengths = cache.total_tokens, cache.fingerprint, cache.lengths
        if eos is not None:
            tokens, fingerprint = tokens + self._without_eos[i], f"{fingerprint}+eos"
            lengths = lambda docs: cache.lengths(docs) + ~cache.has_eos(docs)  # noqa: E731
        return PlanDataset(name, cache.num_docs, tokens, fingerprint, lengths)

    def _checkpoint_path(self, plan: Plan) -> Path:
        return self.context.cache_dir / "plans" / f"{plan.fingerprint}.json"


class PlannedSource(Source):
    """Rows of a plan over a mixture's documents: documents as they are drawn, or packed rows.

    Preparing counts them; an endless mixture has no count.

    Attributes:
        kind: The first word of its digests, and the name of its shard.
        packing: How documents are packed into rows; None: each document is a row, as it is stored.
        eos_token_ids: For each dataset, the id that ends documents without an EOS; () adds none.
        joined: As in PlannedRows.
        train_continued: As in PlannedRows.
        shuffle_buffer_factor: As in PackStageConfig.
        include_segment_ids: As in PackStageConfig.
    """

    kind: str
    packing: PackSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    joined = train_continued = False
    shuffle_buffer_factor: int | None = None
    include_segment_ids = True

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._num_rows: int | None = None
        self._rows: dict[int | None, PlannedRows] = {}

    @property
    @abstractmethod
    def schema(self) -> pa.Schema: ...

    @property
    def shards(self) -> tuple[Shard, ...]:
        rows = self._num_rows
        num_bytes = (rows or 0) * (self.info.bytes_per_row or 0)
        return (Shard(name=self.kind, num_rows=rows, num_bytes=num_bytes),)

    @property
    def fingerprint(self) -> str:
        packing = () if self.packing is None else (self.packing,)
        return digest(self.kind, self.mixture.description, *packing, *self._ends())

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends documents of the first dataset without an EOS; None adds none."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def pad_token_id(self) -> int:
        return self.mixture.pad_token_id

    def over(self, mixture: Mixture) -> Self:
        """Returns these rows of another mixture of the same datasets."""
        clone = copy.copy(self)
        clone.mixture, clone._num_rows, clone._rows = mixture, None, {}
        return clone

    def plan(self, num_epochs: int | None = 1) -> Plan:
        """Returns the plan of the rows; tokenizes what is not tokenized yet."""
        return self.mixture.plan(self.packing, num_epochs=num_epochs, eos=self.eos_token_id)

    def rows(self, num_epochs: int | None = 1) -> PlannedRows:
        """Returns the rows of `num_epochs` epochs (None: all), for a loader."""
        if num_epochs not in self._rows:
            self._rows[num_epochs] = PlannedRows(
                self.plan(num_epochs),
                self.mixture.prepare(),
                eos_token_id=self.eos_token_ids or None,
                pad_token_id=self.pad_token_id,
                joined=self.joined,
                train_continued=self.train_continued,
            )
        return self._rows[num_epochs]

    def content(self) -> str:
        """Returns a digest of the rows themselves, wherever their documents come from.

        It prepares the rows.
        """
        ends = [HAS_EOS] if HAS_EOS in self.schema.names else []
        return digest(self.kind, self.plan().fingerprint, *self._ends(), *ends)

    def _ends(self) -> list[int | str | None]:
        """Returns what a digest of rows needs in addition to the plan."""
        return []

    def prepare(self, num_epochs: int | None = 1) -> Self:
        """Tokenizes and plans what is not done yet, and returns itself.

        Raises:
            PlanError: None of the documents fits into a row.
        """
        plan = self.plan(num_epochs)
        if plan.num_rows == 0 and plan.spec.pack is not None:
            plan.check_that_some_document_fits()
        self._num_rows = plan.num_rows if num_epochs == 1 else self._num_rows
        self.mixture.remember(plan)
        return self

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[Record]:
        return super(PlannedSource, self.prepare()).open_shard_at_row(shard_name, row)


def planned_of(source: ShardedSource) -> PlannedSource | None:
    """Returns the source if its rows are planned over a mixture, else None."""
    return source if isinstance(source, PlannedSource) else None

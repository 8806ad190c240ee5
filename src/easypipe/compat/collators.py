"""Document 001: collators of rows of tokens, to padded batches in NumPy or jax; default_collate.

They make batches for users who already have rows of tokens; `Pipeline.load()` does not need them.

B rows of a batch · T slots, the longest row's or `max_length`. A row is a mapping with `input_ids`,
and optionally `labels` (unshifted: the id of the same token, or -100), `loss_mask`,
`completion_mask` or `assistant_masks` (1: the token is a target; with several of them, in all),
`attention_mask`, and of rows that were packed `segment_ids` and `position_ids`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from easypipe.compat.foreign import Rows, TokenizerLike, as_tokenizer, pad_of
from easypipe.core.errors import SourceError, place, require
from easypipe.core.schema import (
    ASSISTANT_MASKS,
    ATTENTION_MASK,
    COMPLETION_MASK,
    DECODER_ATTENTION_MASK,
    DECODER_INPUT_IDS,
    IGNORE,
    INPUT_IDS,
    LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SEGMENT_IDS,
    OutputSchema,
)
from easypipe.core.values import Array, Batch, Collate, Identity, Int64, Item, Row, attribute_of
from easypipe.loader.collate import CollateConfig, collate, row_width
from easypipe.loader.rows.rows import MOST_IDS
from easypipe.loader.rows.stored import segments_of

log = logging.getLogger("easypipe")

MASKS = (LOSS_MASK, COMPLETION_MASK, ASSISTANT_MASKS)  # 1 is a target

EXACT = 1 << 53  # floats hold every integer below

Side = Literal["right", "left"]
Tensors = bool | Literal["np", "jax"]


def draws(collate: Collate | None) -> bool:
    """Returns whether a collator takes `keys`, 64 random bits for each row (KeyedCollator)."""
    return bool(attribute_of(collate, "draws"))


def recipe_of(collate: Collate) -> Identity | None:
    """Returns what decides the batches of a collator of this package; None for another collator."""
    return attribute_of(collate, "recipe")


def called(collate: Collate, rows: Rows, keys: Sequence[int] | None) -> Batch:
    """Calls a collator, with the keys of the rows if it takes them."""
    return collate(rows, keys=keys) if draws(collate) else collate(rows)


@dataclass(frozen=True)
class Padding:
    """How rows of several lengths are padded to one width, and the form of the batch."""

    pad_token_id: int = 0
    label_pad_token_id: int = IGNORE
    padding_side: Side = "right"
    max_length: int | None = None
    return_tensors: Tensors = True
    schema: OutputSchema | None = None

    def __post_init__(self) -> None:
        if self.schema is None:
            object.__setattr__(self, "schema", OutputSchema())
        require(
            self.padding_side in ("right", "left"),
            "padding_side",
            f"{self.padding_side!r} is not a side",
            have=["right", "left"],
        )
        require_length(self.max_length, "max_length")
        require_id(self.pad_token_id, "pad_token_id")
        require_id(self.label_pad_token_id, "label_pad_token_id")
        check_form(self.return_tensors, self.schema)

    def width(self, rows: Sequence[Int64]) -> int:
        """Returns the width of a batch of these rows.

        Raises:
            SourceError: A row is longer than max_length.
        """
        fixed = self.max_length is not None
        rule = CollateConfig(
            padding="max_length" if fixed else "longest", max_length=self.max_length
        )
        return row_width(np.array([row.size for row in rows], np.int64), rule)

    def fill(self, values: Sequence[Array], width: int, filler: int) -> Int64:
        """Returns the rows padded with `filler`, Int64[B, width]."""
        out = np.full((len(values), width), filler, np.int64)
        for i, row in enumerate(values):  # one copy per row
            first = 0 if self.padding_side == "right" else width - row.size
            out[i, first : first + row.size] = row
        return out

    def finish(self, batch: Batch) -> Batch:
        """Returns the batch in the dtypes of the schema and the requested kind of arrays."""
        return handed_out(batch, self.schema, self.return_tensors)


@dataclass(frozen=True)
class PaddingCollator:
    """The collator of create_collate_fn."""

    padding: Padding

    @property
    def recipe(self) -> Identity:
        return "padding", self.padding

    def __call__(self, rows: Rows) -> Batch:
        """Makes a batch from rows.

        It has `input_ids`, `attention_mask`, `labels` Int32[B, T] (Int32[B] if a row has one
        label). Other columns are padded with 0 if they are as long as their row's tokens, else
        stacked.
        """
        rule, columns = self.padding, token_columns(rows, next_token=False)
        ids = columns[INPUT_IDS]
        width = rule.width(ids)
        attended = rule.fill(columns[ATTENTION_MASK], width, 0)
        batch: Batch = {
            INPUT_IDS: rule.fill(ids, width, rule.pad_token_id),
            ATTENTION_MASK: attended,
        }
        labels = [row.get(LABELS) for row in rows]
        of_row = [label is not None and np.ndim(label) == 0 for label in labels]
        if any(of_row):
            _require_all(of_row, LABELS, "no label of the row, which other rows have")
            batch[LABELS] = stacked(labels, LABELS)
        else:
            padded = rule.fill(targets_of(columns), width, IGNORE)
            unlabelled = (attended == 0) | (padded == IGNORE)
            batch[LABELS] = np.where(unlabelled, rule.label_pad_token_id, padded)
        for name in dict.fromkeys(name for row in rows for name in row):
            if name not in (INPUT_IDS, ATTENTION_MASK, LABELS, *MASKS):
                _require_all([name in row for row in rows], name, "there is none")
                values = [as_array(row.get(name)) for row in rows]
                along = all(
                    value.shape == own.shape and value.dtype.kind in "iub"
                    for value, own in zip(values, ids, strict=True)
                )
                batch[name] = (
                    rule.fill(
                        [integers(row, name, i, wide=True) for i, row in enumerate(rows)], width, 0
                    )
                    if along
                    else stacked([row.get(name) for row in rows], name)
                )
        return rule.finish(batch)


def _require_all(have: Sequence[bool], name: str, problem: str) -> None:
    """Raises SourceError for the first row that has not what other rows of its batch have."""
    if not all(have):
        at = place(f"row {have.index(False)} of the batch", column=name)
        raise SourceError(at=at, problem=problem, fix="Give every row the same columns.")


@dataclass(frozen=True)
class CausalLMCollator:
    """The collator of create_causal_lm_collate."""

    padding: Padding

    @property
    def recipe(self) -> Identity:
        return "causal_lm", self.padding

    def __call__(self, rows: Rows) -> Batch:
        """Makes a batch with the next tokens as labels."""
        rule, columns = self.padding, token_columns(rows)
        width = rule.width(columns[INPUT_IDS])
        targets = [labels != IGNORE for labels in targets_of(columns)]
        at_rest = {
            INPUT_IDS: rule.fill(columns[INPUT_IDS], width, rule.pad_token_id),
            SEGMENT_IDS: rule.fill(columns[SEGMENT_IDS], width, 0),
            LOSS_MASK: rule.fill(targets, width, 0),
        }
        if all(POSITION_IDS in row and SEGMENT_IDS in row for row in rows):  # packed elsewhere
            own = [
                integers(row, POSITION_IDS, i, like=ids)
                for i, (row, ids) in enumerate(zip(rows, columns[INPUT_IDS], strict=True))
            ]
            at_rest[POSITION_IDS] = rule.fill(own, width, 0)
        batch: Batch = dict(collate(at_rest, attention_mask=True))
        batch[LABELS][batch[LABELS] == IGNORE] = rule.label_pad_token_id
        return rule.finish(batch)


@dataclass(frozen=True)
class Seq2SeqCollator:
    """The collator of create_seq2seq_collate."""

    padding: Padding
    decoder_start_token_id: int
    max_target_length: int | None = None

    def __post_init__(self) -> None:
        require_id(self.decoder_start_token_id, "decoder_start_token_id")
        require_length(self.max_target_length, "max_target_length")

    @property
    def recipe(self) -> Identity:
        return "seq2seq", self.padding, self.decoder_start_token_id, self.max_target_length

    def __call__(self, rows: Rows) -> Batch:
        """Makes a batch of inputs for an encoder and a decoder."""
        require_some(rows)
        rule = self.padding
        sources = [integers(row, INPUT_IDS, i) for i, row in enumerate(rows)]
        attended = [
            integers(row, ATTENTION_MASK, i, like=ids)
            for i, (row, ids) in enumerate(zip(rows, sources, strict=True))
        ]
        _require_masks(rows)
        targets = [integers(row, LABELS, i) for i, row in enumerate(rows)]
        for i, target in enumerate(targets):
            at = place(f"row {i} of the batch", column=LABELS)
            if not target.size:
                raise SourceError(at=at, problem="no token to predict", fix="Leave such rows out.")
            wrong = np.flatnonzero((target < 0) & (target != IGNORE))
            if wrong.size:
                problem = f"token {wrong[0]} has label {target[wrong[0]]}"
                raise SourceError(at=at, problem=problem, fix=f"Give the id, or {IGNORE}.")
        # A decoder starts at the first slot, so targets are padded on the right.
        out = replace(rule, max_length=self.max_target_length, padding_side="right")
        width, out_width = rule.width(sources), out.width(targets)
        labels = out.fill(targets, out_width, IGNORE)
        masks = [
            _loss_mask(row, i, target)
            for i, (row, target) in enumerate(zip(rows, targets, strict=True))
        ]
        decoder = np.full_like(labels, rule.pad_token_id)
        decoder[:, 0] = self.decoder_start_token_id
        decoder[:, 1:] = np.where(labels[:, :-1] == IGNORE, rule.pad_token_id, labels[:, :-1])
        ones = [np.ones_like(target) for target in targets]
        predicted = (labels != IGNORE) & (out.fill(masks, out_width, 0) != 0)
        return rule.finish(
            {
                INPUT_IDS: rule.fill(sources, width, rule.pad_token_id),
                ATTENTION_MASK: rule.fill(attended, width, 0),
                DECODER_INPUT_IDS: decoder,
                DECODER_ATTENTION_MASK: out.fill(ones, out_width, 0),
                LABELS: np.where(predicted, labels, rule.label_pad_token_id),
            }
        )


def create_collate_fn(
    pad_token_id: int = 0,
    label_pad_token_id: int = IGNORE,
    padding_side: Side = "right",
    max_length: int | None = None,
    return_tensors: Tensors = True,
    *,
    schema: OutputSchema | None = None,
) -> PaddingCollator:
    """Makes a collator that pads rows and does not shift labels.

    It is for models that shift labels themselves; `create_causal_lm_collate` shifts them.

    Args:
        label_pad_token_id: The label of padding and of tokens with attention_mask 0, loss_mask 0 or
            label -100.
        padding_side: The side of a row on which padding is put.
        max_length: The width of every batch; None takes that of its longest row.
        return_tensors: NumPy arrays (True, "np"), jax Arrays ("jax") or lists (False).
        schema: Dtypes of the columns; the default is int32 for tokens.
    """
    rule = (pad_token_id, label_pad_token_id, padding_side, max_length, return_tensors, schema)
    return PaddingCollator(Padding(*rule))


def create_causal_lm_collate(
    pad_token_id: int = 0,
    label_pad_token_id: int = IGNORE,
    padding_side: Side = "right",
    max_length: int | None = None,
    return_tensors: Tensors = True,
    *,
    schema: OutputSchema | None = None,
) -> CausalLMCollator:
    """Makes a collator with the same batches as a Pipeline's loader.

    `labels[t]` is the token at t + 1 if that is a target, else -100. Batches have `input_ids`,
    `labels`, `segment_ids`, `position_ids`, `attention_mask`, Int32[B, T]. Options are those of
    create_collate_fn.
    """
    rule = (pad_token_id, label_pad_token_id, padding_side, max_length, return_tensors, schema)
    return CausalLMCollator(Padding(*rule))


def create_seq2seq_collate(
    pad_token_id: int | None = None,
    label_pad_token_id: int = IGNORE,
    padding_side: Side = "right",
    max_length: int | None = None,
    return_tensors: Tensors = True,
    *,
    decoder_start_token_id: int | None = None,
    tokenizer: TokenizerLike = None,
    max_target_length: int | None = None,
    schema: OutputSchema | None = None,
) -> Seq2SeqCollator:
    """Makes a collator for an encoder and a decoder.

    Rows have `input_ids`, which the encoder reads, and `labels`, the answer. A `loss_mask`
    (`completion_mask`, `assistant_masks`) has a value for each label; the decoder still reads the
    tokens where it is 0.
    `decoder_input_ids[t]` is the label at t - 1, and `decoder_start_token_id` at 0, so decoders do
    not shift. Batches have, as Int32, `input_ids`, `attention_mask` [B, T], `decoder_input_ids`,
    `decoder_attention_mask`, `labels` [B, U].

    Args:
        max_target_length: U; None takes the longest row.
        tokenizer: Supplies the tokens that are not given: its pad token (else its EOS, else 0), and
            as the start of the decoder its BOS, else its pad token. Without a tokenizer, the pad
            token is the start, and a warning says so.
    """
    own = None if tokenizer is None else as_tokenizer(tokenizer)
    if pad_token_id is None:
        pad_token_id = 0 if own is None else pad_of(own)
    if decoder_start_token_id is None:
        bos: int | None = None if own is None else own.bos_token_id
        decoder_start_token_id = pad_token_id if bos is None else bos
        if own is None:
            log.warning(
                "seq2seq: the pad token, %d, starts the decoder: no decoder_start_token_id or "
                "tokenizer was given",
                pad_token_id,
            )
    rule = (pad_token_id, label_pad_token_id, padding_side, max_length, return_tensors, schema)
    return Seq2SeqCollator(Padding(*rule), decoder_start_token_id, max_target_length)


def default_collate(rows: Sequence[Item]) -> Any:
    """Stacks rows of any single kind.

    Mappings become a dict of arrays, tuples a tuple of arrays, arrays and numbers one array under
    `"data"`. Text, and whatever is not a number in NumPy, becomes a list.

    Raises:
        SourceError: Shapes or keys differ; the error names row and column.
    """
    require_some(rows)
    first = rows[0]
    if isinstance(first, Mapping):
        for i, row in enumerate(rows):
            if set(row) != set(first):
                raise SourceError(
                    at=f"row {i} of the batch",
                    problem=f"has {sorted(row)}",
                    have=first,
                    fix="Give every row the same keys.",
                )
        return {str(name): stacked([row[name] for row in rows], str(name)) for name in first}
    if isinstance(first, tuple):
        for i, row in enumerate(rows):
            if len(row) != len(first):
                raise SourceError(
                    at=f"row {i} of the batch",
                    problem=f"has {len(row)} columns, the first row has {len(first)}",
                    fix="Give every row as many.",
                )
        return tuple(
            stacked(list(column), str(i)) for i, column in enumerate(zip(*rows, strict=True))
        )
    return {"data": stacked(rows, "data")}


def is_number(value: object, kind: type[int] | type[float] = float) -> bool:
    """Returns whether an option is a finite number: of `int`, a whole one."""
    kinds = (int, np.integer) if kind is int else (int, float, np.number)
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(np.isfinite(value))


def check_form(return_tensors: Tensors, schema: OutputSchema | None) -> None:
    """Checks the options return_tensors and schema.

    Raises:
        ConfigError: Collators do not make such arrays.
    """
    problem, fix = (
        f"{schema!r} is no OutputSchema",
        'Give OutputSchema(dtypes={"labels": "int64"}).',
    )
    require(isinstance(schema, OutputSchema), "schema", problem, fix)
    known = (True, False, "np", "jax")
    require(
        return_tensors in known,
        "return_tensors",
        f"{return_tensors!r} is not made here",
        "For torch tensors wrap the loader: easypipe.interop.torch.TorchBatches(loader).",
        known,
    )


def handed_out(batch: Row, schema: OutputSchema | None, return_tensors: Tensors) -> Batch:
    """Returns the batch in the dtypes of the schema, as NumPy arrays, jax.Arrays, or lists."""
    batch = (schema or OutputSchema()).cast(batch)
    if return_tensors == "jax":
        from easypipe.loader.placement import on_default_device

        return on_default_device(batch)
    if return_tensors is False:
        return {
            name: values.tolist() if isinstance(values, np.ndarray) else values
            for name, values in batch.items()
        }
    return batch


def stacked(values: Sequence[Item], name: str) -> Any:
    """Stacks the values of a column; returns a list if they are not numbers.

    Raises:
        SourceError: Shapes differ, or integers would become other numbers; the error names row and
            column.
    """
    arrays = [as_array(value) for value in values]
    if any(array.dtype.kind not in "biuf" for array in arrays):
        return list(values)
    for i, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise SourceError(
                at=place(f"row {i} of the batch", column=name),
                problem=f"shape {array.shape}, the first row has {arrays[0].shape}",
                fix="Make them alike in the dataset, or give a collator that pads or resizes.",
            )
    made = np.stack(arrays)
    if made.dtype.kind == "f" and np.any(np.abs(made) >= EXACT):
        for i, (value, array) in enumerate(zip(values, arrays, strict=True)):
            if array.dtype.kind == "f" and not isinstance(value, list | tuple):
                continue
            whole = np.asarray(value, object).flat
            for one, kept in zip(whole, made[i].flat, strict=True):
                if isinstance(one, int | np.integer) and int(one) != kept.item():
                    raise SourceError(
                        at=place(f"row {i} of the batch", column=name),
                        problem=f"{one} would become {kept}: no type holds all numbers",
                        fix="Give texts, or smaller numbers.",
                    )
    return made


def as_array(value: Item) -> Array:
    """Returns a value as an array; one of the dtype object if its parts differ in shape."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.empty((), object)


def require_some(rows: Sequence[Item]) -> None:
    """Checks that a batch has rows.

    Raises:
        SourceError: It has none.
    """
    if not len(rows):
        raise SourceError(at="the batch", problem="holds no rows", fix="Give at least one.")


def token_columns(rows: Rows, *, next_token: bool = True) -> dict[str, list[Int64]]:
    """Returns the token columns of every row.

    They are input_ids, attention_mask, labels (unshifted), loss_mask and segment_ids. In rows
    without segment_ids, a segment begins where position_ids are 0.

    Args:
        rows: The rows.
        next_token: Whether the labels of a row are its own tokens or -100. Otherwise they may be
            anything, and one label for the whole row is skipped.

    Raises:
        SourceError: A column is wrong; the error names row and column.
    """
    require_some(rows)
    _require_masks(rows)
    names = (INPUT_IDS, ATTENTION_MASK, LABELS, LOSS_MASK, SEGMENT_IDS)
    columns: dict[str, list[Int64]] = {name: [] for name in names}
    for i, row in enumerate(rows):
        ids = integers(row, INPUT_IDS, i, wide=not next_token)
        attended, segments = (
            integers(row, name, i, like=ids) for name in (ATTENTION_MASK, SEGMENT_IDS)
        )
        labels, own = ids, row.get(LABELS)
        if own is not None and (np.ndim(own) or next_token):
            labels = integers(row, LABELS, i, like=ids, wide=not next_token)
        wrong = np.flatnonzero((labels != ids) & (labels != IGNORE))
        if next_token and wrong.size:
            raise SourceError(
                at=place(f"row {i} of the batch", column=LABELS),
                problem=f"token {wrong[0]} has label {labels[wrong[0]]}, its id is {ids[wrong[0]]}",
                fix="Give unshifted labels (input_ids or -100), or leave the column out.",
            )
        if SEGMENT_IDS not in row and POSITION_IDS in row:
            positions = integers(row, POSITION_IDS, i, like=ids)
            segments = segments_of(positions, np.array([0, ids.size]))
        mask = _loss_mask(row, i, ids)
        found = (ids, attended, labels, mask, segments * (attended != 0))
        for name, values in zip(names, found, strict=True):
            columns[name].append(values)
    return columns


def _require_masks(rows: Rows) -> None:
    """Checks that a mask that a row has is in all rows; a row without `loss_mask` is all targets.

    Raises:
        SourceError: A row lacks one.
    """
    for name in (COMPLETION_MASK, ASSISTANT_MASKS):
        if any(have := [name in row for row in rows]):
            _require_all(have, name, "there is none, which other rows have")


def _loss_mask(row: Row, number: int, ids: Int64) -> Int64:
    """Returns which tokens of a row are targets: those that are in all of its MASKS.

    Raises:
        SourceError: A mask is null, or holds other values than 0 and 1.
    """
    mask = np.ones(ids.size, np.int64)
    for name in (name for name in MASKS if name in row):
        at = place(f"row {number} of the batch", column=name)
        fix = "Give 1 for a target and 0 for any other token, or leave the row out."
        if row[name] is None:
            raise SourceError(at=at, problem="null instead of a mask", fix=fix)
        given = integers(row, name, number, like=ids)
        wrong = np.flatnonzero((given < 0) | (given > 1))
        if wrong.size:
            problem = f"token {wrong[0]} has {given[wrong[0]]}"
            raise SourceError(at=at, problem=problem, fix=fix)
        mask &= given
    return mask


def targets_of(columns: Mapping[str, Sequence[Int64]]) -> list[Int64]:
    """Returns the labels of `token_columns`, -100 for tokens with a loss mask of 0."""
    pairs = zip(columns[LABELS], columns[LOSS_MASK], strict=True)
    return [np.where(mask != 0, labels, IGNORE) for labels, mask in pairs]


def integers(
    row: Row, name: str, number: int, *, like: Array | None = None, wide: bool = False
) -> Int64:
    """Returns a column of a row as Int64[n].

    Args:
        row: The row.
        name: The column.
        number: The number of the row in the batch, for error messages.
        like: If given, a missing column is ones of this length, and the column must have this
            length.
        wide: Whether values may be those of int64, which the schema of the batch checks; otherwise
            they are those of int32. Ids and segments are at least 0, attention_mask is 0 or 1.

    Raises:
        SourceError: The column is missing, or does not hold such integers of the right length.
    """
    given = row.get(name) if isinstance(row, Mapping) else None
    if given is None and like is not None:
        return np.ones(like.size, np.int64)
    at = place(f"row {number} of the batch", column=name)
    if given is None:
        have = list(row) if isinstance(row, Mapping) else [type(row).__name__]
        raise SourceError(
            at=at,
            problem="there is none",
            have=have,
            fix="Tokenize the rows first: PreprocessedDataset does.",
        )
    values = as_array(given)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iub"):
        raise SourceError(
            at=at, problem=f"expected a row of integers, got {values.dtype} of shape {values.shape}"
        )
    if like is not None and values.size != like.size:
        raise SourceError(
            at=at,
            problem=f"{values.size} values for {like.size} tokens",
            fix="Give every token one.",
        )
    most = (1 << 63 if wide else MOST_IDS) - 1
    least = 0 if name in (INPUT_IDS, SEGMENT_IDS, ATTENTION_MASK) else -1 - most
    most = 1 if name == ATTENTION_MASK else most
    wrong = np.flatnonzero((values < least) | (values > most)) if values.size else values
    if wrong.size:
        problem = f"token {wrong[0]} has {values[wrong[0]]}, outside [{least}, {most}]"
        raise SourceError(at=at, problem=problem, fix="Give numbers of that range.")
    return values.astype(np.int64)


def require_length(value: int | None, name: str) -> None:
    """Checks an option that is the slots of a row; None takes those of the longest."""
    fits = value is None or (is_number(value, int) and value >= 1)
    require(fits, name, f"{value!r} is not a row length", "Give at least 1.")


def require_id(value: int, name: str) -> None:
    """Checks an option that is the id of a token, or a label.

    Raises:
        ConfigError: It is no integer of int32, which batches have.
    """
    fits = is_number(value, int) and -MOST_IDS <= value < MOST_IDS
    require(fits, name, f"{value!r} is no id that fits int32", "Give that of a token.")


__all__ = [
    "CausalLMCollator",
    "Padding",
    "PaddingCollator",
    "Seq2SeqCollator",
    "create_causal_lm_collate",
    "create_collate_fn",
    "create_seq2seq_collate",
    "default_collate",
]

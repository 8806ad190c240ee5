"""Parquet of lists of integers reads back as what pyarrow wrote of the same batches, nulls, empty
lists and cuts included.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easypipe.save import config as save_config
from easypipe.save import parquet_lists
from easypipe.save.parquet_lists import ListsWriter, holds_lists_of_integers

CODECS = sorted(save_config.CODECS["parquet"])
KINDS = [pa.uint8(), pa.uint16(), pa.uint32(), pa.int32(), pa.int64(), pa.uint64(), pa.int8()]


def ours(schema: pa.Schema, batches: list[pa.RecordBatch], codec: str = "zstd") -> pa.Buffer:
    sink = pa.BufferOutputStream()
    writer = ListsWriter(sink, schema, codec)
    for batch in batches:
        writer.write(batch)
    writer.close()
    return sink.getvalue()


def theirs(schema: pa.Schema, batches: list[pa.RecordBatch], codec: str = "zstd") -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, compression=codec, use_dictionary=False, write_statistics=False
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    fields, arrays = [], []
    rows = draw(st.integers(0, 12))
    for number in range(draw(st.integers(1, 3))):
        kind, nulls, none = draw(st.sampled_from(KINDS)), draw(st.booleans()), draw(st.booleans())
        low, high = (
            (0 if "u" in str(kind) else -(2 ** (kind.bit_width - 1))),
            2 ** (kind.bit_width - ("u" not in str(kind))) - 1,
        )
        value = st.integers(low, high) | st.none() if nulls else st.integers(low, high)
        row = st.lists(value, max_size=draw(st.sampled_from([1, 40])))
        made = draw(st.lists(row | st.none() if none else row, min_size=rows, max_size=rows))
        list_of = draw(st.sampled_from([pa.list_, pa.large_list]))(
            pa.field("item", kind, nullable=nulls or draw(st.booleans()))
        )
        fields.append(pa.field(f"c{number}", list_of, nullable=none or draw(st.booleans())))
        arrays.append(pa.array(made, list_of))
    schema = pa.schema(fields, metadata={"made": "here"})
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    cut = draw(st.integers(0, rows))
    return schema, [whole.slice(0, cut), whole.slice(cut)]


@given(
    case=columns(),
    page=st.sampled_from([1, 7, 1 << 18]),
    rows=st.sampled_from([1, 3, parquet_lists.RUN_ROWS]),
    share=st.sampled_from([0, parquet_lists.DICTIONARY_SHARE]),
    codec=st.sampled_from(CODECS),
)
def test_reads_back_as_pyarrow_wrote_it(
    case: tuple[pa.Schema, list[pa.RecordBatch]], page: int, rows: int, share: int, codec: str
) -> None:
    schema, batches = case
    with mock.patch.multiple(
        parquet_lists, PAGE_VALUES=page, RUN_ROWS=rows, DICTIONARY_SHARE=share
    ):
        made = pq.read_table(pa.BufferReader(ours(schema, batches, codec)))
    expected = pq.read_table(pa.BufferReader(theirs(schema, batches, codec)))
    assert made.equals(expected)
    assert made.schema.equals(expected.schema, check_metadata=True)
    assert made.equals(pa.Table.from_batches(batches, schema=schema))


@pytest.mark.parametrize(
    ("kind", "top"),
    [
        (pa.uint8(), 1),
        (pa.uint8(), 255),
        (pa.uint16(), 1000),
        (pa.uint16(), 65535),
        (pa.uint32(), 9),
    ],
)
def test_small_integers_are_indices_of_a_dictionary(kind: pa.DataType, top: int) -> None:
    count = 40 * (top + 1) + 5
    values = np.resize(np.arange(top, -1, -1), count).astype(kind.to_pandas_dtype())
    schema = pa.schema([pa.field("input_ids", pa.large_list(kind), nullable=False)])
    lists = pa.LargeListArray.from_arrays(
        pa.array([0, 3, count - 9, count], pa.int64()), pa.array(values)
    )
    batch = pa.record_batch([lists], schema=schema)
    file = ours(schema, [batch, batch.slice(1), batch.slice(0, 1)])
    assert pq.read_table(pa.BufferReader(file)).equals(
        pa.Table.from_batches([batch, batch.slice(1), batch.slice(0, 1)])
    )
    metadata = pq.ParquetFile(pa.BufferReader(file)).metadata
    found = [metadata.row_group(i).column(0) for i in range(3)]
    # beside the values: a dictionary, and a few bytes for every page
    assert found[0].total_uncompressed_size < 200 + 1.2 * values.nbytes
    used = kind != pa.uint32()
    # the last group is too small for one
    assert [column.has_dictionary_page for column in found] == [used, used, False]


@pytest.mark.parametrize("codec", CODECS)
def test_footer_counts_what_is_there(codec: str) -> None:
    kind = pa.large_list(pa.uint16())
    schema = pa.schema([pa.field("input_ids", kind, nullable=False)])
    batches = [
        pa.record_batch([pa.array([[i, i + 1]] * n, kind)], schema=schema)
        for i, n in enumerate((3, 400, 1))
    ] * 9
    made, expected = (
        pq.ParquetFile(pa.BufferReader(write(schema, batches, codec))).metadata
        for write in (ours, theirs)
    )
    assert (made.num_rows, made.num_row_groups, made.num_columns) == (
        expected.num_rows,
        expected.num_row_groups,
        expected.num_columns,
    )
    for number in range(made.num_row_groups):
        mine, other = made.row_group(number), expected.row_group(number)
        assert mine.num_rows == other.num_rows
        assert (mine.column(0).num_values, mine.column(0).compression) == (
            other.column(0).num_values,
            other.column(0).compression,
        )
    assert made.row_group(1).to_dict()["columns"][0]["path_in_schema"] == "input_ids.list.element"


@pytest.mark.parametrize(
    ("kind", "can"),
    [
        (pa.list_(pa.int32()), True),
        (pa.large_list(pa.uint16()), True),
        (pa.list_(pa.float32()), False),
        (pa.int32(), False),
        (pa.list_(pa.int32(), 4), False),
        (pa.list_(pa.list_(pa.int32())), False),
    ],
)
def test_which_columns(kind: pa.DataType, can: bool) -> None:
    assert holds_lists_of_integers(pa.schema([("x", kind)])) is can
    assert not holds_lists_of_integers(
        pa.schema([("x", pa.list_(pa.int32())), ("text", pa.string())])
    )
    assert not holds_lists_of_integers(pa.schema([]))

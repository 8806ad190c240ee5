# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Column names and dtypes, in one place.

At rest (token cache, saved rows) a row has `input_ids`, `loss_mask`, `segment_ids`, `position_ids`; `labels` exist only in batches.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"  # 1: this token is a target; absent: every token is
SEGMENT_BREAK = 2  # in the loss_mask of a token cache: no target, and the first token of the second half of a pair
SEGMENT_IDS = "segment_ids"  # 0 is padding, segments of a row count from 1
POSITION_IDS = "position_ids"  # restart at 0 with each segment
LOOK_AHEAD = "look_ahead"  # rows of strategy "stream" only, one number a row: the label of the last slot, which lies in another row
LABELS = "labels"  # batches only: the next token of the same segment, or IGNORE
ATTENTION_MASK = "attention_mask"
HAS_EOS = "has_eos"  # token cache only: the document already ends with the tokenizer's EOS

SOURCE = "__source__"  # which dataset a row came from
ROW_NUMBER = "__row_number__"  # physical record number within its shard

IGNORE = -100  # label of a slot that is not trained


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def token_list(vocab_size: int) -> pa.DataType:
    """Arrow type of a document's tokens: lists with int64 offsets, so that one shard may pass 2^31 tokens."""
    return pa.large_list(pa.from_numpy_dtype(token_dtype(vocab_size)))

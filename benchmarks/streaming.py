"""JSON lines, plain and zst, to packed batches on a mesh, the whole chain in streaming mode:
nothing is counted, cached or read twice.

easypipe reads forward over 8 canonical streams, tokenizes with gigatoken and packs first-fit into
rows of 2,048. The peer is what people write by hand: `datasets` in streaming mode, `tokenizers`'
encode_batch_fast, and a packer that joins documents with EOS and cuts rows. Every contender runs a
full pass of its file per round; MB are of text.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zstandard

from _common import AnonymousMemory, Report, alternate, arguments, documents, tokenizer_folder

BATCH, SEQ_LENGTH = 8, 2048


def lines(path: Path, texts: list[str], num_bytes: int) -> float:
    """Writes JSON lines with about `num_bytes` of text, and the same compressed beside them;
    returns the megabytes of text.
    """
    size, rows = 0, []
    for text in itertools.cycle(texts):
        rows.append(json.dumps({"text": text}, ensure_ascii=False))
        size += len(text.encode())
        if size >= num_bytes:
            break
    data = ("\n".join(rows) + "\n").encode()
    path.write_bytes(data)
    path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(data, 3))
    return size / 1e6


def stream(path: Path, tokenizer: Path, megabytes: float) -> float:
    from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig

    config = PipelineConfig(
        datasets=[DatasetConfig(name="text", data_files=str(path))],
        default_tokenizer=str(tokenizer),
        seed=1,
        streaming=True,
        pack=PackStageConfig(seq_length=SEQ_LENGTH, strategy="first_fit"),
        load=LoadStageConfig(batch_size=BATCH, drop_last=False, mesh={"data": 1}),
    )
    loader = Pipeline.from_config(config).source().tokenize().pack().load().build()
    for batch in loader:
        jax.block_until_ready(batch)
    assert loader.ledger().find("mix", "text", "documents").out.keys() == {"drawn"}
    return megabytes


def by_hand(path: Path, tokenizer: Path, megabytes: float) -> float:
    import datasets
    import tokenizers

    encoder = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rows = datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
    device = jax.devices("cpu")[0]
    for batch in packed(rows.iter(1000), encoder):
        jax.block_until_ready(jax.device_put(batch, device))
    return megabytes


def packed(batches: Any, encoder: Any) -> Iterator[dict[str, np.ndarray]]:
    held = np.zeros(0, np.int32)
    for rows in batches:
        ids = [
            np.array([*encoding.ids, 0], np.int32)
            for encoding in encoder.encode_batch_fast(rows["text"], add_special_tokens=False)
        ]
        held = np.concatenate([held, *ids])
        while len(held) > BATCH * SEQ_LENGTH:
            block = held[: BATCH * SEQ_LENGTH].reshape(BATCH, SEQ_LENGTH)
            yield {
                "input_ids": block,
                "labels": np.roll(block, -1, axis=1),
                "position_ids": np.tile(np.arange(SEQ_LENGTH), (BATCH, 1)),
            }
            held = held[BATCH * SEQ_LENGTH :]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--megabytes", type=int, default=100, help="text that easypipe streams per round"
    )
    parser.add_argument(
        "--peer-megabytes",
        type=int,
        default=5,
        help="text that the peer streams per round; rates are compared",
    )
    options = parser.parse_args()
    texts = documents(options.text)
    report = Report("streaming", "MB/s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = os.environ["HF_HOME"] = folder
        os.environ["HF_DATASETS_OFFLINE"] = "1"
        tokenizer = tokenizer_folder(Path(folder), texts)
        file, small = Path(folder) / "text.jsonl", Path(folder) / "small.jsonl"
        size, small_size = (
            lines(file, texts, options.megabytes * 1_000_000),
            lines(small, texts, options.peer_megabytes * 1_000_000),
        )
        contenders = {
            "easypipe, JSONL": functools.partial(stream, file, tokenizer, size),
            "easypipe, JSONL.zst": functools.partial(
                stream, file.with_suffix(".jsonl.zst"), tokenizer, size
            ),
            "datasets streaming + tokenizers": functools.partial(
                by_hand, small, tokenizer, small_size
            ),
        }
        with AnonymousMemory() as memory:
            alternate(report, contenders, options.rounds)
        report.facts["peak RssAnon, MB, with JAX and the peers"] = memory.peak / 1e6
    report.target("MB/s of text, JSONL", report.figure("easypipe, JSONL"), at_least=60)
    report.target("MB/s of text, JSONL.zst", report.figure("easypipe, JSONL.zst"), at_least=60)
    report.facts["times the peer"] = report.ratio(
        "easypipe, JSONL", "datasets streaming + tokenizers"
    )
    report.finish(options.out)


if __name__ == "__main__":
    main()

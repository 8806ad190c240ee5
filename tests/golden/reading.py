"""Requests that preparing makes of a web server, file by file, how often it reads each byte (sizes
depend on the libraries), and the memory that it holds.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from easypipe import DatasetConfig, Pipeline, TokenizeStageConfig
from easypipe.cache.ranges import cut
from easypipe.transforms.tokenizer.fast import anonymous_bytes
from golden.batches import chain, load, pack
from golden.cases import golden
from golden.data import config, rows_of, write
from web import web_server

# MB of one row group and of one line, and those of RssAnon that they may cost on top
GROUP, GROUP_COSTS, LINE, LINE_COSTS = 160, 128, 16, 400


@golden("jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow")
def over_http(folder: Path, ending: str) -> Any:
    with web_server() as server:
        for i in range(2):
            path = write(folder / "in" / f"part-{i}.{ending}", rows_of(3000, 3 + 2 * i))
            server.files[f"/part-{i}.{ending}"] = path.read_bytes()
        datasets = [
            DatasetConfig(name="data", data_files=[f"{server.url}{path}" for path in server.files])
        ]
        made = config(
            folder,
            datasets=datasets,
            tokenize=TokenizeStageConfig(num_workers=1),
            pack=pack(),
            load=load(),
        )
        chain(made).build()
        requests = collections.Counter(f"{method} {path}" for method, path, _ in server.seen)
        return {
            "requests": dict(sorted(requests.items())),
            "times_read": {
                path: round(_sent(server.seen, path, len(data)) / len(data), 1)
                for path, data in sorted(server.files.items())
            },
        }


def _sent(seen: list[tuple[str, str, str | None]], path: str, size: int) -> int:
    """The bytes of a file that requests took."""
    sent = 0
    for method, asked, wanted in seen:
        if (method, asked) == ("GET", path):
            first, last = (wanted or "bytes=0-").removeprefix("bytes=").split("-")
            sent += min(size, int(last) + 1 if last else size) - int(first)
    return sent


@golden()
def memory(folder: Path) -> Any:
    """Whether RssAnon stays bounded: reading one large row group, preparing one long line.
    benchmarks/memory.py has them at 2 GB and at 60 MB.
    """
    text = pa.array(["many words " * 200]).take(pa.array([0] * (GROUP * 10**6 // 2200)))
    group = folder / "group.parquet"
    pq.write_table(
        pa.table({"text": text}),
        group,
        row_group_size=1 << 40,
        compression="none",
        use_dictionary=False,
    )
    line = write(
        folder / "line.jsonl", [{"text": "many words " * (LINE * 10**6 // 11)}, *rows_of(9, 3)]
    )
    found = {}
    for file, most in ((group, GROUP_COSTS), (line, LINE_COSTS)):
        command = f"from golden import reading; reading.measure({str(file)!r})"
        done = subprocess.run(
            [sys.executable, "-c", command],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            check=True,
        )
        rows, grown = json.loads(done.stdout)
        found[file.name] = {"rows": rows, "MB": f"{grown:.0f}" if grown > most else f"<= {most}"}
    return found


def measure(path: str) -> None:
    """Prints the rows of a file, and the MB of anonymous memory that going through it took."""
    file, over, base = Path(path), threading.Event(), anonymous_bytes()
    peaks = [base]

    def sample() -> None:
        while not over.wait(0.02):
            peaks.append(anonymous_bytes())

    watch = threading.Thread(target=sample)
    watch.start()
    datasets = [DatasetConfig(name="data", data_files=path)]
    source = Pipeline(config(file.parent, datasets=datasets)).source()
    if file.suffix == ".parquet":
        read = source.get_data()["data"]
        rows = sum(read.read(0, *piece).num_rows for piece in cut(read.shards[0]))
    else:
        rows = source.tokenize().get_data()["data"].materialize().num_docs
    over.set()
    watch.join()
    print(json.dumps([rows, (max(peaks) - base) / 1e6]))

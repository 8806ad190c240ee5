"""Requests that preparing makes of a web server, file by file, and how often it reads each byte
(sizes depend on the libraries).
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from easypipe import DatasetConfig, TokenizeStageConfig
from golden.batches import chain, load, pack
from golden.cases import golden
from golden.data import config, rows_of, write
from web import web_server


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
            "times_read": round(server.sent / sum(map(len, server.files.values())), 1),
        }

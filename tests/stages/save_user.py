"""Run by test_save.py: one of two processes that save into one folder. Says "ready", then waits for
the file `go` to write.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import stores  # noqa: F401  (settings that gcsfs reads when it is imported)
from easypipe import EasypipeError, PackStageConfig, Pipeline, SaveStageConfig
from easypipe.core import storage
from pipelines import config


def main(folder: str, out: str, options: str, tokenizer: str, seed: int, overwrite: bool) -> None:
    go, deadline = Path(folder) / "go", time.monotonic() + 60

    def hook(step: str, path: str) -> None:
        while (
            step == "write" and "part-" in path and not go.exists() and time.monotonic() < deadline
        ):
            time.sleep(0.01)

    storage.set_fault_hook(hook)
    pipeline = (
        Pipeline(config(Path(folder), seed=seed, default_tokenizer=tokenizer))
        .source()
        .tokenize()
        .mix({"weights": {"code": 0.7, "docs": 0.3}, "stop_strategy": "all_exhausted"})
    )
    save = SaveStageConfig(
        output_dir=out, num_shards=4, overwrite=overwrite, storage_options=json.loads(options)
    )
    pipeline.pack(PackStageConfig(seq_length=64)).save(save)
    print("ready", flush=True)
    try:
        [found] = pipeline.build().folders
        print(f"saved {found.num_rows} {found.up_to_date}", flush=True)
    except EasypipeError as error:
        print(f"refused {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]), sys.argv[6] == "overwrite")

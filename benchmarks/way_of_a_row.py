"""How many functions of ours one row passes from `prepare` to its committed token file, and on to a
batch: distinct functions that run, counted under `sys.setprofile` in all threads.

A file of one row of JSON is prepared (`prepare_part(0, 1)`), then a loader gives its one batch; the
same in streaming. Imports and the tokenizer's check are done before. `--other SRC` counts another
source tree too, `--names` prints the functions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import Report, arguments, documents, table, tokenizer_folder

HERE = Path(__file__).resolve().parents[1] / "src"


def functions_of(package: str, run: Callable[[], object]) -> list[str]:
    """The functions below the folder `package` that are entered while `run` runs, in any thread."""
    seen: set[str] = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            seen.add(f"{code.co_filename[len(package) + 1 :]}:{code.co_qualname}")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(seen)


def ways(tokenizer: str, folder: str) -> dict[str, list[str]]:
    """Functions by way, of the easypipe that this process imports."""
    import easypipe
    from easypipe import DatasetConfig, LoadStageConfig, PackStageConfig, Pipeline, PipelineConfig

    package = str(Path(easypipe.__file__).parent)

    def chain(name: str, streaming: bool) -> Any:
        path = Path(folder, f"{name}.jsonl")
        path.write_text(json.dumps({"text": f"one row of text, {name}"}) + "\n", encoding="utf-8")
        config = PipelineConfig(
            datasets=[DatasetConfig(name="text", data_files=str(path))],
            default_tokenizer=tokenizer,
            cache_dir=str(Path(folder, "cache")),
            streaming=streaming,
            pack=PackStageConfig(seq_length=64),
            load=LoadStageConfig(batch_size=1, drop_last=False),
        )
        return Pipeline.from_config(config).source().tokenize()

    def batches(source: Any) -> int:
        return sum(1 for _ in source.pack().load().build())

    for streaming in (False, True):  # what is made once per process
        warm = chain(f"warm-{streaming}", streaming)
        batches(warm)
    prepared, streamed = chain("prepared", False), chain("streamed", True)
    return {
        "prepare to committed file": functions_of(package, lambda: prepared.prepare_part(0, 1)),
        "token cache to batch": functions_of(package, lambda: batches(prepared)),
        "streaming, file to batch": functions_of(package, lambda: batches(streamed)),
    }


def counted(tree: Path, tokenizer: Path) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--run", json.dumps([str(tokenizer), folder])],
            env=os.environ
            | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "EASYPIPE_CACHE": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--other", type=Path, help="the `src` folder of another easypipe")
    parser.add_argument("--names", action="store_true", help="print the functions")
    given = parser.parse_args()
    if given.run:
        print(json.dumps(ways(*json.loads(given.run))))
        return
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = tokenizer_folder(Path(scratch), documents(given.text))
        here = counted(HERE, tokenizer)
        other = counted(given.other.resolve(), tokenizer) if given.other else {}
    lines = []
    for way, names in here.items():
        before = len(other.get(way, ()))
        share = f"{len(names) / before:.2f}" if before else ""
        lines.append((way, len(names), before or "", share))
        facts[way] = len(names)
        if given.names:
            print(way, *names, sep="\n  ")
    table(("way", "functions", "other", "ratio"), lines)
    Report("way_of_a_row", "functions", facts).finish(given.out)


if __name__ == "__main__":
    main()

"""10,000 tiny files, one shard each: what a shard costs on a Ray cluster of this machine, and in
this process, beyond its few rows.

`--shards N` files of two lines each are prepared and saved here, then on Ray, then on Ray again
from a cache of which a tenth is missing (resume from finished shards). The token files and what was
saved must be the same bytes. Peaks are RssAnon of this process.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import AnonymousMemory, Report, arguments, tokenizer_folder

AT_MOST_MS = 20.0  # for each shard on Ray


def write(folder: Path, shards: int) -> str:
    folder.mkdir()
    for number in range(shards):
        rows = [
            {"text": f"shard {number}, line {line}: the quick brown fox jumps over the lazy dog"}
            for line in range(2)
        ]
        (folder / f"part-{number:05d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return str(folder / "*.jsonl")


def build(files: str, tokenizer: Path, folder: Path, executor: str) -> dict[str, Any]:
    """Seconds until everything is tokenized and until it is saved too, and what the ledger says of
    ranges.
    """
    from easypipe import DatasetConfig, Pipeline, PipelineConfig, SaveStageConfig

    config = PipelineConfig(
        datasets=(DatasetConfig(name="tiny", data_files=files, tokenizer=str(tokenizer)),),
        seed=1,
        cache_dir=folder / "cache",
        save=SaveStageConfig(output_dir=folder / "out", num_shards=2, overwrite=True),
        executor=executor,  # pyright: ignore[reportArgumentType]
    )
    start = time.perf_counter()
    with AnonymousMemory() as held:
        made = Pipeline(config).source().tokenize().save()
        listed = time.perf_counter() - start
        made.build()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "until listed": listed, "peak MB": held.peak / 1e6}


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = [
        file
        for kept in ("cache/tokens", "out")
        for file in sorted((folder / kept).rglob("*"))
        if file.is_file()
    ]
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if file.name != "ledger.json"
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shards", type=int, default=10_000)
    options = parser.parse_args()
    report = Report("ray_shards", "s")
    import ray

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tokenizer = tokenizer_folder(scratch, ["the quick brown fox jumps over the lazy dog"] * 10)
        files, few = write(scratch / "data", options.shards), write(scratch / "few", 4)
        ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
        build(few, tokenizer, scratch / "warm", "ray")  # workers are up

        def timed(name: str, where: str, executor: str) -> None:
            result = build(files, tokenizer, scratch / where, executor)
            report.seconds[name] = [result["seconds"]]
            report.facts[f"{name}: ms for each shard"] = round(
                result["seconds"] / options.shards * 1e3, 2
            )
            report.facts[f"{name}: peak RssAnon of this process in MB"] = round(result["peak MB"])

        timed("local", "here", "local")
        timed("ray", "there", "ray")
        here = bytes_of(scratch / "here")
        same = here == bytes_of(scratch / "there")
        manifest = next((scratch / "there" / "cache" / "manifests").glob("*.json"))
        report.facts["manifest in MB"] = round(manifest.stat().st_size / 1e6, 2)
        for number, record in enumerate(
            sorted((scratch / "there" / "cache" / "ranges").rglob("*.json"))
        ):
            if number % 10 == 0:
                record.unlink()
        for path in (scratch / "there" / "cache" / "manifests").iterdir():
            path.unlink()
        shutil.rmtree(scratch / "there" / "out")
        timed("ray, nine tenths were done", "there", "ray")
        same = same and here == bytes_of(scratch / "there")
        ray.shutdown()
    report.target(
        "ms for each shard on Ray, less than 20",
        report.seconds["ray"][0] / options.shards * 1e3,
        below=AT_MOST_MS,
    )
    report.target("bytes are those of the local run", float(same), at_least=1.0)
    report.finish(options.out)


if __name__ == "__main__":
    main()

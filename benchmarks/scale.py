"""The constants of docs/scale.md, measured, and what 15 T tokens cost by them.

Done for real: 100 M documents of 1,000 tokens on average (`--documents`), whose lengths are
computed, are planned as a mixture of two, in memory that must not follow them; a row far out is
found again; a token cache of `--parts` sparse files is opened. The rest is multiplication, and is
marked so.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from _common import Report, anonymous_bytes, arguments, table
from easypipe.plan.pack import PackSpec
from easypipe.plan.spec import window_docs
from easypipe.plan.windows import MARK_EVERY, Plan, PlanDataset, PlanSpec

TOKENS = 15_000_000_000_000
MEAN, SEQ_LENGTH, STEP, BATCH = 1000, 4096, 1_000_000, 8
# of one file of the token cache: 4 to 8 MB of text at rest become about so many
RANGE_TOKENS = 2 << 20
# bytes of text a second and core, benchmarks/tokenizing.py; a token is about 4.3 of them
PREPARED = 60e6
TEXT_PER_TOKEN = 4.3


def dataset(name: str, documents: int) -> PlanDataset:
    """Lengths from 1 to 2 * MEAN - 1 that follow from the number alone: nothing is held."""
    return PlanDataset(
        name,
        documents,
        documents * MEAN,
        name,
        lambda docs: (docs * 7919 % (2 * MEAN - 1) + 1).astype(np.int32),
    )


def planned(report: Report, documents: int) -> dict[str, float]:
    datasets, weights = [dataset("a", documents), dataset("b", documents // 3)], (3, 1)
    pack = PackSpec(SEQ_LENGTH, "first_fit")
    spec = PlanSpec(
        seed=0,
        weights=weights,
        stop="restart",
        num_epochs=None,
        window_docs=window_docs(datasets, weights, SEQ_LENGTH),
        pack=pack,
    )
    plan = Plan(datasets, spec)
    plan.locate(1000)
    before, held, began, done = anonymous_bytes(), [], time.process_time(), 0
    row = 1000
    while done < documents:
        state = plan.state_at(row)
        done, row = sum(state.drawn), state.first_row + 200_000
        held.append(anonymous_bytes())
    seconds = time.process_time() - began
    marks = plan.checkpoints()
    text = json.dumps([mark.to_json() for mark in marks])
    # The row of the step, or rather the last one before the next checkpoint: all windows since the
    # one before are planned for it.
    far = (
        next(
            mark.first_row
            for mark in marks
            if mark.first_row > min(STEP * BATCH, marks[-2].first_row)
        )
        - 1
    )
    later = Plan(datasets, spec, marks)
    later.locate(5)
    began = time.perf_counter()
    found = later.locate(far)
    locate = time.perf_counter() - began
    state = plan.state_at(found.row)
    began = time.perf_counter()
    resumed = Plan(datasets, spec)
    resumed.resume(state)
    assert resumed.locate(found.row).pieces.doc.tolist() == found.pieces.doc.tolist()
    resume = time.perf_counter() - began
    facts = {
        "documents planned": done,
        "tokens planned": done * MEAN,
        "documents a second of processor time": done / seconds,
        "RssAnon growth over all but the first tenth, MB": (
            max(held) - max(held[: len(held) // 10 + 1])
        )
        / 1e6,
        "RssAnon growth in all, MB": (max(held) - before) / 1e6,
        "documents for each checkpoint": done / len(marks),
        "bytes of a checkpoint (2 datasets)": len(text) / len(marks),
        f"row {found.row} found from checkpoints, s": locate,
        "resumed from a state there, s": resume,
        "bytes of the state": len(json.dumps(dataclasses.asdict(state))),
    }
    report.facts.update(facts)
    report.target(
        "million documents planned a second",
        facts["documents a second of processor time"] / 1e6,
        at_least=5,
    )
    report.target(
        "RssAnon in MB that 9 times the documents add",
        facts["RssAnon growth over all but the first tenth, MB"],
        below=8,
    )
    report.target(f"resume at row {found.row}, s", resume, below=0.2)
    return facts


def opened(report: Report, parts: int) -> dict[str, float]:
    """Opens a cache whose files stay mapped, and one whose files are mapped when they are read."""
    from easypipe.cache import mapping
    from easypipe.cache.reader import TokenCache
    from first_batch import sparse_cache

    facts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = sparse_cache(Path(folder), parts * (4 << 20))
        few = Path(folder) / "max_map_count"
        few.write_text(str(parts // 10))
        for way, limit in (("mapped whole", mapping.LIMIT), ("mapped when read", few)):
            mapping.LIMIT = limit
            warm = TokenCache(path)
            held, began = anonymous_bytes(), time.process_time()
            cache = TokenCache(path)
            seconds = time.process_time() - began
            count = len(cache.manifest.parts)
            if way == "mapped whole":
                facts["files of the cache"] = count
                facts["bytes of the manifest for each"] = path.stat().st_size / count
            facts[f"{way}, ms to open each"] = seconds / count * 1e3
            facts[f"{way}, RssAnon of each, bytes"] = (anonymous_bytes() - held) / count
            docs = np.linspace(0, cache.num_docs - 1, count).astype(np.int64)
            cache.lengths(docs)
            began = time.process_time()
            cache.lengths(docs)
            seconds = time.process_time() - began
            facts[f"{way}, ms to read the length of one document in each"] = seconds / count * 1e3
            if way == "mapped whole":
                docs = np.random.Generator(np.random.PCG64(0)).integers(0, cache.num_docs, 1 << 20)
                began = time.process_time()
                cache.lengths(docs)
                seconds = time.process_time() - began
                facts["random lengths a second (in the page cache)"] = docs.size / seconds
            del warm, cache
    report.facts.update(facts)
    return facts


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--parts", type=int, default=10_000)
    options = parser.parse_args()
    report = Report("scale", "s")
    plan, cache = planned(report, options.documents), opened(report, options.parts)
    documents, files = TOKENS / MEAN, TOKENS / RANGE_TOKENS
    windows = documents / plan["documents for each checkpoint"] * MARK_EVERY
    core_hours = TOKENS * TEXT_PER_TOKEN / PREPARED / 3600
    lines = [
        ("documents", f"{documents / 1e9:.0f} G of {MEAN} tokens"),
        (
            "tokens on disk, uint16 / uint32",
            f"{TOKENS * 2 / 1e12:.0f} / {TOKENS * 4 / 1e12:.0f} TB",
        ),
        (
            "offsets, row numbers and EOS marks on disk, 17 bytes a document",
            f"{documents * 17 / 1e9:.0f} GB",
        ),
        (
            "files of the cache",
            f"{files / 1e6:.1f} M, manifest "
            f"{files * cache['bytes of the manifest for each'] / 1e9:.1f} GB",
        ),
        (
            "opening them, mapped when read, and RssAnon for it",
            f"{files * cache['mapped when read, ms to open each'] / 60e3:.0f} min, "
            f"{files * cache['mapped when read, RssAnon of each, bytes'] / 1e9:.1f} GB",
        ),
        ("windows, checkpoints", f"{windows / 1e3:.0f} k, {windows / MARK_EVERY / 1e3:.1f} k"),
        (
            "checkpoints on disk",
            f"{windows / MARK_EVERY * plan['bytes of a checkpoint (2 datasets)'] / 1e6:.1f} MB",
        ),
        (
            "planning all of it, one core",
            f"{documents / plan['documents a second of processor time'] / 60:.0f} min",
        ),
        ("preparing, one core", f"{core_hours:,.0f} h"),
        *(
            (f"preparing, {hosts} hosts of 64 cores", f"{core_hours / hosts / 64:,.2f} h")
            for hosts in (1, 16)
        ),
    ]
    report.finish(options.out)
    table((f"{TOKENS / 1e12:.0f} T tokens by these constants", "extrapolated"), lines)


if __name__ == "__main__":
    main()

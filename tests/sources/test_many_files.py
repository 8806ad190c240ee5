"""A token cache of more files than one process may map."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from easypipe.cache.manifest import fingerprint_of, manifest_json
from easypipe.cache.reader import TokenCache
from easypipe.sources.external.memory import InMemoryShardedSource
from token_support import prepare, small_tokenizer

LIMIT = Path("/proc/sys/vm/max_map_count")
FILES = 200

PROGRAM = """
import ctypes, sys
from easypipe import EasypipeError
from easypipe.cache.reader import TokenCache
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
with open(sys.argv[1], "rb") as file:
    held = []
    while (at := libc.mmap(None, 4096, 1, 2, file.fileno(), 0)) != ctypes.c_void_p(-1).value:
        held.append(at)
for at in held[-100:]:  # what this process itself needs
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(4096))
try:
    TokenCache(sys.argv[1])
except EasypipeError as error:
    print(error)
"""


@pytest.mark.skipif(
    not LIMIT.exists() or int(LIMIT.read_text()) > 1 << 20,
    reason="the kernel has no such limit, or a high one",
)
def test_the_limit_is_named(tmp_path: Path) -> None:
    rows = pa.table({"text": ["one document"]})
    cache = prepare(
        InMemoryShardedSource(rows, name="d"), small_tokenizer(), dataset="d", cache_dir=tmp_path
    )
    manifest = tmp_path / "manifests" / f"{cache.manifest.key}.json"
    one = cache.manifest
    parts = tuple(dataclasses.replace(one.parts[0], start=n, stop=n + 1) for n in range(FILES))
    sizes = ("rows", "docs", "tokens", "encoded", "added")
    counts = {name: FILES * getattr(one.counts, name) for name in sizes}
    many = dataclasses.replace(
        one,
        parts=parts,
        shard_rows=(FILES,),
        counts=dataclasses.replace(one.counts, **counts),
        fingerprint=fingerprint_of(one.tokenizer, parts),
    )
    manifest.write_bytes(manifest_json(many))
    assert TokenCache(manifest).num_docs == FILES
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(manifest)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "A process maps a limited number of files, and this cache has 200: raise sysctl "
        "vm.max_map_count." in done.stdout
    )

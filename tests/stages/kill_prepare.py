"""Run by test_cache_writer.py: prepares a dataset, and dies at the step of the storage door that it
is told.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from easypipe.core import storage
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from token_support import WithIdentity, prepare, texts


def main(tokenizer: str, cache: str, die_at: int) -> None:
    """die_at: which call of the fault hook, from 1, ends the process as `kill -9` would; 0:
    none.
    """
    calls = 0

    def hook(step: str, path: str) -> None:
        nonlocal calls
        if "/proofs/" in path:
            return
        calls += 1
        if calls == die_at:
            os._exit(77)

    storage.set_fault_hook(hook)
    source = WithIdentity(texts(40), texts(30, seed=1))
    made = prepare(
        source, load_tokenizer(tokenizer), dataset="d", cache_dir=Path(cache), num_workers=1
    )
    print(json.dumps({"steps": calls, "fingerprint": made.fingerprint}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

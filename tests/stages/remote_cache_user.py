"""Run by test_remote_cache.py: one of several machines that prepare the same dataset into one
bucket at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import stores  # noqa: F401  (settings that gcsfs reads when it is imported)
from easypipe.cache.folder import RemoteFolder
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from token_support import WithIdentity, prepare, texts

if __name__ == "__main__":
    tokenizer, url, options, local = sys.argv[1:]
    source = WithIdentity(*(texts(60, seed=seed) for seed in range(3)))
    folder = RemoteFolder(url, Path(local), options=json.loads(options))
    cache = prepare(source, load_tokenizer(tokenizer), dataset="d", cache_dir=folder)
    cache.verify()
    print(
        json.dumps(
            {
                "manifest": str(cache.path),
                "fingerprint": cache.fingerprint,
                "tokens": cache.tokens(3).tolist(),
            }
        )
    )

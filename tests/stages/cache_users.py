"""Run by test_cache_admin.py: a second process that prepares a dataset slowly, or holds one open,
and tells what it does on stdout.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from token_support import CountingTokenizer, WithIdentity, prepare, texts


class Slow(WithIdentity):
    def read(self, shard: int, start: int, stop: int):
        print("reading", flush=True)
        time.sleep(0.05)
        return super().read(shard, start, stop)


def main(tokenizer: str, cache_dir: str, what: str) -> None:
    """what: "prepare" prepares and leaves; "hold" prepares, says "open" and keeps the cache open
    until stdin ends.
    """
    loaded = load_tokenizer(tokenizer)
    counter = CountingTokenizer(loaded)
    cache = prepare(
        Slow(*(texts(60, seed=s) for s in range(2))),
        loaded,
        dataset="slow",
        cache_dir=Path(cache_dir),
        num_workers=1,
    )
    print(f"open {cache.fingerprint} {counter.texts}", flush=True)
    if what == "hold":
        sys.stdin.read()
        print(f"still {cache.tokens(0).tolist()[:1] != []}", flush=True)
        cache.verify()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Run by test_threads.py, which interrupts it: a training loop that is waiting for a batch, or
working on one.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

from easypipe.loader.config import LoadStageConfig
from easypipe.loader.loader import Loader
from loader_support import MemoryCache, plan_rows, some_docs

where = sys.argv[1]
# whoever runs the tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
CACHE = MemoryCache(some_docs([30] * 200))
ROWS = plan_rows([CACHE], num_epochs=None)


class Slow:
    """Rows of slow storage: from batch 3 on a row takes a while."""

    def __getattr__(self, name):
        return getattr(ROWS, name)

    def batch(self, rows, width):
        if rows[0] >= 12:
            time.sleep(0.4)
        return ROWS.batch(rows, width)


load = LoadStageConfig(
    batch_size=4, num_epochs=None, prefetch_workers=3, mesh={"data": 1} if where == "mesh" else None
)
before = set(threading.enumerate())
loader = Loader(Slow() if where == "waiting" else ROWS, load)  # type: ignore[arg-type]
try:
    for t, _batch in enumerate(loader):
        if t == 2:
            print("running", flush=True)
        if where == "working" and t > 2:
            time.sleep(0.01)
except KeyboardInterrupt:
    state = loader.state()  # still to be had: what a loop would save on its way out
    assert state.batch >= 3, state
    del _batch
left = [thread.name for thread in threading.enumerate() if thread.name.startswith("easypipe")]
print("left", left, flush=True)
assert not left, left

"""Ctrl-C in real processes: the loop gets KeyboardInterrupt at once, and nothing is left that would
keep the process alive.
"""

from __future__ import annotations

import signal
import time

import pytest

from loader_processes import finish, python


@pytest.mark.slow
def test_ctrl_c_leaves_no_thread_and_no_process():
    """What is waited for has deadlines of ten seconds and more. Leaving is less work than starting
    was, so a machine under load, where both take long, gives as much time more."""
    for where in ("waiting", "working", "mesh"):
        started = time.monotonic()
        process = python("interrupted.py", where)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", where
        starting = time.monotonic() - started
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert finish(process).splitlines()[-1] == "left []", where
        assert time.monotonic() - started < 5 + starting, where

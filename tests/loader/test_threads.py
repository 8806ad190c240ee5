"""Ctrl-C in real processes: the loop gets KeyboardInterrupt at once, and nothing is left that would keep the process alive."""

from __future__ import annotations

import signal
import time

import pytest

from loader_processes import finish, python


@pytest.mark.slow
def test_ctrl_c_leaves_no_thread_and_no_process():
    running = {where: python("interrupted.py", where) for where in ("waiting", "working", "mesh")}
    for where, process in running.items():
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", where
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        assert finish(process).splitlines()[-1] == "left []", where
        assert time.monotonic() - started < 10, where

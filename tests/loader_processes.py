"""Scripts of tests/loader in interpreters of their own: JAX counts its devices once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import forked

HERE = Path(__file__).parent


def python(script: str, *arguments: object, devices: int = 1) -> subprocess.Popen[str]:
    """`tests/loader/SCRIPT` with so many CPU devices."""
    asked = os.environ.get("XLA_FLAGS", "")
    flags = f"{asked} --xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    command = [sys.executable, str(HERE / "loader" / script), *map(str, arguments)]
    return forked.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

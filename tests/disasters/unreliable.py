"""Preparing from a web server of which some requests fail and some stall, against the same server
when it is healthy.

python tests/disasters/unreliable.py [FILES]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

from disasters.points import contents, difference
from pipelines import texts, tokenizer

LATENCY_S = 0.05
FAILING, STALLING = 0.05, 0.01
IN_FLIGHT = 8
FAULTS = ("429", "500", "503", "reset", "short", "HTML")
# a request for part of a file: path, first and last byte
REQUEST = re.compile(rb"GET (\S+) HTTP/1\.1\r\n(?:.*\r\n)*?Range: bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Measured:
    """requests: of the run in which some failed. different: what its cache has otherwise."""

    healthy_s: float
    failing_s: float
    requests: int
    failed: int
    stalled: int
    different: str

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.failed} failed, {self.stalled} stalled: "
            f"{self.failing_s:.1f} s, healthy {self.healthy_s:.1f} s "
            f"({self.failing_s / self.healthy_s:.2f} times); "
            f"the cache {'differs: ' + self.different if self.different else 'is the same'}"
        )


class _Server:
    """Answers after LATENCY_S. `/failing` and `/healthy` say how from then on; `/counts` tells."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files, self._random = files, random.Random(1)
        self._rates = (0.0, 0.0)
        self._counts = {"requests": 0, "failed": 0, "stalled": 0}

    async def serve(self, told: Any) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answered(await reader.readuntil(b"\r\n\r\n"), writer):
                pass
        writer.transport.abort()

    async def _answered(self, head: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        path = head.split()[1].decode()
        if path in ("/failing", "/healthy"):
            self._rates = (FAILING, STALLING) if path == "/failing" else (0.0, 0.0)
            self._counts = dict.fromkeys(self._counts, 0)
        if path in ("/failing", "/healthy", "/counts"):
            return await self._send(writer, "200 OK", json.dumps(self._counts).encode())
        self._counts["requests"] += 1
        await asyncio.sleep(LATENCY_S)
        drawn = self._random.random()
        failing, stalling = self._rates
        if drawn < stalling:
            self._counts["stalled"] += 1
            await asyncio.sleep(120)
            return False
        if drawn < stalling + failing:
            self._counts["failed"] += 1
            return await self._failed(head, writer, self._random.choice(FAULTS))
        return await self._sent(head, writer)

    async def _failed(self, head: bytes, writer: asyncio.StreamWriter, fault: str) -> bool:
        if fault.isdigit():
            return await self._send(writer, f"{fault} no", b"no")
        if fault == "HTML":
            return await self._send(
                writer, "200 OK", b"<html>" * 1000, "Content-Type: text/html\r\n"
            )
        if fault == "reset":
            return False
        return await self._sent(head, writer, cut=True)

    async def _sent(self, head: bytes, writer: asyncio.StreamWriter, cut: bool = False) -> bool:
        """A part of a file. cut: half of it, then the connection ends."""
        asked = REQUEST.match(head)
        assert asked is not None, head
        data = self._files[asked[1].decode()]
        first, last = int(asked[2]), min(int(asked[3]), len(data) - 1)
        more = f'Content-Range: bytes {first}-{last}/{len(data)}\r\nETag: "{len(data)}"\r\n'
        return await self._send(writer, "206 Part", data[first : last + 1], more, cut=cut)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: str,
        data: bytes,
        more: str = "",
        *,
        cut: bool = False,
    ) -> bool:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode()
        writer.write(head + (data[: len(data) // 2] if cut else data))
        await writer.drain()
        return not cut


@contextlib.contextmanager
def server(files: dict[str, bytes]) -> Iterator[str]:
    """The URL of a server of `files` in a process of its own."""
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(files, there))
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def _serve(files: dict[str, bytes], told: Any) -> None:
    asyncio.run(_Server(files).serve(told))


def measure(num_files: int, folder: Path) -> Measured:
    """Prepares `num_files` files twice, the second time failing: at least two requests a file."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts(40, 3, 30)]
    files = {
        f"/{i}.jsonl": b"".join(lines[(i + j) % len(lines)] for j in range(6)) + b"{}\n" * (i % 3)
        for i in range(num_files)
    }
    with server(files) as url:
        seconds: list[float] = []
        for how in ("healthy", "failing"):
            seconds.append(_prepared(url, [*files], folder / "cache", how))
            (folder / "cache").rename(folder / how)
        counts = _asked(f"{url}/counts")
        different = difference(contents(folder / "healthy"), contents(folder / "failing"))
    return Measured(seconds[0], seconds[1], different=different, **counts)


def _prepared(url: str, names: list[str], cache: Path, how: str) -> float:
    from easypipe import DatasetConfig, Pipeline, PipelineConfig, TokenizeStageConfig
    from easypipe.core.protocols import silent
    from easypipe.sources import files

    _asked(f"{url}/{how}")
    files._whole.cache_clear()
    dataset = DatasetConfig(name="web", data_files=[url + name for name in names], on_error="skip")
    config = PipelineConfig(
        datasets=[dataset],
        seed=1,
        cache_dir=cache,
        default_tokenizer=str(tokenizer()),
        tokenize=TokenizeStageConfig(num_workers=IN_FLIGHT),
    )
    began = time.monotonic()
    pipeline = Pipeline(config, progress=silent).source().tokenize()
    pipeline.prepare()
    return time.monotonic() - began


def _asked(url: str) -> dict[str, int]:
    import urllib.request

    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="easypipe-unreliable-") as name:
        print(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, Path(name)))

"""The table of measured block sizes: its files, and which entry applies to a device and shape.

`easypipe kernels tune` writes it.

The table (`user_table`) is a list of entries

    {"device": "TPU v6 lite", "implementation": "pallas_tpu", "tokens": 8192, "width": 2048,
     "vocab": 32768, "dtype": "bfloat16",
     "blocks": {"name": size, ...}, "source": "measured", "ms": 12.3}

An entry serves every shape of its bucket: `tokens`, `width` and `vocab` are rounded up to powers of
two. A table holds only sizes that were measured on such a device, so `source` is always "measured";
easypipe comes with none. If no entry fits, the caller's default is used: sizes that the
implementation's own accounting chooses, safe for the shape.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import platformdirs
from jax.typing import DTypeLike

from easypipe.core.errors import ConfigError
from easypipe.core.storage import commit_bytes

__all__ = [
    "Entry",
    "blocks_for",
    "bucket",
    "device_kind",
    "extend_table",
    "read_table",
    "user_table",
]


Key = tuple[str, str, int, int, int, str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Block sizes for one bucket of shapes on one kind of device.

    Args:
        device: jax's `device_kind`.
        implementation: The name of the implementation.
        tokens: A power of two, the upper end of the bucket.
        width: A power of two, the upper end of the bucket.
        vocab: A power of two, the upper end of the bucket.
        dtype: The dtype of hidden states and head.
        blocks: The block sizes by name.
        source: "measured".
        ms: The milliseconds of forward and backward pass.
    """

    device: str
    implementation: str
    tokens: int
    width: int
    vocab: int
    dtype: str
    blocks: Mapping[str, int]
    source: Literal["measured"]
    ms: float

    @property
    def key(self) -> Key:
        return self.device, self.implementation, self.tokens, self.width, self.vocab, self.dtype


def bucket(size: int) -> int:
    """Returns the power of two at or above `size`."""
    return 1 << max(0, size - 1).bit_length()


def device_kind() -> str:
    """Returns jax's name of the device for which the program is compiled.

    It is that of the mesh of `jax.set_mesh`, with or without hardware, or of the default device.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.device_kind
    # `default` is a device, the name of a platform, or None; jax's options are not attributes.
    default = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return default.device_kind


def blocks_for(
    device: str,
    implementation: str,
    tokens: int,
    width: int,
    vocab: int,
    dtype: DTypeLike,
    *,
    default: Callable[[], Mapping[str, int]],
) -> dict[str, int]:
    """Returns the block sizes of `default()`, replaced by those of the entry for the shape.

    It is the entry whose bucket contains the shape.

    Raises:
        ConfigError: The entry has a size that `default()` does not have.
    """
    key = (
        device,
        implementation,
        bucket(tokens),
        bucket(width),
        bucket(vocab),
        jnp.dtype(dtype).name,
    )
    sizes, table = dict(default()), _user_entries()
    if key not in table:
        return sizes
    if unknown := sorted(table[key].blocks.keys() - sizes.keys()):
        raise ConfigError(
            at=f"{user_table()}: {implementation}",
            problem=f"no block size is named {', '.join(map(repr, unknown))}",
            have=tuple(sizes),
            fix="Take it out of the entry, or run `easypipe kernels tune` to measure anew.",
        )
    return sizes | dict(table[key].blocks)


def user_table() -> Path:
    """Returns the file that `easypipe kernels tune` writes by default, and that holds block sizes.

    The file need not exist.
    """
    return Path(platformdirs.user_config_dir("easypipe")) / "kernels.json"


def read_table(path: Path) -> list[Entry]:
    """Reads a table.

    Raises:
        ConfigError: The file is not a table; the message names the file and the entry.
    """
    return _parse(path.read_text(encoding="utf-8"), str(path))


def extend_table(path: Path, entries: Iterable[Entry]) -> list[Entry]:
    """Writes `entries` into the table at `path`; they replace those with the same key.

    Returns:
        All entries of the table.
    """
    known = {entry.key: entry for entry in (read_table(path) if path.exists() else ())}
    known |= {entry.key: entry for entry in entries}
    merged = [known[key] for key in sorted(known)]
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join("  " + json.dumps(asdict(entry)) for entry in merged)
    commit_bytes(path, f"[\n{rows}\n]\n".encode())
    return merged


def _parse(text: str, name: str) -> list[Entry]:
    """Reads the entries of a table.

    Raises:
        ConfigError: The text is not a table; the message names the entry.
    """
    fix = "Run `easypipe kernels tune` to write a new one, or remove the file."
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(at=name, problem=f"is not JSON: {error}", fix=fix) from error
    if not isinstance(rows, list):
        raise ConfigError(at=name, problem="is not a list of entries", fix=fix)
    entries = []
    for number, row in enumerate(rows):
        try:
            entry = Entry(**row)
            sizes = [entry.tokens, entry.width, entry.vocab]
            if any(size != bucket(size) for size in sizes):
                raise ValueError(f"tokens, width and vocab must be powers of two, not {sizes}")
            if entry.source != "measured" or not (
                isinstance(entry.ms, float | int) and entry.ms > 0
            ):
                raise ValueError(
                    f"source is {entry.source!r} and ms {entry.ms!r}: a table holds what was "
                    "measured, with its milliseconds"
                )
            if not all(isinstance(size, int) and size >= 0 for size in entry.blocks.values()):
                raise ValueError(f"blocks are not sizes: {entry.blocks}")
        except (TypeError, ValueError) as error:
            raise ConfigError(at=f"{name}: entry {number}", problem=str(error), fix=fix) from error
        entries.append(entry)
    return entries


def _user_entries() -> dict[Key, Entry]:
    path = user_table()
    try:
        changed = path.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    return _read_user(path, changed)


@functools.lru_cache(maxsize=4)
def _read_user(path: Path, changed: int) -> dict[Key, Entry]:
    """Reads the user's table again if `changed`, the file's time, is different."""
    return {entry.key: entry for entry in read_table(path)}

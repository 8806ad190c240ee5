"""Closeable: the base of what `with` closes at its end."""

from __future__ import annotations

from typing import Self


class Closeable:
    """What holds something that `close` lets go; `with` calls it at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""How plan kernels are compiled: on first call, without the GIL, kept on disk where a folder for it can be written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("easypipe")


def jit(function: F) -> F:
    """`numba.njit(nogil=True)` with a disk cache.

    Numba keeps compiled code beside the source, else in the user's cache folder, and raises RuntimeError where neither can be
    written (a read-only image without a home). There the kernels compile in every process: slower to start, equal in result.
    """
    try:
        return cast(F, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError as error:
        logger.debug("no disk cache for %s: %s", function.__name__, error)
        return cast(F, numba.njit(nogil=True)(function))

"""How numba kernels are compiled: at the first call, without the GIL, cached on disk if possible.

Numba is imported when the first kernel is called, so that tokenizing or reading a config does not
wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("easypipe")


def jit(function: F) -> F:
    """Compiles a function with `numba.njit(nogil=True)` and a disk cache when it is first called.

    A function that it calls by a global name may be a kernel or a value of `later`.

    Numba keeps compiled code in the source's folder or the user's cache folder, and raises
    RuntimeError if neither can be written (a read-only image without a home). The kernels are then
    compiled in every process, which starts more slowly and computes the same.
    """
    return cast(F, _Kernel(function))


def later(make: Callable[[], Any]) -> Any:
    """Returns a placeholder for `make()` in the globals of kernels.

    It is for values that cannot be made without importing Numba; `make` is called once.
    """
    return _Later(make)


def ahead() -> None:
    """Imports Numba in a thread, which takes half a second, while the caller waits for I/O."""
    with contextlib.suppress(RuntimeError):  # without a thread the first kernel imports it
        threading.Thread(target=_Later(object).made, name="easypipe-numba", daemon=True).start()


class _Later:
    """A value that is made when it is first needed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._value: Any = None

    def made(self) -> Any:
        """Returns the value, making it under Numba's own lock at the first call.

        Numba's tables of types are not thread safe: while one thread compiles, no other may add to
        them, so both hold Numba's lock. Extensions of other packages also add to them and are
        loaded here first. Otherwise the first thread that compiles would load them without the
        lock, and a second one would not wait for them.
        """
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.entrypoints import init_all

        with global_compiler_lock:
            init_all()
            if self._value is None:
                self._value = self._make()
            return self._value


class _Kernel(_Later):
    """A kernel before its first call.

    After it, its module and each kernel that calls it refer to the compiled function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(functools.partial(_compiled, function))
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self._value or self.made())(*arguments, **named)


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiles a kernel, after everything that it calls by a global name."""
    import numba

    known = function.__globals__
    for name in function.__code__.co_names:
        named = known.get(name)
        if isinstance(named, _Later) and name != function.__name__:
            known[name] = named.made()
    try:
        made = numba.njit(nogil=True, cache=True)(function)
        _drop_foreign_index(made)
    except RuntimeError as error:
        logger.debug("no disk cache for %s: %s", function.__name__, error)
        made = numba.njit(nogil=True)(function)
    if isinstance(known.get(function.__name__), _Later):
        known[function.__name__] = made
    return made


def _drop_foreign_index(kernel: Any) -> None:
    """Deletes a cache index that Numba could not read.

    Numba unpickles its index before it checks that it belongs to this source, and fails if a class
    in it no longer exists, for example after an upgrade of easypipe.
    """
    # private names of numba, which another version may not have
    kept = getattr(getattr(kernel, "_cache", None), "_cache_file", None)
    if kept is None:
        return
    try:
        kept._load_index()
    except (AttributeError, ImportError):
        Path(kept._index_path).unlink(missing_ok=True)

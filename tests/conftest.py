from __future__ import annotations

import gc
import logging
import os
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Of machine code: what is computed, and on which device, stays. It is compiled in a third of the
# time, here and in the processes that tests start.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "True")
# A program of one module of LLVM, and without MLIR's emitters: in a quarter of that. XLA ends a
# process for a flag that it does not know, and jax 0.11 took the second one away.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)
# Pictures of runs are of fewer points, here and in the processes that tests start.
os.environ.setdefault("MATPLOTLIBRC", str(Path(__file__).with_name("matplotlibrc")))

import pytest
from hypothesis import HealthCheck, settings

from strategies import examples

pytest_plugins = ["stores"]

settings.register_profile(
    "easypipe",
    examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("easypipe")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: handed out file by file (see noxfile.py), none of them is
    what one worker ends with alone.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text, chat rows and tokenizers beside the checkout; the tests that need them skip where
    they are absent.
    """
    if not (SHARED / "README.md").is_file():
        pytest.skip("needs ../shared/data beside the checkout")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def _programs_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every Trainer and every process compiles its own step; mostly they are the same ones. What
    one compiles, the others of this run take: all workers, and the processes that they start.

    `EASYPIPE_PROGRAMS` names a folder that several runs share. Jax names a program by its code, its
    options, its devices and its compiler. One that is read while it is written is compiled again,
    with a warning.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # of this run, or of one of its workers, beside those of the others
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    settings = {
        "jax_compilation_cache_dir": os.environ.get("EASYPIPE_PROGRAMS", str(run / "programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_looked_through() -> None:
    """Modules, collected tests and compiled programs stand when a file begins; from then on no
    search for garbage looks through them, least of all those that tests ask for. Those that nobody
    asks for are rarer than usual: tracing makes many objects that live on.
    """
    gc.set_threshold(20_000, 10, 100)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's cache, nor a fault hook or a level of the log that another left."""
    from easypipe.core import storage

    logging.getLogger("easypipe").setLevel(logging.NOTSET)

    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path_factory.getbasetemp() / "easypipe-cache"))
    storage.set_fault_hook(None)

"""What the training tests share: programs that are compiled once for all of them."""

from __future__ import annotations

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def _programs(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled_once(_programs):
    """Every Trainer compiles its own step; mostly they are the same ones. `pytestmark = pytest.mark.usefixtures("compiled_once")`."""
    changes = {
        "jax_compilation_cache_dir": str(_programs),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from hypothesis import HealthCheck, settings

from strategies import examples

pytest_plugins = ["stores"]

settings.register_profile(
    "easypipe", examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("easypipe")

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text, chat rows and tokenizers beside the checkout; the tests that need them skip where they are absent."""
    if not (SHARED / "README.md").is_file():
        pytest.skip("needs ../shared/data beside the checkout")
    return SHARED


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's cache, and none leaves a fault hook behind."""
    from easypipe.core import storage

    monkeypatch.setenv("EASYPIPE_CACHE", str(tmp_path_factory.getbasetemp() / "easypipe-cache"))
    storage.set_fault_hook(None)

"""Fixtures for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests that compute with torch share the cores with the deployments they test. Set before torch is
# imported, and for the same reason as in the engine core (docs/decisions/0002).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _default_model() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pdctl/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF as `pdctl model pull` leaves it; PDCTL_TEST_MODEL overrides."""
    path = Path(os.environ.get("PDCTL_TEST_MODEL") or _default_model())
    if not path.exists():
        pytest.skip(f"the default model is not here ({path}): run `pdctl model pull smollm2-135m`")
    return path

"""Fixtures for every test."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from rdma_lab import IN_GUEST, has_devices
from reference import Greedy, greedy_of

# Tests that compute with torch share the cores with the deployments they test. Set before torch is
# imported, and for the same reason as in the engine core (docs/decisions/0002).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# On a busy machine an example may take any time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

REAL_MODEL = (
    "tests/e2e/",
    "tests/engine/test_engine_parity.py",
    "tests/hosts/test_real_model.py",
    "tests/transfer/test_real_model.py",
)


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


@pytest.fixture(scope="session")
def transformers_greedy(model_path: Path) -> Greedy:
    """Of the default model. Once for all tests: transformers takes long to read it."""
    return greedy_of(model_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real verbs need the guest's devices; in the guest they must be there."""
    if has_devices():
        return
    assert not IN_GUEST, "the guest has no RDMA devices"
    skip = pytest.mark.skip(reason="no RDMA devices here; `make test-rdma` runs these in a guest")
    for item in items:
        if item.get_closest_marker("rdma"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IN_GUEST and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which nothing may be in the guest: {report.longrepr}"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers (`-n 2`, as `make test` does) a file stays in one, for its fixtures. So
    do all files with the real model: they share deployments, and two at once would be slow."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "the real model" if file.startswith(REAL_MODEL) else file

    config.option.loadscopereorder = False  # what takes longest has not the most tests
    return Scheduling(config, log)

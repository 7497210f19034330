"""Fixtures for every test."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from rdma_lab import IN_GUEST, has_devices

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


@pytest.hookimpl(tryfirst=True)  # xdist looks for its marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        _keep_together(items)
    _skip_without_devices(items)


def _keep_together(items: list[pytest.Item]) -> None:
    """With several workers (`-n 2`, as `make test` does) a file stays in one, for its fixtures. So
    do all files with the real model: they share deployments, and two at once would be slow."""
    real = {item.path for item in items if "model_path" in getattr(item, "fixturenames", ())}
    for item in items:
        group = "real model" if item.path in real else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def _skip_without_devices(items: list[pytest.Item]) -> None:
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

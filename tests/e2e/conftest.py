"""Whole deployments of the real model, kept for the session: their tests leave them idle and
alive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import DECODE, PREFILL, Deployment, Lab, guarded, running


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Lab]:
    with guarded(Lab(tmp_path_factory.mktemp("lab"), model_path)) as lab:
        yield lab


@pytest.fixture(scope="session")
def over_shm(lab: Lab) -> Iterator[Deployment]:
    yield from running(lab, "over-shm", prefill=[PREFILL], decode=[DECODE | {"transfer": "shm"}])


@pytest.fixture(scope="session")
def over_tcp(lab: Lab) -> Iterator[Deployment]:
    yield from running(lab, "over-tcp", prefill=[PREFILL], decode=[DECODE | {"transfer": "tcp"}])


@pytest.fixture(scope="session")
def mixed(lab: Lab) -> Iterator[Deployment]:
    yield from running(lab, "mixed", mixed=[{"host": "local", "threads": 2, "kv_cache": "256MiB"}])

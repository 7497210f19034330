"""The soak at small size: `make soak` runs it for minutes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from soak import Settings, soak

pytestmark = pytest.mark.timeout(180)


def test_random_faults_never_give_a_wrong_token_or_keep_a_block(tmp_path: Path) -> None:
    """What goes wrong is an assertion in tests/soak.py; here, that something happened at all."""
    tally = asyncio.run(soak(tmp_path, Settings(seed=3, seconds=6.0, longest_stop_s=2.0)))
    assert tally.completed > 20
    assert tally.cancelled and tally.failed and tally.faults

"""`pdctl bench transfer` on real deployments: every path is measured, and nothing is kept."""

from __future__ import annotations

import json

import pytest
from lab import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_real_path_is_measured(kind: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(f"over_{kind}")
    result = deployment.lab.pdctl("bench", "transfer", deployment.name, "--rounds", "1", "--json")
    assert result.returncode == 0, result.stderr
    (pair,) = json.loads(result.stdout)["pairs"]
    assert (pair["path"], pair["error"]) == (kind, None)
    assert pair["one_block_s"]["p50"] > 0
    assert [row["run_blocks"] for row in pair["rows"]] == [1, 4, 16]
    assert all(row["path_gb_s"] > 0 and row["ratio_to_limit"] > 0 for row in pair["rows"])
    assert all(s["idle"] for s in deployment.status()["services"] if s["role"] != "router")

"""64 machines at once: one login for each command, all of them seen to, nothing left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, why_not
from many_hosts import many_hosts

pytestmark = pytest.mark.ssh
COUNT = 64


@pytest.fixture
def many(tmp_path: Path) -> Iterator[tuple[Cluster, str]]:
    if reason := why_not():
        pytest.skip(reason)
    cluster, path = many_hosts(tmp_path, COUNT)
    try:
        yield cluster, path
    finally:
        cluster.close()


def test_up_status_down_of_64(many: tuple[Cluster, str]) -> None:
    cluster, path = many
    machines = list(cluster.machines.values())
    for number, args in enumerate((("up", path), ("status", "--json"), ("down", "demo")), start=1):
        done = cluster.pdctl(*args)
        assert done.rc == 0, done.err
        assert {m.logins() for m in machines} == {number}
        if "--json" in args:
            found = json.loads(done.out)
            assert found["healthy"] and found["hosts_ok"] == COUNT
            assert {s["host"] for s in found["services"]} == set(cluster.machines)
    assert not [m.name for m in machines if not m.clean()]

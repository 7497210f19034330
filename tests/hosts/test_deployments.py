"""Deployments over several machines, through the command line, as a user runs them."""

from __future__ import annotations

import json

import pytest
from cluster import Cluster

pytestmark = pytest.mark.ssh


def test_three_machines_from_up_to_down(cluster: Cluster) -> None:
    machines = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = str(cluster.topology())
    up = cluster.pdctl("up", path)
    assert up.rc == 0, up.err
    assert [m.logins() for m in machines] == [1, 1, 1]
    assert [len(m.processes()) for m in machines] == [2, 2, 2], "a service and its supervisor each"
    again = cluster.pdctl("up", path, "--json")
    assert again.rc == 0 and len(json.loads(again.out)["kept"]) == 3, again.err
    status = cluster.pdctl("status", "--json")
    found = json.loads(status.out)
    assert status.rc == 0 and found["healthy"], status.out
    assert {s["name"]: s["host"] for s in found["services"]} == {
        "router": "gpu-a",
        "prefill-0": "gpu-b",
        "decode-0": "gpu-c",
    }
    assert [m.logins() for m in machines] == [3, 3, 3], "one connection for each command"
    down = cluster.pdctl("down", "demo")
    assert down.rc == 0, down.err
    assert down.err.count(" stopped ") == 3, "each once, by the host that had it"
    assert [m.logins() for m in machines] == [4, 4, 4]
    for machine in machines:
        assert machine.clean(), machine.leftovers()
    assert cluster.pdctl("down", "demo").rc == 0

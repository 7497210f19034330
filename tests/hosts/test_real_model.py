"""Prefill, decode and router on three machines, with the real model: KV goes over their network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster import Cluster

pytestmark = [pytest.mark.ssh, pytest.mark.e2e, pytest.mark.model]


@pytest.mark.timeout(400)
def test_three_machines_answer(cluster: Cluster, model_path: Path) -> None:
    a, b, c = cluster.add("front", "gpu-a", "gpu-b", shm_mib=512)
    hosts = {
        key: cluster.host_section(key) | {"python": sys.executable} for key in cluster.machines
    }
    sizes = {"threads": 1, "kv_cache": "128MiB"}
    path = cluster.topology(
        model=str(model_path),
        hosts=hosts,
        startup_timeout=100,
        prefill=[{"host": "gpu-a", **sizes}],
        decode=[{"host": "gpu-b", "cpu_buffer": "128MiB", **sizes}],
    )
    up = cluster.pdctl("up", str(path), timeout=110)
    assert up.rc == 0, up.err
    answer = cluster.pdctl("ask", "What is the capital of France?", "--max-tokens", "16")
    assert answer.rc == 0 and "Paris" in answer.out, answer.err
    assert "tcp" in answer.err, "it says which way the KV went"
    status = cluster.pdctl("status", "--json")
    found = json.loads(status.out)
    assert status.rc == 0 and found["healthy"] and found["kv_bytes"] > 0
    services = {s["name"]: s for s in found["services"]}
    assert services["decode-0"]["peers"] == {"prefill-0": "tcp"}
    assert services["decode-0"]["kv_bytes"].get("tcp") == found["kv_bytes"]
    assert all(s["idle"] for s in found["services"] if s["role"] != "router")
    assert len(c.segments()) == 1, "the CPU buffer lies on decode's machine"
    down = cluster.pdctl("down", "demo")
    assert down.rc == 0, down.err
    for machine in (a, b, c):
        assert machine.clean(), machine.leftovers()

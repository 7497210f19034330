"""Scaling, restarting and draining over several machines, through their sshd and from two laptops'
worth of knowledge: with the local cache, and without it."""

from __future__ import annotations

import json
import shutil

import pytest
from cluster import Cluster, Completed

pytestmark = pytest.mark.ssh


def test_scaled_restarted_and_drained_over_ssh(cluster: Cluster) -> None:
    machines = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = cluster.topology()
    up = cluster.pdctl("up", str(path))
    assert up.rc == 0, up.err
    path.unlink()
    shutil.rmtree(cluster.env["XDG_STATE_HOME"])

    def services() -> dict[str, dict[str, object]]:
        found = cluster.pdctl("status", "demo", "--host", machines[0].address, "--json")
        assert found.rc == 0, found.err
        return {s["name"]: s for s in json.loads(found.out)["services"]}

    def once(*args: str) -> Completed:
        """With one login on each machine, that of the given address aside: it is asked first."""
        had = [m.logins() for m in machines]
        done = cluster.pdctl(*args)
        assert [m.logins() for m in machines] == [had[0] + 1, had[1] + 2, had[2] + 1], done.err
        return done

    before = services()
    at = ("--name", "demo", "--host", machines[1].address)
    scaled = once("scale", "decode=2", "prefill=2", *at, "--json")
    assert scaled.rc == 0, scaled.err
    assert sorted(json.loads(scaled.out)["started"]) == ["decode-1", "prefill-1"]
    now = services()
    assert {n: s["host"] for n, s in now.items() if n.endswith("-1")} == {
        "prefill-1": "gpu-b",
        "decode-1": "gpu-c",
    }
    assert all(now[name]["pid"] == before[name]["pid"] for name in before)

    restarted = once("restart", "--rolling", *at)
    assert restarted.rc == 0, restarted.err
    renewed = services()
    assert renewed["router"]["pid"] == now["router"]["pid"]
    assert all(renewed[name]["pid"] != now[name]["pid"] for name in now if name != "router")

    assert once("drain", "decode-0", *at).rc == 0
    status = cluster.pdctl("status", "demo")
    assert status.rc == 3 and "draining" in status.out
    assert cluster.pdctl("drain", "decode-0", "--undo", *at).rc == 0
    without = cluster.pdctl("scale", "decode=1", *at)
    assert without.rc == 2 and "this would stop decode-1 of demo" in without.err
    less = cluster.pdctl("scale", "decode=1", "--yes", *at)
    assert less.rc == 0, less.err
    assert set(services()) == {"router", "prefill-0", "prefill-1", "decode-0"}
    assert cluster.pdctl("down", "demo").rc == 0
    for machine in machines:
        assert machine.clean(), machine.leftovers()

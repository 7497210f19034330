"""`pdctl doctor` on machines with one fault each, and on sound ones."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
from cluster import Cluster
from supervision import eventually

pytestmark = pytest.mark.ssh


def doctor(cluster: Cluster, path: str, rc: int) -> dict[str, Any]:
    done = cluster.pdctl("doctor", path, "--json")
    assert done.rc == rc, done.out + done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def severe(found: dict[str, Any]) -> list[str]:
    return [f"{t['where']}: {t['what']}; {t['do']}" for t in found["troubles"] if t["severe"]]


def test_sound_hosts_before_and_while_they_serve(cluster: Cluster) -> None:
    machines = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = str(cluster.topology())
    found = doctor(cluster, path, 0)
    assert severe(found) == []
    (pair,) = found["pairs"]
    assert (pair["prefill"], pair["decode"], pair["path"]) == ("prefill-0", "decode-0", "tcp")
    assert pair["reached"] and pair["bytes_per_second"]["tcp"] > 1e6
    wanted = {(c["from"], c["to"], c["service"]) for c in found["connections"]}
    assert {(None, "gpu-a", "router"), ("gpu-c", "gpu-b", "prefill-0")} <= wanted
    assert all(not c["error"] for c in found["connections"])
    for host in found["hosts"]:
        assert host["versions"]["code"] and host["shm"]["total"] == 64 << 20
        assert "eth0" in host["addresses"]
    assert all(m.clean() for m in machines), "it leaves nothing"

    assert cluster.pdctl("up", path).rc == 0
    text = cluster.pdctl("doctor", path)
    assert text.rc == 0, text.out + text.err
    assert "8 of 8 connections work" in text.out and "nothing is in the way" in text.out
    assert cluster.pdctl("down", "demo").rc == 0


def test_each_fault_is_named_with_what_to_do(cluster: Cluster) -> None:
    _, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")

    server = "import socket,time; s = socket.create_server(('', 9100)); time.sleep(600)"
    b.spawn(sys.executable, "-c", server)
    eventually(lambda: 9100 in b.listening(), 30)
    prefill = [{"host": "gpu-b", "kv_cache": "1MiB", "peer_port": 9100}]
    big = [{"host": "gpu-c", "kv_cache": "1MiB", "cpu_buffer": "1GiB"}]
    port, room = severe(doctor(cluster, str(cluster.topology(prefill=prefill, decode=big)), 1))
    assert port.startswith("gpu-b: prefill-0: port 9100") and "taken by pid" in port
    assert room.startswith("gpu-c: decode-0: cpu_buffer needs 1GiB") and "64MiB" in room
    for pid, text in b.processes().items():
        if "9100" in text:
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: 9100 not in b.listening(), 30)

    # Packets from b to c are lost: the laptop still reaches both.
    b.sh(f"ip route add blackhole {c.address}/32")
    found = doctor(cluster, str(cluster.topology()), 1)
    lines = severe(found)
    assert any(x.startswith("gpu-c -> gpu-b: prefill-0 at") and "no answer" in x for x in lines)
    assert found["pairs"][0]["reached"] is False
    b.sh(f"ip route del blackhole {c.address}/32")


def test_addresses_that_lead_nowhere(cluster: Cluster) -> None:
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    hosts = {k: cluster.host_section(k) for k in cluster.machines}

    c.sh("ip link add docker0 type bridge; ip addr add 172.18.0.1/16 dev docker0")
    wrong = {"gpu-b": "10.77.99.99", "gpu-c": "172.18.0.1"}
    changed = hosts | {k: hosts[k] | {"advertise": address} for k, address in wrong.items()}
    on_b, on_c = severe(doctor(cluster, str(cluster.topology(hosts=changed)), 1))
    assert on_b.startswith("gpu-b: 10.77.99.99 is no address of it") and b.address in on_b
    assert on_c.startswith("gpu-c: 172.18.0.1 is on docker0") and c.address in on_c

    # The file alone tells: nobody is asked.
    changed = hosts | {"gpu-b": hosts["gpu-b"] | {"advertise": "172.17.0.1"}}
    path = str(cluster.topology(hosts=changed))
    a.stop_sshd()
    for command in ("validate", "up", "doctor"):
        done = cluster.pdctl(command, path)
        assert done.rc == 2 and "172.17.0.1 does not lead here" in done.err


def test_a_host_without_python_and_one_that_is_off(cluster: Cluster) -> None:
    _, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = str(cluster.topology())
    b.sh("for p in $(which -a python3); do mount --bind /dev/null $(readlink -f $p); done")
    lines = severe(doctor(cluster, path, 1))
    assert any(x.startswith("gpu-b: ") and "pdctl needs python3" in x for x in lines), lines
    c.stop_sshd()
    found = doctor(cluster, path, 5)
    assert [h["ok"] for h in found["hosts"] if h["host"] == "gpu-a"] == [True]
    assert any(x.startswith("gpu-c") for x in severe(found))

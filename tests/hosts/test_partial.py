"""Some hosts fail: each one's result is shown, and the others are seen to without waiting."""

from __future__ import annotations

import json
import re
import signal

import pytest
from cluster import Cluster
from supervision import eventually

pytestmark = pytest.mark.ssh
CONNECT_S = 2


@pytest.mark.parametrize("how", ["off", "refuses", "silent", "frozen"])
def test_status_and_down_with_a_host_that_fails(cluster: Cluster, how: str) -> None:
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = str(cluster.topology())
    assert cluster.pdctl("up", path).rc == 0
    cluster.write_ssh_config(gpu_c=f"  ConnectTimeout {CONNECT_S}")
    {"off": c.halt, "refuses": c.stop_sshd, "silent": c.go_silent, "frozen": c.freeze_sshd}[how]()

    status = cluster.pdctl("status", "--json")
    found = json.loads(status.out)
    assert status.rc == 5 and not found["healthy"]
    assert {s["name"] for s in found["services"]} == {"router", "prefill-0"}
    assert list(found["unreachable"]) == ["gpu-c"] and found["hosts_ok"] == 2
    cause = {
        "off": "No route to host|no answer within",
        "refuses": "Connection refused",
        "silent": f"no answer within {CONNECT_S} s",
        "frozen": f"no SSH server greets within {CONNECT_S} s",
    }[how]
    assert re.search(f"gpu-c: connect: .*({cause})", found["unreachable"]["gpu-c"])

    down = cluster.pdctl("down", "demo")
    assert down.rc == 5, down.err
    assert a.clean() and b.clean(), (a.leftovers(), b.leftovers())
    assert re.search(f"warning: gpu-c: connect: .*({cause})", down.err)
    assert "demo is NOT down" in down.out and "2 hosts ok, 1 failed" in down.out

    cluster.write_ssh_config()
    if how == "off":
        cluster.boot(c)
    else:
        {"refuses": c.start_sshd, "silent": c.be_heard, "frozen": c.thaw_sshd}[how]()
    assert cluster.pdctl("down", "demo").rc == 0, "it is remembered that something is left there"
    assert c.clean(), c.leftovers()


def test_a_stopped_host_delays_no_other(cluster: Cluster) -> None:
    """The others are down long before the silent one is given up."""
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    assert cluster.pdctl("up", str(cluster.topology())).rc == 0
    b.go_silent()
    cluster.write_ssh_config(gpu_b="  ConnectTimeout 60")
    down = cluster.start_pdctl("down", "demo")
    try:
        eventually(lambda: a.clean() and c.clean(), 30)
        assert down.poll() is None, "it still waits for the silent one"
    finally:
        down.kill()
        down.communicate()
    b.be_heard()
    assert cluster.pdctl("down", "demo").rc == 0
    assert b.clean()


def test_up_starts_nothing_when_hosts_fail_and_names_each(cluster: Cluster) -> None:
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = str(cluster.topology())
    b.stop_sshd()
    (c.disk / "authorized_keys").write_text("")
    up = cluster.pdctl("up", path)
    assert up.rc == 5
    eventually(a.clean)
    assert re.search(r"error: gpu-b: connect: .* Connection refused; the machine is on", up.err)
    assert re.search(r"error: gpu-c: authenticate: root@\S+ refuses .*/key; is the key", up.err)
    assert "error: 1 ok, 2 failed" in up.err
    plan = cluster.pdctl("plan", path)
    assert plan.rc == 5 and "gpu-b" in plan.err and "gpu-c" in plan.err
    logs = cluster.pdctl("logs", "--file", path)
    assert logs.rc == 5, "there may be some where nobody could look"


def test_a_host_that_is_gone_for_good_does_not_hold_up_the_rest(cluster: Cluster) -> None:
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    assert cluster.pdctl("up", str(cluster.topology())).rc == 0
    c.halt()
    cluster.write_ssh_config(gpu_c=f"  ConnectTimeout {CONNECT_S}")
    path = str(cluster.topology(decode=[{"host": "gpu-b", "cpu_buffer": "1MiB"}]))
    up = cluster.pdctl("up", path)
    assert up.rc == 0, up.err
    assert "gpu-c" in up.err
    assert cluster.pdctl("down", "demo").rc == 5
    assert a.clean() and b.clean()


def test_an_interrupt_does_not_wait_for_who_is_silent(cluster: Cluster) -> None:
    machines = cluster.add("gpu-a", "gpu-b")
    path = str(cluster.topology())
    machines[1].go_silent()
    cluster.write_ssh_config(gpu_b="  ConnectTimeout 600")
    for args in (("up", path), ("status", "-f", path), ("down", "-f", path)):
        logins = machines[0].logins()
        pdctl = cluster.start_pdctl(*args)
        try:
            eventually(lambda had=logins: machines[0].logins() > had, 30)
            pdctl.send_signal(signal.SIGTERM)
            _, err = pdctl.communicate(timeout=60)
        finally:
            pdctl.kill()
            pdctl.wait()
        assert pdctl.returncode == 130 and "Traceback" not in err, err
    assert eventually(machines[0].clean, 30)


def test_an_interrupted_down_does_not_wait_for_who_does_not_end(cluster: Cluster) -> None:
    machines = cluster.add("gpu-a", "gpu-b", "gpu-c")
    deaf = {"host": "gpu-c", "cpu_buffer": "1MiB", "env": {"STUB_IGNORE_TERM": "1"}}
    assert cluster.pdctl("up", str(cluster.topology(decode=[deaf]))).rc == 0
    down = cluster.start_pdctl("down", "demo", "--timeout", "600")
    try:
        eventually(lambda: not machines[1].listening(), 30)
        down.send_signal(signal.SIGINT)
        _, err = down.communicate(timeout=60)
    finally:
        down.kill()
        down.wait()
    assert down.returncode == 130, err
    assert "stopped: prefill-0, router; still running, or about to end: decode-0\n" in err
    assert machines[2].listening(), "it still has most of its ten minutes"
    assert cluster.pdctl("down", "demo", "--timeout", "1", timeout=60).rc == 0


def test_a_host_that_falls_silent_in_the_middle(cluster: Cluster) -> None:
    """It is given up once, also by the rollback, and the others are as before."""
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    late = {"host": "gpu-b", "env": {"STUB_DELAY": "600"}}
    up = cluster.start_pdctl("up", str(cluster.topology(prefill=[late])))
    try:
        eventually(lambda: all(m.listening() for m in (a, b, c)), 60)
        c.go_silent()
        _, err = up.communicate(timeout=120)
    finally:
        up.kill()
        up.wait()
    assert up.returncode == 5, err
    assert re.search(r"error: gpu-c: command: no answer within \d+ s, nor to anything else", err)
    assert "not rolled back there: gpu-c" in err
    assert eventually(lambda: a.clean() and b.clean(), 30), (a.leftovers(), b.leftovers())
    c.be_heard()
    eventually(lambda: cluster.pdctl("down", "demo").rc == 0, 60)
    assert eventually(c.clean, 30), c.leftovers()

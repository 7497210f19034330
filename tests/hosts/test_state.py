"""State lies on the hosts: another laptop, an edited file, a hung operator, a host that returns."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, Completed
from supervision import eventually

pytestmark = pytest.mark.ssh
ALL = "gpu-a,gpu-b,gpu-c"


@pytest.fixture
def elsewhere(cluster: Cluster, tmp_path: Path) -> Callable[..., Completed]:
    """pdctl on another laptop: it reaches the machines, and remembers nothing."""
    env = {"PDCTL_HOME": str(tmp_path / "other"), "XDG_STATE_HOME": str(tmp_path / "other-state")}
    return lambda *args: cluster.pdctl(*args, **env)


def names(status: Completed) -> set[str]:
    return {s["name"] for s in json.loads(status.out)["services"]}


def test_another_laptop_and_an_edited_file(
    cluster: Cluster, elsewhere: Callable[..., Completed], tmp_path: Path
) -> None:
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    group = {"kv_cache": "1MiB", "cpu_buffer": "1MiB"}
    both = [{"host": "gpu-b", **group}, {"host": "gpu-c", **group}]
    path = str(cluster.topology(decode=both))
    assert cluster.pdctl("up", path).rc == 0

    # One host's address leads to the others.
    status = elsewhere("status", "--json", "--host", b.address)
    assert status.rc == 0, status.err
    assert names(status) == {"router", "prefill-0", "decode-0", "decode-1"}
    logs = elsewhere("logs", "--json").out.splitlines()
    assert {(line["service"], line["host"]) for line in map(json.loads, logs)} == {
        ("router", "gpu-a"),
        ("prefill-0", "gpu-b"),
        ("decode-0", "gpu-b"),
        ("decode-1", "gpu-c"),
    }
    where = elsewhere("exec", "decode-1", "--", "sh", "-c", "hostname; echo $HOME; exit 9")
    assert (where.rc, where.out.split()) == (9, ["gpu-c", str(c.home)])
    assert elsewhere("exec", "--host", "gpu-b", "--", "hostname").out == "gpu-b\n"
    saved = elsewhere("collect", "-o", str(tmp_path / "bundle"))
    assert saved.rc == 0, saved.err
    found = {str(p.relative_to(tmp_path / "bundle")) for p in (tmp_path / "bundle").rglob("*")}
    assert {"gpu-a/router/out.log", "gpu-b/prefill-0/out.log", "gpu-c/facts.json"} <= found

    # A host left the file: its services are orphans, and go by request.
    hosts = {key: cluster.host_section(key) for key in ("gpu-a", "gpu-b")}
    cluster.topology(hosts=hosts, decode=both[:1])
    services = json.loads(elsewhere("status", "--json", "-f", path).out)["services"]
    assert [s["name"] for s in services if s["orphan"]] == ["decode-1"]
    plan = elsewhere("plan", path)
    assert "remove" in plan.out and "orphan: not in the topology" in plan.out, plan.err
    gone = elsewhere("down", "--orphans", "-f", path)
    assert gone.rc == 0 and c.clean(), (gone.err, c.leftovers())

    down = elsewhere("down", "--host", "gpu-b")
    assert down.rc == 0 and "3 stopped" in down.out, down.err
    assert all(m.clean() for m in (a, b)), [m.leftovers() for m in (a, b)]
    audit = json.loads(elsewhere("audit", "demo", "--json", "--host", ALL).out)["entries"]
    done = {(e["host"], e["command"], e["do"]) for e in audit}
    assert {(h, "up", "start") for h in ("gpu-a", "gpu-b", "gpu-c")} <= done
    assert {("gpu-c", "down --orphans", "stop"), ("gpu-a", "down", "stop")} <= done
    # The first laptop still thinks that it runs; the hosts know better.
    assert "there is no deployment demo" in cluster.pdctl("status", "demo").err


def test_the_lock_of_an_operator_who_hangs(
    cluster: Cluster, elsewhere: Callable[..., Completed]
) -> None:
    """Its connections stay open and nothing comes, as if the network broke without a word."""
    machines = cluster.add("gpu-a", "gpu-b")
    path = str(cluster.topology(prefill=[{"host": "gpu-b", "env": {"STUB_DELAY": "600"}}]))
    hung = cluster.start_pdctl("up", path)
    try:
        eventually(lambda: all(m.processes() for m in machines), 30)
        eventually(lambda: len(machines[1].listening()) > 0, 30)
        hung.send_signal(signal.SIGSTOP)
        refused = elsewhere("down", "-f", path)
        assert refused.rc == 4 and f"pid {hung.pid}" in refused.err, refused.err
        shown = json.loads(elsewhere("lock", "show", "-f", path, "--json").out)["holders"]
        assert [(h["host"], h["command"]) for h in shown] == [("gpu-a", "up"), ("gpu-b", "up")]
        assert elsewhere("lock", "break", "-f", path).rc == 2
        assert elsewhere("lock", "break", "-f", path, "-y").rc == 0
        assert elsewhere("down", "-f", path, "--timeout", "1").rc == 0
    finally:
        hung.send_signal(signal.SIGCONT)
        hung.communicate(timeout=60)
    assert hung.returncode != 0
    for machine in machines:
        assert eventually(machine.clean, 30), machine.leftovers()


def test_a_host_that_is_lost_and_found_while_following(cluster: Cluster) -> None:
    a, b, _ = cluster.add("gpu-a", "gpu-b", "gpu-c")
    assert cluster.pdctl("up", str(cluster.topology())).rc == 0
    log = b.base / "demo" / "prefill-0" / "out.log"
    follow = cluster.start_pdctl("logs", "-f", "--json", "-n", "0")
    heard: list[dict[str, str]] = []
    assert follow.stdout is not None
    os.set_blocking(follow.stdout.fileno(), False)

    def hears(event: str, host: str, line: str = "") -> bool:
        assert follow.stdout is not None
        heard.extend(map(json.loads, filter(None, (follow.stdout.readline() for _ in range(99)))))
        return any((e["event"], e["host"]) == (event, host) and line in e["line"] for e in heard)

    def say(line: str) -> bool:
        with log.open("a") as f:
            f.write(f"{line}\n")
        time.sleep(0.2)
        return hears("line", "gpu-b", line)

    try:
        eventually(lambda: say("before"), 30)
        b.halt()
        eventually(lambda: hears("lost", "gpu-b"), 60)
        with log.open("a") as f:
            f.write("while it was off\n")
        cluster.boot(b)
        eventually(lambda: hears("found", "gpu-b"), 60)
        eventually(lambda: hears("line", "gpu-b", "while it was off"), 30)
        assert not any(e["host"] == "gpu-a" and e["event"] == "lost" for e in heard)
    finally:
        # Not SIGINT: what runs in the background of a shell ignores it.
        follow.send_signal(signal.SIGTERM)
        _, err = follow.communicate(timeout=30)
    assert follow.returncode == 130, err
    assert cluster.pdctl("down", "demo").rc == 0
    assert a.clean() and b.clean()

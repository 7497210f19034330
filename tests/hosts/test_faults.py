"""What goes wrong on hosts, as a user meets it. After each: nothing of the deployment is left
anywhere, and bystanders live."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Machine
from supervision import eventually, gone

pytestmark = pytest.mark.ssh
CRASH = Path(__file__).with_name("crash_pdctl.py")
# Named like a service of pdctl, and run by the same interpreter. Nobody may touch it.
ALIKE = ("-c", "import time; time.sleep(600)", "-m", "runtime", "worker", "--config", "worker.json")


@pytest.fixture
def bystander(cluster: Cluster) -> Iterator[Callable[[Machine], int]]:
    """Starts one on a machine; at the end all of them must live."""
    started = []

    def start(machine: Machine) -> int:
        process = machine.spawn(sys.executable, *ALIKE)
        started.append((machine, process))
        return int(eventually(lambda: next(iter(strangers(machine)), 0), 20))

    yield start
    for machine, process in started:
        assert process.poll() is None, f"a bystander on {machine.name} was ended"
        process.kill()
        process.wait()


def strangers(machine: Machine) -> list[int]:
    return [p for p, command in machine.processes().items() if ALIKE[1] in command]


def clean(machine: Machine) -> bool:
    """But for bystanders."""
    left = machine.leftovers()
    left["processes"] = {p: c for p, c in left["processes"].items() if p not in strangers(machine)}
    return not any(left.values())


def eventually_clean(machine: Machine) -> bool:
    """A shim whose pdctl was killed needs a moment to see it."""
    with contextlib.suppress(AssertionError):
        eventually(lambda: clean(machine), 20)
    return clean(machine)


def taken_down(cluster: Cluster) -> None:
    """`down` succeeds as soon as what a killed pdctl had asked for has ended."""
    last = []

    def down() -> bool:
        last[:] = [cluster.pdctl("down", "demo", "--timeout", "1")]
        return last[0].rc == 0

    eventually(down, 60)
    for machine in cluster.machines.values():
        assert eventually_clean(machine), machine.leftovers()


def test_a_full_disk(cluster: Cluster) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    b.base.mkdir(mode=0o700)
    b.sh(f"mount -t tmpfs -o size=64k none {b.base}")
    path = str(cluster.topology())
    up = cluster.pdctl("up", path)
    assert up.rc == 1, up.err
    assert re.search("gpu-b: .*No space left on device", up.err)
    assert "make room" in up.err
    eventually(lambda: clean(a) and not b.processes(), 20)
    # Room enough for the shim, and then not for a service.
    b.sh(f"mount -o remount,size=8m {b.base}")
    assert cluster.pdctl("plan", path).rc == 3, "there is something to start"
    b.sh(f"dd if=/dev/zero of={b.base}/.shim/full bs=1k 2>/dev/null || true")
    up = cluster.pdctl("up", path)
    assert up.rc == 1 and re.search("gpu-b: .*No space left on device", up.err), up.err
    b.sh(f"rm {b.base}/.shim/full")
    taken_down(cluster)


def test_no_python_there(cluster: Cluster) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    for folder in b.sh("echo $PATH").strip().split(":"):
        if os.path.exists(f"{folder}/python3"):
            b.sh(f"mount --bind /etc/hostname {folder}/python3")
    up = cluster.pdctl("up", str(cluster.topology()))
    assert up.rc == 1 and "gpu-b: python3 cannot be run" in up.err, up.err
    assert "pdctl needs python3 (3.8 or newer) there" in up.err
    eventually(lambda: clean(a) and clean(b), 20)
    # Its own interpreter for services is another matter.
    hosts = {key: cluster.host_section(key) for key in cluster.machines}
    hosts["gpu-a"]["python"] = "/nonexistent/python"
    only = {"router": {"host": "gpu-a"}, "mixed": [{"host": "gpu-a"}], "prefill": [], "decode": []}
    up = cluster.pdctl("up", str(cluster.topology("other", hosts=hosts, **only)))
    assert up.rc == 1 and "gpu-a: /nonexistent/python does not exist" in up.err, up.err
    eventually(lambda: clean(a), 20)


def test_a_port_taken_by_a_stranger(cluster: Cluster, bystander: Callable[[Machine], int]) -> None:
    (a,) = cluster.add("gpu-a")
    bystander(a)
    server = a.spawn(sys.executable, "-m", "http.server", "8000")
    try:
        eventually(lambda: 8000 in a.listening(), 20)
        up = cluster.pdctl("up", str(cluster.topology()))
        assert up.rc == 1
        assert re.search(r"gpu-a: router: port 8000 on \S+ is taken by pid \d+ \(python", up.err)
        assert cluster.pdctl("down", "demo").rc == 0
        assert server.poll() is None
        assert a.listening() == {8000} and not a.files()
    finally:
        server.kill()
        server.wait()


def test_two_operators_at_once(cluster: Cluster) -> None:
    machines = cluster.add("gpu-a", "gpu-b", "gpu-c")
    path = str(cluster.topology())
    other = str(cluster.laptop / "other-state")
    runs = [cluster.start_pdctl("up", path), cluster.start_pdctl("up", path, XDG_STATE_HOME=other)]
    errors = [run.communicate(timeout=90)[1] for run in runs]
    codes = sorted(run.returncode for run in runs)
    assert codes in ([0, 0], [0, 4]), errors
    if 4 in codes:
        assert any(re.search("locked by .*up.* of", e) for e in errors)
    found = json.loads(cluster.pdctl("status", "--json").out)
    assert found["healthy"] and len(found["services"]) == 3
    assert [len(m.processes()) for m in machines] == [2, 2, 2]
    runs = [cluster.start_pdctl("down", "demo"), cluster.start_pdctl("up", path)]
    for run in runs:
        run.communicate(timeout=90)
    taken_down(cluster)


def _killed_at(cluster: Cluster, step: int, *args: str) -> bool:
    """Kill pdctl when it has sent this many messages to hosts. False: it has ended with fewer."""
    argv = cluster.on_laptop(sys.executable, str(CRASH), str(step), *args)
    run = subprocess.run(
        argv, env=cluster.env, cwd=cluster.laptop, capture_output=True, text=True, timeout=60
    )
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return run.returncode != 0


@pytest.mark.timeout(400)
def test_killed_at_every_step_of_up(cluster: Cluster, bystander: Callable[[Machine], int]) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    bystander(a)
    bystander(b)
    path = str(cluster.topology())
    steps = 1
    while _killed_at(cluster, steps, "up", path):
        taken_down(cluster)
        steps += 1
    assert steps > 16, "it has looked, locked, registered and started on both"
    assert cluster.pdctl("status").rc == 0
    taken_down(cluster)


@pytest.mark.timeout(400)
def test_killed_at_every_step_of_down(
    cluster: Cluster, bystander: Callable[[Machine], int]
) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    bystander(a)
    path = str(cluster.topology())
    steps = 1
    while True:
        up = cluster.pdctl("up", path)
        assert up.rc == 0, up.err
        if not _killed_at(cluster, steps, "down", "demo", "--timeout", "1"):
            break
        taken_down(cluster)
        steps += 1
    assert steps > 8, "it has locked, looked, stopped and purged on both"
    assert clean(a) and clean(b)


def test_a_reboot(cluster: Cluster) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    path = str(cluster.topology())
    assert cluster.pdctl("up", path).rc == 0
    cluster.reboot(b)
    status = cluster.pdctl("status", "--json")
    assert status.rc == 3
    found = {s["name"]: s for s in json.loads(status.out)["services"]}
    for name in ("prefill-0", "decode-0"):
        assert (found[name]["state"], found[name]["host"]) == ("lost", "gpu-b")
        assert "the host was rebooted" in found[name]["reason"]
    again = cluster.pdctl("up", path)
    assert again.rc == 0, again.err
    assert [len(m.processes()) for m in (a, b)] == [2, 4]
    cluster.reboot(b)
    taken_down(cluster)


def test_a_pid_that_means_another_now(cluster: Cluster) -> None:
    (a,) = cluster.add("gpu-a")
    assert cluster.pdctl("up", str(cluster.topology())).rc == 0
    record = json.loads((a.base / "demo" / "decode-0" / "identity.json").read_text())
    wanted = record["service"]["pid"]
    for part in ("shim", "service"):
        a.sh(f"kill -KILL {record[part]['pid']}")
    eventually(lambda: not a.sh(f"test -e /proc/{wanted} && echo there || true"), 20)
    claim = f"echo {wanted - 1} > /proc/sys/kernel/ns_last_pid; sleep 600 >&2 & echo $!"
    for _ in range(20):  # somebody else may get it first
        other = int(a.sh(f"({claim}) 2>/dev/null"))
        if other == wanted:
            break
        a.sh(f"kill {other}")
    else:
        pytest.skip("the kernel gave this pid to nobody")
    status = cluster.pdctl("status", "--json")
    states = {s["name"]: s["state"] for s in json.loads(status.out)["services"]}
    assert status.rc == 3 and states["decode-0"] == "lost"
    assert cluster.pdctl("down", "demo").rc == 0
    assert a.sh(f"cat /proc/{wanted}/comm").strip() == "sleep", "the other process lives"
    a.sh(f"kill {wanted}")
    eventually(a.clean, 20)


def test_a_service_that_will_not_go(cluster: Cluster, bystander: Callable[[Machine], int]) -> None:
    """Deaf to SIGTERM; with a daemon of another name, in a session of its own, deaf too."""
    (a,) = cluster.add("gpu-a")
    other = bystander(a)
    env = {"STUB_IGNORE_TERM": "1", "STUB_ESCAPE": "1"}
    path = cluster.topology(prefill=[{"host": "gpu-a", "kv_cache": "1MiB", "env": env}])
    assert cluster.pdctl("up", str(path)).rc == 0
    assert eventually(lambda: "kworker/9:9" in a.sh("cat /proc/[0-9]*/comm"), 20)
    down = cluster.pdctl("down", "demo", "--timeout", "0.5", "--json")
    assert down.rc == 0, down.err
    pids = {s["name"]: s["pids"] for s in json.loads(down.out)["services"]}
    assert [len(pids[name]) for name in ("router", "prefill-0")] == [2, 3]
    assert clean(a) and not gone(other)


def test_the_copy_of_the_shim_is_made_anew(cluster: Cluster) -> None:
    (a,) = cluster.add("gpu-a")
    path = str(cluster.topology())
    assert cluster.pdctl("up", path).rc == 0
    shutil.rmtree(a.base / ".shim")
    assert cluster.pdctl("status").rc == 0
    assert len(list(Path(a.base / ".shim").iterdir())) == 1
    taken_down(cluster)

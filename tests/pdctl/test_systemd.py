"""`supervisor: systemd` under a real systemd of a user, which runs in namespaces made for the test.

The manager has mounts, processes and a cgroup of its own; nothing of it touches this machine's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from supervision import Home, Site, eventually

from pdctl.shim import systemd
from pdctl.shim.service import Service

MANAGER = shutil.which("systemd") or "/usr/lib/systemd/systemd"
# Its manager insists on a machine that was booted with systemd; /run says so, and is the test's.
INIT = """
mount --make-rprivate / &&
mount -t tmpfs none /run &&
mount -t tmpfs none /var/lib/systemd &&
mount -t cgroup2 none /sys/fs/cgroup &&
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR" &&
chmod 700 "$XDG_RUNTIME_DIR" || exit
"$1" --user --log-target=console --show-status=no &
wait $!
"""
DECODE = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}


@dataclass
class Manager:
    init: int
    """Process 1 of its namespace, as seen from here."""

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.init), "-m", "-p", "-C", "--"]

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.enter, *argv], capture_output=True, text=True, timeout=90)

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self.enter, *argv])

    def pdctl(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "pdctl", *args)

    def scopes(self) -> list[str]:
        argv = ["systemctl", "--user", "list-units", "pdctl-*", "--plain", "--no-legend"]
        return sorted(line.split()[0] for line in self.run(*argv).stdout.splitlines())

    def linger(self) -> None:
        assert self.run("mkdir", "-p", systemd.LINGER).returncode == 0
        assert self.run("touch", f"{systemd.LINGER}/{systemd._user()}").returncode == 0


def cgroup2() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind = line.split()[:3]
        if kind == "cgroup2":
            return Path(where)
    return None


@pytest.fixture
def manager(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    root = cgroup2()
    if os.getuid() != 0 or root is None or not os.path.exists(MANAGER):
        pytest.skip("needs root, cgroup v2 and systemd (not booted with it)")
    group = root / f"pdctl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e.strerror}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    argv = ["unshare", "-m", "-p", "-C", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    with (home.root / "manager.log").open("w") as log:
        outer = subprocess.Popen(
            [*enter, *argv, INIT, "init", MANAGER],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"HOME": str(home.root)},
        )
    try:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        init = int(eventually(lambda: children.read_text().split()[:1], 30)[0])
        socket = Path("/proc", str(init), "root", f"run/user/{os.getuid()}/systemd/private")
        ended = lambda: outer.poll() is not None  # noqa: E731
        if not eventually(lambda: socket.exists() or (ended() and "ended"), 30) or ended():
            pytest.skip(f"no manager: {(home.root / 'manager.log').read_text()[-300:]}")
        yield Manager(init)
    finally:
        outer.kill()
        outer.wait()
        eventually(lambda: not (group / "cgroup.procs").read_text(), 30)
        for folder, _, _ in os.walk(group, topdown=False):
            eventually(lambda folder=folder: removed(folder), 30)


def removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        return False  # its last process is still on its way out
    return True


def test_up_stop_and_what_escapes(home: Home, site: Site, manager: Manager) -> None:
    rude = DECODE | {"env": {"STUB_ESCAPE": "1", "STUB_IGNORE_TERM": "1"}}
    path = str(site.topology(supervisor="systemd", decode=[rude]))
    alone = manager.pdctl("up", path)
    assert alone.returncode == 1 and "loginctl enable-linger" in alone.stderr, alone.stderr
    assert "ends with the last login" in alone.stderr
    manager.linger()

    up = manager.pdctl("up", path)
    assert up.returncode == 0, up.stderr
    names = {n.rpartition("-")[0] for n in manager.scopes()}
    assert names == {"pdctl-demo-router", "pdctl-demo-prefill-0", "pdctl-demo-decode-0"}
    status = json.loads(manager.pdctl("status", "--json").stdout)
    assert status["healthy"] and all(s["supervised"] for s in status["services"])
    pid = status["services"][0]["pid"]
    group = manager.run("cat", f"/proc/{pid}/cgroup").stdout
    assert "app.slice/pdctl-demo-router" in group
    kept = manager.pdctl("up", path)
    assert kept.returncode == 0 and "3 unchanged" in kept.stdout

    down = manager.pdctl("down", "demo", "--timeout", "1")
    assert down.returncode == 0, down.stderr
    assert manager.scopes() == [] and home.processes() == [] and home.segments() == []


def test_the_cgroup_finds_what_nothing_else_would(home: Home, site: Site, manager: Manager) -> None:
    """Supervisor and service are killed; a daemon without the mark in its environment is left."""
    manager.linger()
    path = str(site.topology(supervisor="systemd"))
    assert manager.pdctl("up", path).returncode == 0
    groups = Path("/proc", str(manager.init), "root", "sys/fs/cgroup")
    (group,) = (p.parent for p in groups.rglob("pdctl-demo-decode-0*/cgroup.procs"))
    members = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    join = f"echo $$ > /sys/fs/cgroup/{group.relative_to(groups)}/cgroup.procs"
    stray = manager.start("env", "-i", "sh", "-c", f"{join}; exec sleep 600")
    try:
        eventually(lambda: len((group / "cgroup.procs").read_text().split()) > len(members), 30)
        for pid in members:
            os.kill(pid, signal.SIGKILL)
        assert manager.pdctl("down", "demo", "--timeout", "1").returncode == 0
        stray.wait(timeout=30)
        assert manager.scopes() == []
    finally:
        stray.kill()
        stray.wait()


# ---- without a manager ---------------------------------------------------------------------------


def service() -> Service:
    made = Service("/h/.pdctl", "demo", "decode-0")
    made.spec = {"supervisor": "systemd"}
    return made


def test_the_command_line() -> None:
    assert service().in_systemd and not Service("/h", "demo", "x").in_systemd
    assert systemd.scope_argv(service(), ["python3", "shim", "supervise"]) == [
        "systemd-run",
        "--user",
        "--scope",
        "--quiet",
        "--collect",
        "--unit=pdctl-demo-decode-0-c48459c4.scope",
        "--description=pdctl demo/decode-0",
        "--property=TimeoutStopSec=3",
        "--",
        "python3",
        "shim",
        "supervise",
    ]


def test_the_reasons_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert systemd.why_not() == "there is no systemd-run; use `supervisor: shim`"
    for tool in ("systemd-run", "systemctl"):
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    user = systemd._user()
    assert systemd.why_not() == (
        f"no systemd of user {user} runs ({tmp_path}); "
        f"`loginctl enable-linger {user}` (as root) gives {user} one that stays"
    )
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd" / "private").write_text("")
    monkeypatch.setattr(systemd, "LINGER", str(tmp_path / "linger"))
    assert "ends with the last login" in systemd.why_not()
    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / user).write_text("")
    assert systemd.why_not() == ""

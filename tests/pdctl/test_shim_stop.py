"""Stopping: every descendant goes, however it hides; nothing else does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from supervision import STUB, Lab, eventually, gone

from pdctl.errors import HostCommandError, StateError
from pdctl.records import parse_service
from pdctl.shim import control, procs
from pdctl.shim.supervise import Supervisor

ESCAPES = f"""
import importlib.util, sys, time
text = open({str(STUB)!r}).read().rsplit("main()", 1)[0]
exec(compile(text, "stub", "exec"))
escape("kworker/9:9")
print("escaped", flush=True)
time.sleep(600)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def escaped(lab: Lab) -> int:
    file = lab.home.dir("demo", "a") / "escaped.pid"
    return int(eventually(lambda: file.exists() and file.read_text()))


def family(lab: Lab) -> list[list[int]]:
    file = lab.home.dir("demo", "a") / "family.json"
    return json.loads(file.read_text())["members"] if file.exists() else []


def log_has(lab: Lab, text: str) -> bool:
    return text in (lab.home.dir("demo", "a") / "out.log").read_text()


def kill_shim(lab: Lab) -> None:
    pid = lab.status()["identity"]["shim"]["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gone(pid))


def test_a_service_deaf_to_sigterm_is_killed_after_the_grace(lab: Lab) -> None:
    lab.start(lab.spec(DEAF))
    eventually(lambda: log_has(lab, "deaf"))
    pid = lab.status()["identity"]["service"]["pid"]
    begun = time.monotonic()
    assert lab.stop(grace_s=0.5)["a"]["left"] == []
    assert 0.4 < time.monotonic() - begun < 5
    assert gone(pid)
    assert lab.status()["exit"]["signal"] == signal.SIGKILL


def test_its_supervisor_waits_for_one_that_a_driver_keeps_from_dying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two KILLs it sleeps: a busy core would slow down the others."""
    (tmp_path / "demo" / "a").mkdir(parents=True)
    supervisor = Supervisor(str(tmp_path / "demo" / "a"), *os.pipe())
    supervisor.pid, supervisor.kill_at = 1 << 30, 0.0  # no such process
    waits: list[float] = []
    kills: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(signal, "sigtimedwait", lambda _, seconds: waits.append(seconds))
        patch.setattr(os, "waitpid", lambda *_: (supervisor.pid, 9) if len(waits) == 4 else (0, 0))
        patch.setattr(os, "kill", lambda *what: kills.append(what))
        assert supervisor.watch() == 9
    assert len(waits) == 4 and min(waits[1:]) > 0.5
    assert kills[0] == (supervisor.pid, signal.SIGKILL)


def test_a_double_forked_renamed_daemon_goes_too(lab: Lab) -> None:
    lab.start(lab.spec(ESCAPES))
    daemon = escaped(lab)
    assert Path(f"/proc/{daemon}/comm").read_text() == "kworker/9:9\n"
    lab.stop()
    assert gone(daemon)
    assert lab.home.processes() == []


def test_a_daemon_of_a_service_that_crashed_goes_at_once(lab: Lab) -> None:
    lab.start(lab.spec(ESCAPES.replace("time.sleep(600)", "sys.exit(7)")))
    daemon = escaped(lab)
    eventually(lambda: gone(daemon))
    assert lab.status()["exit"]["code"] == 7


def test_kill_9_of_the_shim_then_stop_leaves_nothing(lab: Lab) -> None:
    lab.start(lab.spec(ESCAPES))
    daemon = escaped(lab)
    service = lab.status()["identity"]["service"]["pid"]
    kill_shim(lab)
    found = lab.status()
    assert (found["state"], found["supervised"]) == ("running", False)
    stopped = lab.stop()["a"]
    assert stopped["left"] == [] and daemon in stopped["killed"]
    assert gone(service) and gone(daemon)


def test_kill_9_of_shim_and_service_then_stop_leaves_nothing(lab: Lab) -> None:
    lab.start(lab.spec(ESCAPES))
    daemon = escaped(lab)
    service = lab.status()["identity"]["service"]["pid"]
    kill_shim(lab)
    os.kill(service, signal.SIGKILL)
    eventually(lambda: gone(service))
    found = lab.status()
    assert (found["state"], found["strays"]) == ("lost", [daemon])
    assert lab.stop()["a"]["left"] == []
    assert gone(daemon)


def test_a_daemon_without_environment_is_known_by_the_family_record(lab: Lab) -> None:
    """What the marker cannot find: exec with an empty environment, after the shim was killed."""
    code = ESCAPES.replace(
        "escape(",
        "import os\nif not os.fork():\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    open('escaped.pid', 'w').write(str(os.getpid()))\n"
        "    os.execve(sys.executable, ['nobody', '-c', 'import time; time.sleep(600)'], {})\n"
        "(lambda *_: 0)(",
    )
    lab.start(lab.spec(code))
    daemon = escaped(lab)
    eventually(lambda: Path(f"/proc/{daemon}/environ").read_bytes() == b"")
    eventually(lambda: daemon in [pid for pid, _ in family(lab)])
    service = lab.status()["identity"]["service"]["pid"]
    kill_shim(lab)
    os.kill(service, signal.SIGKILL)
    assert lab.stop()["a"]["left"] == []
    assert gone(daemon)


def test_a_stopped_shim_does_not_hold_up_the_stop(lab: Lab) -> None:
    lab.start(lab.spec("import time; time.sleep(600)"))
    known = lab.status()["identity"]
    os.kill(known["shim"]["pid"], signal.SIGSTOP)
    assert lab.stop(grace_s=0.2)["a"]["left"] == []
    assert gone(known["shim"]["pid"]) and gone(known["service"]["pid"])


def test_a_bystander_with_the_same_command_line_survives(lab: Lab) -> None:
    spec = lab.spec("import time; time.sleep(600)")
    bystander = subprocess.Popen(spec.argv, start_new_session=True)
    try:
        lab.start(spec)
        kill_shim(lab)  # so that the stop has to find the rest by itself
        lab.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_reused_pid_is_never_signalled(lab: Lab) -> None:
    """A record whose pid now belongs to another process: same pid, other start."""
    lab.start(lab.spec("import time; time.sleep(600)"))
    directory = lab.home.dir("demo", "a")
    lab.stop()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (directory / "exit.json").unlink()
        known = json.loads((directory / "identity.json").read_text())
        for part in ("shim", "service"):
            known[part]["pid"] = other.pid
        (directory / "identity.json").write_text(json.dumps(known))
        (directory / "family.json").write_text(json.dumps({"members": [[other.pid, 1]]}))
        assert lab.status()["state"] == "lost"
        assert lab.stop()["a"]["killed"] == []
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_what_somebody_put_beside_services_is_left_alone(lab: Lab, tmp_path: Path) -> None:
    lab.start(lab.spec("import time; time.sleep(600)"))
    folder = lab.home.dir("demo", "a").parent
    mine = tmp_path / "mine"
    mine.mkdir()
    notes = folder / "notes"
    notes.mkdir()
    for place in (mine, notes):
        for name in ("token", "thesis.txt"):
            (place / name).write_text("mine")
    (mine / "lock").touch()
    (folder / "link").symlink_to(mine)
    shutil.copytree(folder / "a", folder / "a.bak")
    shutil.copytree(folder, folder.parent / "copy", symlinks=True)
    answer = lab.call("status", {"deployment": None})
    assert [(s["deployment"], s["service"]) for s in answer["services"]] == [("demo", "a")]
    assert list(lab.stop()) == ["a"]
    lab.call("purge", {"deployment": "demo"})
    assert sorted(p.name for p in folder.iterdir()) == ["a.bak", "link", "notes"]
    assert (mine / "thesis.txt").exists() and (notes / "thesis.txt").exists()
    (folder / "b").symlink_to(mine)
    with pytest.raises(StateError, match="b is a symbolic link"):
        lab.start(lab.spec("pass", name="b"))
    assert sorted(p.name for p in mine.iterdir()) == ["lock", "thesis.txt", "token"]


DAMAGED = {
    "spec.json": ['{"spec": "x", "hash": 1, "intent": 2}', "[" * 100_000, "\0"],
    "identity.json": ['{"shim": "x", "service": {"pid": "1"}}', '{"boot_id": 1}'],
    "exit.json": ['{"code": "x"}', '{"at": {}}'],
    "family.json": ['{"members": [[1, 2, 3]]}', '{"members": 7}'],
    "stop.json": ['{"grace_s": "soon"}'],
}


@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_record_keeps_nothing_alive(lab: Lab, file: str) -> None:
    for text in (*DAMAGED[file], '{"spec": {"argv": 5}}', '{"spec": {"ports": {"http": "x"}}}'):
        answer = lab.start(lab.spec("import time; time.sleep(600)"))
        pids = [answer["service"]["identity"][part]["pid"] for part in ("shim", "service")]
        (lab.home.dir("demo", "a") / file).write_text(text)
        record = parse_service("local", lab.status())
        assert record.name == "a", "it can be shown"
        report = lab.stop()["a"]
        assert report["left"] == [] and all(map(gone, pids)), (text, report)
        lab.call("purge", {"deployment": "demo"})
        assert not lab.home.dir("demo", "a").exists()


def test_children_of_a_stranger_are_no_kin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pid of one of ours is reused while /proc is walked: by its ticks it is another."""
    child = subprocess.Popen(["sleep", "600"], env={procs.MARKER: "/demo/a"})
    try:
        eventually(lambda: procs.marker_of(child.pid))
        me, found = procs.proc(os.getpid()), procs.proc(child.pid)
        assert me and found
        assert found.pid in [p.pid for p in procs.descendants([me])]
        assert procs.descendants([procs.Proc(me.pid, me.ppid, me.ticks - 1)]) == []
        assert procs.descendants([procs.Proc(1 << 30, 0, 1)]) == []
        # It had the mark, died, and another has its pid.
        marked = procs.marked("/demo")
        assert {where: [p.pid for p in some] for where, some in marked.items()} == {
            "/demo/a": [child.pid]
        }
        marks = iter(["/demo/a", None])
        with monkeypatch.context() as patch:
            patch.setattr(procs, "_pids", lambda: [child.pid])
            patch.setattr(procs, "marker_of", lambda _: next(marks))
            assert procs.marked("/demo") == {}
    finally:
        child.kill()
        child.wait()


def test_a_record_from_before_a_reboot_is_dead(lab: Lab) -> None:
    """Same pid and same start ticks can meet again after a reboot; the boot id cannot."""
    lab.start(lab.spec("import time; time.sleep(600)"))
    file = lab.home.dir("demo", "a") / "identity.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, "boot_id": "another-boot"}))
    found = lab.status()
    assert found["rebooted"] and not found["supervised"]
    file.write_text(json.dumps(known))
    assert lab.status()["state"] == "running"
    lab.stop()


def test_segments_go_and_those_of_others_stay(lab: Lab) -> None:
    prefix = f"pdctl.test{os.getpid()}.a"
    mine, other = Path(f"/dev/shm/{prefix}.0.x"), Path(f"/dev/shm/{prefix}b.0.x")
    lab.start(
        lab.spec(f"open({str(mine)!r}, 'w'); import time; time.sleep(600)", shm_prefix=prefix)
    )
    other.touch()
    try:
        eventually(mine.exists)
        assert lab.stop()["a"]["segments"] == [mine.name]
        assert not mine.exists() and other.exists()
    finally:
        other.unlink()


def test_ports_are_looked_at_and_their_holder_is_named(lab: Lab) -> None:
    port = free_port()
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    lab.start(lab.spec(code, ports={"http": port}))
    held = eventually(
        lambda: (
            not (p := lab.call("probe", {"ports": [[port, "127.0.0.1"]]})["ports"][0])["free"] and p
        )
    )
    assert held["service"] == "demo/a"
    assert held["pid"] == lab.status()["identity"]["service"]["pid"]
    assert lab.stop()["a"]["ports"] == []
    with socket.create_server(("127.0.0.1", port)):
        stranger = lab.stop()["a"]["ports"][0]
        assert (stranger["pid"], stranger["service"]) == (os.getpid(), None)


def test_purge_keeps_the_last_logs_and_refuses_the_living(lab: Lab) -> None:
    lab.start(lab.spec("import time; print('hello', flush=True); time.sleep(600)"))
    eventually(lambda: log_has(lab, "hello"))
    with pytest.raises(HostCommandError, match="still has processes"):
        lab.call("purge", {"deployment": "demo"})
    lab.stop()
    lab.call("purge", {"deployment": "demo"})
    assert not lab.home.dir("demo", "a").parent.exists()
    kept = sorted(p.name for p in (lab.home.base / ".last" / "demo").iterdir())
    assert kept == ["a.exit.json", "a.out.log"]
    logs = lab.call("tail", {"deployment": "demo", "lines": 3})["logs"]
    assert logs == {"a": ["hello"]}


def test_what_somebody_else_put_there_is_no_service_and_stays(lab: Lab) -> None:
    lab.start(lab.spec("print('hello')"))
    demo = lab.home.dir("demo", "a").parent
    (demo / "mine" / "deep").mkdir(parents=True)
    (demo / "mine" / "deep" / "data").write_text("precious")
    (demo / "notes.txt").write_text("mine")
    (lab.home.base / "other" / "mine").mkdir(parents=True)
    eventually(lambda: lab.status()["state"] == "exited")
    found = lab.call("status", {})
    assert [(s["deployment"], s["service"]) for s in found["services"]] == [("demo", "a")]
    assert list(found["deployments"]) == ["demo"]
    assert list(lab.call("tail", {"deployment": "demo", "lines": 3})["logs"]) == ["a"]
    assert list(lab.stop()) == ["a"]
    assert lab.call("purge", {"deployment": "demo"})["purged"] == ["a"]
    assert sorted(p.name for p in demo.rglob("*")) == ["data", "deep", "mine", "notes.txt"]


def test_a_purge_that_was_killed_is_finished_by_the_next(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it came: what it left, a secret maybe, is still known for a service's."""
    unlink, base = os.unlink, str(lab.home.base)
    for crash_at in range(20):
        lab.start(lab.spec("", files={"config.json": "{}"}), secret_files={"api_keys": "hush"})
        lab.stop()
        left = crash_at

        def killed(*args: Any, **more: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            unlink(*args, **more)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "unlink", killed)
            control.purge(base, {"deployment": "demo"})
        if left >= 0:
            break
        control.purge(base, {"deployment": "demo"})
        assert not lab.home.dir("demo", "a").parent.exists(), crash_at
    assert 4 < crash_at < 19


def test_stop_and_purge_of_nothing_are_fine(lab: Lab) -> None:
    assert lab.stop() == {}
    lab.call("purge", {"deployment": "demo"})
    assert not (lab.home.base / ".last").exists()

"""Starting one service: files and modes, secrets, environment, idempotence, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from supervision import Home, Lab, eventually, gone

from pdctl.agent import Session, shim_call
from pdctl.errors import HostCommandError, Locked, StateError
from pdctl.hosts import LocalHost
from pdctl.shim import supervise

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def test_start_and_status_and_stop(lab: Lab) -> None:
    answer = lab.start(lab.spec(SLEEP))
    assert answer["started"] is True
    found = lab.status()
    assert (found["state"], found["supervised"], found["exit"]) == ("running", True, None)
    pid = found["identity"]["service"]["pid"]
    assert os.getsid(pid) == pid, "a session of its own"
    assert os.getppid() != pid

    stopped = lab.stop()["a"]
    assert stopped["left"] == [] and stopped["killed"] == []
    assert gone(pid) and gone(found["identity"]["shim"]["pid"])
    last = lab.status()
    assert last["state"] == "exited"
    assert (last["exit"]["signal"], last["exit"]["asked"]) == (15, True)


def test_again_is_as_it_was(lab: Lab) -> None:
    with pytest.raises(HostCommandError, match="a: it was never started"):
        lab.call("again", {"deployment": "demo", "service": "a"})
    code = f"import os; print(os.environ['K'], open('token').read(), flush=True); {SLEEP}"
    spec = lab.spec(code, env={"K": "v"}, secrets=("S",))
    lab.start(spec, token="t0ken", secret_env={"S": "hush"})
    directory = lab.home.dir("demo", "a")
    eventually(lambda: "up" in (directory / "out.log").read_text())
    assert (directory / "out.log").read_text() == "v t0ken\n\nup\n"
    assert lab.call("again", {"deployment": "demo", "service": "a"})["started"] is False
    before = lab.status()
    lab.stop()
    assert lab.call("again", {"deployment": "demo", "service": "a"})["started"] is True
    after = lab.status()
    assert after["state"] == "running" and after["exit"] is None
    assert (after["spec"], after["hash"]) == (before["spec"], before["hash"])
    assert after["intent"]["at"] > before["intent"]["at"]
    eventually(lambda: (directory / "out.log").read_text() == "v t0ken\n\nup\n")
    assert (directory / "out.log.1").read_text() == "v t0ken\n\nup\n"
    assert json.loads((directory / "env").read_text())["S"] == "hush"
    lab.stop()


def test_everything_written_is_private(lab: Lab) -> None:
    os.umask(0)
    try:
        spec = lab.spec(SLEEP, files={"config.json": '{"token_file": "{dir}/token"}'})
        lab.start(spec, token="t0ken", secret_files={"api_keys": "k3y"})
    finally:
        os.umask(0o022)
    directory = lab.home.dir("demo", "a")
    eventually(lambda: (directory / "family.json").exists())
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in directory.iterdir()}
    assert {"spec.json", "identity.json", "env", "token", "out.log", "api_keys"} <= modes.keys()
    assert set(modes.values()) == {"0o600"}
    for parent in (directory, directory.parent):
        assert oct(parent.stat().st_mode & 0o777) == "0o700"
    assert (directory / "config.json").read_text() == f'{{"token_file": "{directory}/token"}}'
    assert (directory / "token").read_text() == "t0ken\n"
    assert (directory / "api_keys").read_text() == "k3y"
    lab.stop()


def test_secrets_reach_the_service_and_nothing_else(lab: Lab) -> None:
    code = "import os, time; open('seen', 'w').write(os.environ['KEY']); time.sleep(600)"
    lab.start(lab.spec(code), token="t0ken", secret_env={"KEY": "hush-hush"})
    directory = lab.home.dir("demo", "a")
    eventually(lambda: (directory / "seen").exists() and (directory / "seen").read_text())
    assert (directory / "seen").read_text() == "hush-hush"

    status = json.dumps(lab.status())
    assert "hush-hush" not in status and "t0ken" not in status
    for file in directory.iterdir():
        if file.name not in ("env", "seen"):
            assert "hush-hush" not in file.read_text(), file
    for pid in lab.home.processes():
        assert b"hush-hush" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"t0ken" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    lab.stop()


def test_the_environment_is_what_the_spec_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET_OF_MINE", "private")
    code = "import os, json; json.dump(dict(os.environ), open('seen.json', 'w'))"
    lab.start(lab.spec(code, env={"OMP_NUM_THREADS": "2", "ODD": "x; echo $HOME {dir}"}))
    eventually(lambda: lab.status()["state"] == "exited")
    seen = json.loads((lab.home.dir("demo", "a") / "seen.json").read_text())
    assert "SOME_SECRET_OF_MINE" not in seen
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["OMP_NUM_THREADS"] == "2"
    assert seen["ODD"] == "x; echo $HOME {dir}", "no shell, and nothing filled in"
    assert seen["PDCTL_SERVICE"] == str(lab.home.dir("demo", "a"))


def test_a_second_start_changes_nothing(lab: Lab) -> None:
    spec = lab.spec(SLEEP)
    lab.start(spec)
    before = lab.status()["identity"]
    assert lab.start(spec)["started"] is False
    assert lab.status()["identity"] == before
    with pytest.raises(HostCommandError, match="runs with another configuration"):
        lab.start(replace(spec, env={"A": "b"}))
    assert lab.status()["identity"] == before
    lab.stop()


def test_of_concurrent_starts_exactly_one_wins(lab: Lab) -> None:
    spec = lab.spec("open('starts', 'a').write('x'); import time; time.sleep(600)")
    wins: list[bool] = []

    def start() -> None:
        request = {"spec": asdict(spec), "hash": spec.hash, "wait_s": 10}
        wins.append(shim_call(LocalHost(), "start", request)["started"])

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == [False] * 5 + [True]
    file = lab.home.dir("demo", "a") / "starts"
    assert eventually(lambda: file.exists() and file.read_text()) == "x"
    lab.stop()


def test_a_program_that_cannot_run_is_one_line(lab: Lab) -> None:
    spec = replace(lab.spec(""), argv=("/no/such/python", "-m", "runtime"))
    with pytest.raises(HostCommandError) as caught:
        lab.start(spec)
    assert str(caught.value) == ("local: a: cannot run /no/such/python: No such file or directory")
    assert lab.home.processes() == []
    found = lab.status()
    assert found["state"] == "exited" and found["exit"]["code"] == 127


def test_an_exit_is_recorded(lab: Lab) -> None:
    lab.start(lab.spec("import sys, time; print('bye'); time.sleep(0.2); sys.exit(3)"))
    found = eventually(lambda: (s := lab.status())["state"] == "exited" and s)
    assert (found["exit"]["code"], found["exit"]["signal"]) == (3, None)
    assert found["exit"]["asked"] is False
    assert 0.1 < found["exit"]["ran_s"] < 5
    assert lab.call("tail", {"deployment": "demo", "services": ["a"], "lines": 5})["logs"] == {
        "a": ["bye"]
    }
    eventually(lambda: lab.home.processes() == [])


def test_bad_names_touch_nothing(lab: Lab) -> None:
    for name in ("../x", "", ".hidden", "a/b"):
        with pytest.raises(HostCommandError, match="is not a name"):
            lab.start(replace(lab.spec(SLEEP), name=name))
    with pytest.raises(HostCommandError, match="cannot be the name of a file"):
        lab.start(lab.spec(SLEEP, files={"../../evil": "x"}))
    with pytest.raises(HostCommandError, match="cannot be the name of a file"):
        lab.start(lab.spec(SLEEP, files={"identity.json": "{}"}))
    assert not lab.home.dir("demo", "a").exists()


def test_the_lock_names_its_holder_and_dies_with_it(lab: Lab) -> None:
    code = (
        "import sys, time\n"
        "from pdctl.agent import Session\n"
        "from pdctl.hosts import LocalHost\n"
        "Session(LocalHost(), 'demo', purpose='up', wait_s=0)\n"
        "print('held', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(Locked) as caught:
            Session(lab.host, "demo", purpose="down", wait_s=0.1)
        assert f"pid {other.pid}" in str(caught.value) and "pdctl up" in str(caught.value)
        with Session(lab.host, "another", purpose="down", wait_s=0):
            pass
        other.kill()
    with Session(lab.host, "demo", purpose="down", wait_s=5):
        pass
    assert list((lab.home.base / ".locks").iterdir()) == []


def test_no_write_permission_is_one_line(home: Home) -> None:
    """As another user, because root may write anywhere."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("needs /usr/bin/python3: root's own interpreter may be closed to other users")
    # Of one of several workers the test has its directory one deeper.
    for parent in (home.root, *home.root.parents[:3]):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    code = (
        "import os\n"
        "from pdctl.agent import Session\n"
        "from pdctl.errors import PdctlError\n"
        "from pdctl.hosts import LocalHost\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"try: Session(LocalHost(python={python!r}), 'demo', purpose='up', wait_s=0)\n"
        "except PdctlError as e: print(type(e).__name__, e, e.hint, sep=' | ')\n"
    )
    closed = home.root / "closed"
    closed.mkdir(mode=0o755)
    env = {**os.environ, "PDCTL_HOME": str(closed / "home")}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.stdout.startswith(f"StateError | local: {closed}/home: Permission denied | ")
    assert "PDCTL_HOME" in result.stdout
    assert list(closed.iterdir()) == []


def test_a_state_directory_that_is_a_file_is_one_line(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.root / "file").write_text("not a directory")
    monkeypatch.setenv("PDCTL_HOME", str(home.root / "file"))
    with pytest.raises(StateError, match=r"Not a directory|File exists"):
        Session(LocalHost(), "demo", purpose="up", wait_s=0)


def test_an_answer_that_came_too_late_is_not_taken_for_another(lab: Lab) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
    lab.start(lab.spec(deaf + "time.sleep(600)"))
    log = lab.home.dir("demo", "a") / "out.log"
    eventually(lambda: "up" in log.read_text())
    with Session(lab.host, "demo", purpose="down", wait_s=1) as session:
        with pytest.raises(HostCommandError, match="no answer within"):
            session.call("stop", {"timeout": 0.8}, timeout=0.1)
        assert session.call("token", {}, timeout=30).keys() >= {"token"}
        assert session.call("status", {}, timeout=30)["services"][0]["state"] == "exited"


def test_a_question_that_fails_costs_neither_the_session_nor_its_lock(lab: Lab) -> None:
    with Session(lab.host, "demo", purpose="down", wait_s=1) as session:
        with pytest.raises(HostCommandError, match="shim stop: ValueError: could not convert"):
            session.call("stop", {"timeout": "soon"})
        with pytest.raises(Locked):
            Session(lab.host, "demo", purpose="up", wait_s=0)
        assert session.call("status", {})["services"] == []
    assert "failed" in lab.call("audit", {"deployment": "demo", "lines": 1})["audit"][0]["result"]


def test_the_log_has_a_cap(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOG_CAP_BYTES", 100)
    directory = lab.home.dir("demo", "a")
    directory.mkdir(parents=True)
    log = directory / "out.log"
    read, write = os.pipe()
    supervisor = supervise.Supervisor(str(directory), read, write)
    with log.open("a") as service:
        service.write("x" * 90)
        service.flush()
        supervisor.rotate_log()
        assert log.stat().st_size == 90
        service.write("y" * 20)
        service.flush()
        supervisor.rotate_log()
        service.write("after")
    assert log.read_text() == "after"
    assert (directory / "out.log.1").read_text() == "x" * 90 + "y" * 20
    assert oct((directory / "out.log.1").stat().st_mode & 0o777) == "0o600"
    os.close(read)
    os.close(write)


def test_a_secret_of_any_bytes(lab: Lab) -> None:
    value = b"k\xff\xc3".decode(errors="surrogateescape")
    code = f"import os; print(os.environb[b'S'].hex(), flush=True); {SLEEP}"
    spec = lab.spec(code, secrets=("S",))
    lab.start(spec, secret_env={"S": value}, secret_files={"f": value})
    log = lab.home.dir("demo", "a") / "out.log"
    eventually(lambda: "up" in log.read_text())
    assert log.read_text().split()[0] == "6bffc3"
    assert (log.parent / "f").read_bytes() == b"k\xff\xc3"
    assert not list(log.parent.glob("*.tmp"))
    lab.stop()


def test_what_a_start_loads() -> None:
    """Very many hosts may be one machine's CPUs, and these take longer to load than the rest."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from shim import main, look, probe, deployment, control, supervise, unpack\n"
        "question = {'do': 'probe', 'base': '/', 'ports': [[0, '127.0.0.1']]}\n"
        "answer = main.Session().answer(question)\n"
        "assert answer['ports'][0]['free'], answer\n"
        "print(sorted({'typing', 'shutil', 'lzma', 'encodings.idna'} & sys.modules.keys()))"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, str(Path(supervise.__file__).parents[1])]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert result.stdout == "[]\n", result.stdout + result.stderr

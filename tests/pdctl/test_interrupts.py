"""SIGTERM, SIGHUP and a closed terminal end each command as Ctrl-C does."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from changing import DECODE, Demo, pids, states, up
from supervision import Home, eventually

from pdctl import ops
from pdctl.shim.lock import holder

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SLOW = DECODE | {"env": {"STUB_DELAY": "600"}}


@pytest.fixture(autouse=True)
def down_at_the_end(home: Home) -> Iterator[None]:
    yield
    ops.down("demo", 0.5, ops.silent)


def interrupted(args: list[str], when: Callable[[str], object], sig: signal.Signals) -> str:
    """Runs pdctl until it has said that, and interrupts it. What it said in all."""
    argv = [sys.executable, "-m", "pdctl", *args]
    heard = ""
    with subprocess.Popen(argv, stdout=-1, stderr=-1, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            heard += line
            if when(line):
                break
        process.send_signal(sig)
        heard += process.communicate(timeout=60)[1]
    assert process.returncode == 130, heard
    assert "Traceback" not in heard
    return heard


def unlocked(home: Home) -> bool:
    """What was asked of a host before is finished under the lock."""
    return bool(eventually(lambda: holder(str(home.base), "demo") is None, 40))


@pytest.mark.parametrize("sig", SIGNALS)
def test_a_drain_takes_its_mark_back_and_no_other(
    home: Home, demo: Demo, sig: signal.Signals
) -> None:
    up(demo(decode=[DECODE | {"replicas": 2}]))
    (home.dir("demo", "decode-1") / "busy").touch()
    heard = interrupted(["drain", "decode-1"], lambda line: "finishing 1 request" in line, sig)
    assert "decode-1 gets new requests again" in heard
    assert states(home)["decode-1"] == "ready" and unlocked(home)

    assert ops.drain("demo", "decode-1", ops.DrainOptions(timeout_s=0.1), ops.silent).left
    interrupted(["drain", "decode-1"], lambda line: "finishing 1 request" in line, sig)
    assert states(home)["decode-1"] == "draining", "it was drained before"


@pytest.mark.parametrize("sig", SIGNALS[1:])
def test_a_restart_and_a_down_free_the_lock(home: Home, demo: Demo, sig: signal.Signals) -> None:
    deaf = DECODE | {"env": {"STUB_IGNORE_TERM": "1"}, "replicas": 2}
    up(demo(decode=[deaf]))
    before = pids()
    (home.dir("demo", "decode-1") / "busy").touch()
    rolling = ["restart", "--rolling", "decode-1", "--timeout", "600"]
    heard = interrupted(rolling, lambda line: "finishing 1 request" in line, sig)
    assert "decode-1 gets new requests again" in heard and unlocked(home)
    assert pids() == before and states(home)["decode-1"] == "ready"

    down = ["down", "demo", "--timeout", "20"]
    interrupted(down, lambda line: "decode-1" in line and "stopping" in line, sig)
    assert unlocked(home)
    assert ops.down("demo", 0.5, ops.silent).ok and home.processes() == []


@pytest.mark.parametrize("sig", SIGNALS[1:])
def test_an_up_is_rolled_back(home: Home, demo: Demo, sig: signal.Signals) -> None:
    path = str(demo(decode=[SLOW]))
    heard = interrupted(["up", path], lambda line: "the model to load" in line, sig)
    assert "stopping what this run started" in heard
    assert home.processes() == [] and unlocked(home)


@pytest.fixture
def silent(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server that says nothing, as which two hosts of `far.yaml` are known."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        config = home.root / "ssh_config"
        port = server.getsockname()[1]
        config.write_text(
            f"Host gpu-*\n  HostName 127.0.0.1\n  Port {port}\n  ConnectTimeout 600\n"
        )
        monkeypatch.setenv("PDCTL_SSH_CONFIG", str(config))
        (home.root / "far.yaml").write_text(
            "name: demo\nmodel: smollm2-135m\n"
            "hosts:\n  a: {address: gpu-a}\n  b: {address: gpu-b}\n"
            "router: {host: a}\nprefill: [{host: a}]\ndecode: [{host: b}]\n"
        )
        yield server


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh here")
@pytest.mark.parametrize("words", ["sync", "doctor", "plan", "status -f", "collect -f"])
def test_nobody_waits_for_who_is_silent(home: Home, silent: socket.socket, words: str) -> None:
    argv = [sys.executable, "-m", "pdctl", *words.split(), str(home.root / "far.yaml")]
    with subprocess.Popen(argv, stdout=-1, stderr=-1, text=True) as process:
        try:
            with silent.accept()[0], silent.accept()[0]:
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and out == "" and "Traceback" not in err, err


def test_a_closed_terminal_rolls_an_up_back(home: Home, demo: Demo) -> None:
    path = str(demo(decode=[SLOW]))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "pdctl", "up", path])
    shown = b""
    while b"the model to load" not in shown:
        shown += os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert home.processes() == [] and unlocked(home)


def test_nohup_is_respected(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from pdctl.interrupts import like_ctrl_c\n"
        "like_ctrl_c()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    run = subprocess.run(
        ["nohup", sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert (run.returncode, run.stdout) == (0, "goes on\n"), run.stderr

"""`pdctl exec`: arguments as given, the service's environment less its secrets, its exit code."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
from supervision import Home, Lab, eventually, gone

from pdctl import ops
from pdctl.errors import HostCommandError, HostUnreachable, UsageError
from pdctl.find import Where
from pdctl.state import KnownDeployment

HERE = Where(hosts=("local",))
NASTY = ("$HOME; echo x", "a b", "'", '"', "\n", "*", "", "--json", "-n")


@pytest.fixture
def service(lab: Lab) -> Lab:
    spec = lab.spec("import time; time.sleep(600)", env={"OPEN": "yes"}, secrets=("HIDDEN",))
    lab.start(spec, secret_env={"HIDDEN": "hush-hush"})
    return lab


def run(*argv: str, secrets: bool = False) -> tuple[int, str, str]:
    heard: dict[str, list[str]] = {"out": [], "err": []}
    command = ops.Command(argv, secrets)
    code = ops.on_service("demo", "a", command, lambda s, text: heard[s].append(text), HERE)
    return code, "".join(heard["out"]), "".join(heard["err"])


def test_arguments_directory_and_environment(service: Lab) -> None:
    code = "import sys, os, json; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
    rc, out, err = run(sys.executable, "-c", code, *NASTY)
    argv, where, env = json.loads(out)
    assert (rc, err, argv) == (0, "", list(NASTY))
    assert where == str(service.home.dir("demo", "a"))
    assert env["OPEN"] == "yes" and "HIDDEN" not in env and "PDCTL_SERVICE" not in env
    _, out, _ = run(sys.executable, "-c", code, secrets=True)
    assert json.loads(out)[2]["HIDDEN"] == "hush-hush"
    service.stop()


def test_output_streams_and_exit_codes(service: Lab) -> None:
    text = "import sys; sys.stdout.buffer.write(b'\\xff\\xc3'); sys.stdout.flush(); sys.exit('no')"
    rc, out, err = run(sys.executable, "-c", text)
    assert (rc, err) == (1, "no\n")
    assert out.encode("utf-8", "surrogateescape") == b"\xff\xc3"
    assert run("sh", "-c", "exit 42") == (42, "", "")
    assert run("sh", "-c", "kill -9 $$")[0] == 137
    assert run("cat") == (0, "", ""), "its input is empty"
    assert len(run("head", "-c", "3000000", "/dev/zero")[1]) == 3_000_000
    with pytest.raises(HostCommandError, match="cannot run /no/such: No such file"):
        run("/no/such")
    with pytest.raises(UsageError, match="demo has no service b"):
        ops.on_service("demo", "b", ops.Command(("true",)), lambda *_: None, HERE)
    service.stop()


def test_what_it_left_running_ends_with_it(service: Lab) -> None:
    _, out, _ = run("sh", "-c", "sleep 600 & echo $!")
    eventually(lambda: gone(int(out)))
    service.stop()


def test_it_ends_with_the_command_whatever_else_goes_on_writing(service: Lab) -> None:
    """In its own group or out of it; all that the command wrote itself arrives."""
    for left in ("yes", "setsid yes"):
        argv = ["exec", "a", "--", "sh", "-c", f"{left} >&2 & head -c 50000 /dev/zero; exit 3"]
        with subprocess.Popen(
            [sys.executable, "-m", "pdctl", *argv], stdout=subprocess.PIPE, stderr=DEVNULL
        ) as process:
            try:
                out, _ = process.communicate(timeout=30)
            finally:
                process.terminate()
        assert (process.returncode, len(out)) == (3, 50_000)
    service.stop()


def test_ctrl_c_ends_the_command_there(service: Lab, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    argv = ["exec", "--name", "demo", "a", "--", "sh", "-c", f"echo $$ > {file}; exec sleep 600"]
    with subprocess.Popen(
        [sys.executable, "-m", "pdctl", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        pid = int(eventually(lambda: file.exists() and file.read_text().strip(), 30))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    eventually(lambda: gone(pid))
    service.stop()


def test_ctrl_c_ends_it_also_while_nobody_reads_what_it_writes(
    service: Lab, tmp_path: Path
) -> None:
    """As with `| less`: everybody waits for the next one to read."""
    file = tmp_path / "pid"
    script = f"echo $$ > {file}; yes & exec sleep 600"
    argv = ["exec", "--name", "demo", "a", "--", "sh", "-c", script]
    with subprocess.Popen(
        [sys.executable, "-m", "pdctl", *argv], stdout=subprocess.PIPE, stderr=DEVNULL
    ) as process:
        pid = int(eventually(lambda: file.exists() and file.read_text().strip(), 30))
        assert process.stdout is not None
        eventually(lambda: _is_full(process.stdout), 30)
        process.send_signal(signal.SIGINT)
        eventually(lambda: gone(pid))
        process.communicate(timeout=30)
    assert process.returncode == 130
    service.stop()


def _is_full(pipe: Any) -> bool:
    """Whether nothing more gets in."""

    def size() -> bytes:
        return fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))

    before = size()
    time.sleep(0.2)
    return any(before) and size() == before


def test_on_the_command_line(service: Lab) -> None:
    def pdctl(*args: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pdctl", "exec", *args]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)

    plain = pdctl("a", "--", "sh", "-c", 'printf "%s|" "$@"; exit 7', "x", *NASTY)
    assert (plain.returncode, plain.stdout) == (7, "".join(f"{a}|" for a in NASTY))
    on_host = pdctl("--host", "local", "--", "sh", "-c", "pwd; echo ${OPEN-none}")
    assert on_host.stdout.splitlines() == [str(Path.home()), "none"]
    lines = [json.loads(x) for x in pdctl("--json", "a", "echo", "hi").stdout.splitlines()]
    assert lines == [
        {"schema": "pdctl.exec/1", "stream": "out", "text": "hi\n"},
        {"schema": "pdctl.exec/1", "stream": "exit", "code": 0},
    ]
    assert pdctl("a").returncode == 2
    service.stop()


def test_it_is_no_stray_of_the_service(home: Home, service: Lab) -> None:
    """`down` while somebody looks around: what they run is not the service's."""
    argv = [sys.executable, "-m", "pdctl", "exec", "a", "--", "sh", "-c", "echo $$; exec sleep 600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert service.stop()["a"]["left"] == []
        time.sleep(0.1)
        assert not gone(pid)
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
    eventually(lambda: gone(pid))


def test_a_misspelt_host_names_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise HostUnreachable("gpu-x: resolve: no such host", host="gpu-x", hint="check it")

    monkeypatch.setattr("pdctl.execute.opened", unreachable)
    known = KnownDeployment("demo", "", {"gpu-a": "a.example", "gpu-b": "b.example"})
    monkeypatch.setattr("pdctl.execute.whereabouts", lambda *_: known)
    for host, words in (("gpu-x", "gpu-a, gpu-b"), ("gpu-a", "check it")):
        with pytest.raises(HostUnreachable, match="no such host") as caught:
            ops.on_host(host, ops.Command(("true",)), lambda *_: None)
        assert words in caught.value.hint

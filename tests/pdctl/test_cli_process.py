"""The command line as people run it: real processes, a stub for the runtime, a real terminal."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port
from supervision import Site, eventually

from pdctl import state

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
HELP_LIMIT_S = 0.4


def pdctl(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdctl", *args],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def on_a_terminal(*args: str, columns: int = 80, **env: str) -> str:
    """What a terminal would show, escapes included."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "pdctl", *args],
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        | {"TERM": "xterm", "COLUMNS": str(columns)}
        | env,
        stdout=terminal,
        stderr=terminal,
        stdin=subprocess.DEVNULL,
    ):
        os.close(terminal)
        shown = b""
        try:
            while data := os.read(controller, 65536):
                shown += data
        except OSError:
            pass  # EIO: the last writer is gone
    os.close(controller)
    return shown.decode().replace("\r\n", "\n")


def test_help_is_quick() -> None:
    """In CPU seconds, so that a busy machine does not fail it; alone, that is what people wait."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert pdctl("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < HELP_LIMIT_S, times


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_may_be_closed(closed: str, tmp_path: Path) -> None:
    command = f'exec "$0" -m pdctl status {closed}'
    env = {"PDCTL_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], env=os.environ | env, capture_output=True, timeout=60
    )
    assert done.returncode == 2 and b"bug" not in done.stderr, done.stderr
    assert not list(tmp_path.glob("pdctl-bug-*"))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, pdctl.cli\n"
        "heavy = {'torch', 'runtime', 'fabric', 'paramiko', 'pydantic', 'rich', 'yaml', 'aiohttp',"
        " 'numpy', 'msgspec', 'psutil'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert result.stdout == "[]\n", result.stdout + result.stderr


def pair(site: Site, **decode_env: str) -> str:
    """A topology whose ports are free now: other tests and deployments run on this machine too."""
    sizes = {"host": "local", "kv_cache": "1MiB"}
    return str(
        site.topology(
            prefill=[sizes | {"port": free_port(), "peer_port": free_port()}],
            decode=[sizes | {"port": free_port(), "cpu_buffer": "1MiB", "env": decode_env}],
        )
    )


def test_the_whole_life_of_a_deployment(site: Site) -> None:
    topology = pair(site)
    planned = pdctl("plan", topology)
    assert planned.returncode == 3 and "demo: 3 to start, 0 unchanged" in planned.stdout

    up = pdctl("up", topology)
    assert up.returncode == 0, up.stderr
    assert up.stdout.startswith("demo is ready at http://127.0.0.1:")
    assert "3 started, 0 unchanged" in up.stdout
    assert up.stderr.count(" ready ") == 3 and "\x1b" not in up.stderr
    try:
        again = pdctl("up", topology, "--json", PYTHONIOENCODING="ascii")
        result = json.loads(again.stdout)
        assert (result["started"], len(result["kept"]), result["ready"]) == ([], 3, True)
        assert again.stderr.isascii() and "+ local" in again.stderr
        assert "demo: 0 to start, 3 unchanged" in pdctl("up", topology, "--dry-run").stdout
        status_of_a_healthy_one(result["endpoint"])
        watching_stays_and_ends_with_ctrl_c()
        logs_of_it()
        status_after_a_kill(topology)
    finally:
        down = pdctl("down")
    assert down.returncode == 0 and down.stdout.startswith("demo is down  (3 stopped")
    twice = pdctl("down", "demo", "--json")
    assert twice.returncode == 0 and json.loads(twice.stdout)["ok"] is True
    assert "stub router starts" in pdctl("logs", "--name", "demo").stdout, "logs outlive it"


def status_of_a_healthy_one(endpoint: str) -> None:
    wide = on_a_terminal("status", columns=200)
    assert "\x1b[32m✔ healthy\x1b[0m" in wide and "KV MOVED" in wide
    narrow = on_a_terminal("status", columns=40, NO_COLOR="1")
    assert "\x1b" not in narrow and "ENDPOINT" not in narrow.splitlines()[2]
    assert "(too narrow for" in narrow
    assert narrow.splitlines()[0] == f"demo  healthy  {endpoint}"
    assert all(len(line) <= 40 for line in narrow.splitlines()[1:])
    document = json.loads(pdctl("status", "demo", "--json").stdout)
    assert document["schema"] == "pdctl.status/1"
    assert document["endpoint"] == endpoint
    assert {s["name"] for s in document["services"]} == {"router", "prefill-0", "decode-0"}


def watching_stays_and_ends_with_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pdctl", "status", "--watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        state.remember(state.KnownDeployment("another", "", {"a": "192.0.2.1"}))
        then = [json.loads(process.stdout.readline())["name"] for _ in range(2)]
        state.forget("another")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert {first["name"], *then} == {"demo"} and len(first["services"]) == 3
    assert process.returncode == 130
    assert "Traceback" not in err


def logs_of_it() -> None:
    assert "decode-0   local    | stub decode-0 starts" in pdctl("logs").stdout.splitlines()
    assert pdctl("logs", "router", "-n", "1").stdout == "stub router starts\n"
    assert pdctl("logs", "nope").returncode == 2


def status_after_a_kill(topology: str) -> None:
    services = json.loads(pdctl("status", "--json").stdout)["services"]
    victim = next(s["pid"] for s in services if s["name"] == "decode-0")
    os.kill(victim, signal.SIGKILL)

    def degraded() -> subprocess.CompletedProcess[str] | None:
        status = pdctl("status")
        return status if "decode-0: killed by SIGKILL" in status.stdout else None

    status = eventually(degraded)
    assert status.returncode == 3 and status.stdout.startswith("demo  degraded  ")
    assert "demo: 1 to start, 2 unchanged" in pdctl("plan", topology).stdout


def test_a_service_that_gives_up_fails_up_with_its_last_lines(site: Site) -> None:
    up = pdctl("up", pair(site, STUB_EXIT="7"), "--json")
    assert up.returncode == 1
    assert json.loads(up.stdout)["exit_code"] == 1
    assert "│ no such device: the stub gives up" in up.stderr
    assert "error: decode-0 on local: exited with code 7" in up.stderr
    assert "there is no deployment" in pdctl("status", "demo").stderr


def test_ctrl_c_during_up_is_130_and_leaves_nothing(site: Site) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "pdctl", "up", pair(site, STUB_DELAY="60")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "the model to load" in line:
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopping what this run started" in err and "Traceback" not in err
    assert site.home.processes() == []


def test_ctrl_c_while_the_modules_load_is_130() -> None:
    code = (
        "import sys\n"
        "from pdctl.__main__ import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'pdctl.cli': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m pdctl validate {TOPOLOGIES / 'reference.yaml'} | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert result.stderr == ""


def test_a_full_disk_behind_stdout_is_no_bug() -> None:
    command = f"{sys.executable} -m pdctl validate {TOPOLOGIES / 'reference.yaml'} > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert result.stderr == "error: the output cannot be written: no space left\n"


@pytest.mark.parametrize("name", ["../x", "/etc", ""])
def test_a_name_that_is_none_is_a_mistake(name: str) -> None:
    for command in ("status", "down"):
        result = pdctl(command, name)
        assert (result.returncode, result.stdout) == (2, "")
        assert "is not the name of a deployment" in result.stderr


def at_tab(line: str, **env: str) -> list[str]:
    """What bash would offer for the last word."""
    result = pdctl(
        _PDCTL_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(line.split(" ")) - 1),
        **env,
    )
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pdctl status ", ["alpha", "beta"]),
        ("pdctl bench be", ["beta"]),
        ("pdctl logs ", ["decode-0", "mixed-0", "prefill-0", "router"]),
        ("pdctl logs --name beta ", ["mixed-0", "router"]),
        ("pdctl restart decode-0 p", ["prefill-0"]),
        ("pdctl restart decode-0 d", []),
        ("pdctl drain --name alpha ", ["decode-0", "prefill-0"]),
        ("pdctl exec d", ["decode-0"]),
        ("pdctl exec decode-0 d", []),
        ("pdctl logs --name gamma ", []),
    ],
)
def test_tab_offers_what_this_machine_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pair = (("far", "router"), ("far", "prefill-0"), ("far", "decode-0"))
    hosts: dict[str, str | None] = {"far": "192.0.2.1"}  # nobody is asked
    state.remember(state.KnownDeployment("alpha", "", hosts, services=pair))
    one = (("far", "router"), ("far", "mixed-0"))
    state.remember(state.KnownDeployment("beta", "", hosts, services=one))
    (state.state_dir() / "gamma.json").write_text("{") if "gamma" in line else None
    assert at_tab(line) == offered


def test_tab_without_a_state_directory_offers_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert at_tab("pdctl logs ", XDG_STATE_HOME=str(tmp_path / "file")) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_there(shell: str) -> None:
    result = pdctl(
        _PDCTL_COMPLETE=f"source_{shell}", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert result.returncode == 0 and "pdctl" in result.stdout.lower()

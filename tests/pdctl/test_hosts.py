"""The local host: what it runs, puts and channels, and what it says when it cannot."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_ports import free_port
from supervision import Lab, check_program, eventually, gone, ran

import pdctl.shim
from pdctl.agent import open_shim
from pdctl.errors import HostCommandError, StateError
from pdctl.hosts import LocalHost


def test_run_gives_exit_code_and_both_outputs(host: LocalHost) -> None:
    code = "import sys; print(sys.stdin.read()); print('bad', file=sys.stderr); sys.exit(4)"
    result = ran(host, [sys.executable, "-c", code], "in put")
    assert (result.rc, result.out, result.err) == (4, "in put\n", "bad\n")


def test_arguments_meet_no_shell(host: LocalHost) -> None:
    code = "import sys; print(sys.argv[1:])"
    nasty = ["$HOME; echo x", "a b", "'", '"', "\n"]
    assert ran(host, [sys.executable, "-c", code, *nasty]).out == f"{nasty}\n"


def test_a_state_directory_of_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    monkeypatch.setenv("PDCTL_HOME", str(base))
    base.chmod(0o775)
    with pytest.raises(StateError, match="can be written by others"):
        LocalHost()
    base.chmod(0o755)
    LocalHost()
    if os.getuid() == 0:
        os.chown(base, 65534, 65534)
        with pytest.raises(StateError, match="belongs to another user"):
            LocalHost()


def test_a_missing_program_is_one_line(host: LocalHost) -> None:
    with pytest.raises(HostCommandError) as caught:
        ran(host, ["/no/such/program"])
    assert str(caught.value) == "local: cannot run /no/such/program: No such file or directory"


def test_a_program_is_put_there_once_private_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "home"))
    check_program(LocalHost(), tmp_path / "home")


def test_a_channel_is_lines_both_ways_and_ends_with_us(host: LocalHost) -> None:
    code = (
        "import os, sys\n"
        "print(os.getpid(), flush=True)\n"
        "for line in sys.stdin: print(line.strip().upper(), flush=True)\n"
    )
    channel = host.channel([sys.executable, "-c", code])
    pid = int(channel.receive(20) or 0)
    channel.send("one")
    channel.send("two")
    assert (channel.receive(20), channel.receive(20)) == ("ONE", "TWO")
    begun = time.monotonic()
    with pytest.raises(HostCommandError, match="no answer within"):
        channel.receive(0.2)
    assert time.monotonic() - begun < 5
    assert not gone(pid)
    channel.close()
    eventually(lambda: gone(pid))


def test_the_end_of_a_program_is_the_end_of_its_channel(host: LocalHost) -> None:
    channel = host.channel([sys.executable, "-c", "import sys; sys.exit('it broke')"])
    assert channel.receive(20) is None
    assert channel.error_text() == "it broke"


def test_a_channel_that_was_closed_is_one_whose_program_has_ended(host: LocalHost) -> None:
    channel = host.channel([sys.executable, "-c", "input()"])
    channel.close()
    with pytest.raises(HostCommandError, match="has ended"):
        channel.send("{}")


def test_terminal_interrupts_do_not_reach_what_a_host_runs(host: LocalHost) -> None:
    result = ran(host, [sys.executable, "-c", "import os; print(os.getsid(0))"])
    assert int(result.out) != os.getsid(0)


def test_the_shim_is_copied_once_and_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "fresh"))
    host = LocalHost()
    open_shim(host, "serve").close()
    files = sorted((tmp_path / "fresh" / ".shim").rglob("*.py"))
    assert {p.name for p in files} >= {"__main__.py", "supervise.py", "control.py"}
    assert {oct(p.stat().st_mode & 0o777) for p in files} == {"0o600"}
    before = {p: p.stat().st_ino for p in files}
    open_shim(host, "serve").close()
    assert {p: p.stat().st_ino for p in files} == before


def test_the_shim_needs_only_the_standard_library_and_python_3_8_syntax() -> None:
    for file in Path(pdctl.shim.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text(), feature_version=(3, 8))
        names: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
        assert {n.split(".")[0] for n in names} <= set(sys.stdlib_module_names), file


def test_the_shim_works_with_the_oldest_python_here(lab: Lab) -> None:
    pythons = [p for minor in range(8, 11) if (p := shutil.which(f"python3.{minor}"))]
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    pythons = [str(p) for p in sorted(pyenv.glob("3.8.*/bin/python3.8"))] or pythons
    if not pythons or subprocess.run([pythons[0], "-c", ""], capture_output=True).returncode:
        pytest.skip("no python older than 3.11 here")
    lab.host.python = pythons[0]
    spec = lab.spec("import time; time.sleep(600)", secrets=("S",))
    lab.start(spec, secret_env={"S": "hush"})
    known = lab.status()
    assert (known["state"], known["supervised"]) == ("running", True)
    for do in ("token", "code", "clock", "facts", "collect", "tail", "audit"):
        lab.call(do, {"deployment": "demo", "lines": 1})
    assert lab.call("audited", {})["names"] == ["demo"]
    digests = {"key": "k", "digests": {"a": {"S": "of another value"}}}
    ask = {"deployment": "demo", "secrets": digests, "ports": [[free_port(), "127.0.0.1"]]}
    assert lab.call("probe", ask)["rotated"] == {"a": ["S"]}
    assert lab.stop()["a"]["left"] == []
    assert lab.status()["exit"]["signal"] == 15
    lab.call("purge", {"deployment": "demo"})

"""pdctl itself interrupted or killed in the middle: what it started is undone, or found by down."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervision import Home, Site, eventually, gone

from pdctl import ops
from pdctl.errors import StateError

DECODE = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}
CODE = """
import sys
from pathlib import Path
from pdctl import interrupts, ops
interrupts.like_ctrl_c()
def tell(event):
    print(event.text if event.kind == "note" else event.kind, flush=True)
ops.up(Path(sys.argv[1]), ops.UpOptions(), tell)
"""


def start_up(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_wait_is_rolled_back(home: Home, site: Site, sig: signal.Signals) -> None:
    slow = DECODE | {"env": {"STUB_DELAY": "60"}}
    process = start_up(site.topology(decode=[slow]))
    assert process.stdout is not None
    eventually(lambda: process.stdout and process.stdout.readline() == "wait\n", 20)
    process.send_signal(sig)
    out, err = process.communicate(timeout=30)
    assert "rollback" in out and "KeyboardInterrupt" in err
    assert "nothing of it is left" in out
    assert home.processes() == []
    assert not (home.base / "demo").exists()


def test_interrupted_again_it_says_what_ends_the_rest(home: Home, site: Site) -> None:
    stubborn = DECODE | {"env": {"STUB_DELAY": "60", "STUB_IGNORE_TERM": "1"}}
    process = start_up(site.topology(decode=[stubborn]))
    assert process.stdout is not None
    for line in ("wait\n", "rollback\n"):
        eventually(lambda line=line: process.stdout and process.stdout.readline() == line, 20)
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert "interrupted before that was done; `pdctl down demo` ends what is left" in out
    assert ops.down("demo", 2.0, ops.silent).ok
    assert home.processes() == []


def test_an_interrupted_down_says_what_still_runs(home: Home, site: Site) -> None:
    stubborn = DECODE | {"env": {"STUB_IGNORE_TERM": "1"}}
    ops.up(site.topology(decode=[stubborn]), ops.UpOptions(), ops.silent)
    process = subprocess.Popen(
        [sys.executable, "-m", "pdctl", "down", "demo"], stderr=subprocess.PIPE, text=True
    )
    prefill = home.record("demo", "prefill-0")["service"]["pid"]
    eventually(lambda: gone(prefill), 20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    told = "stopped: prefill-0, router; still running, or about to end: decode-0\n"
    assert told in err and "`pdctl down demo` again does the rest\n" in err
    assert ops.down("demo", 0.5, ops.silent).ok
    assert home.processes() == []


@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere_in_up_then_down_leaves_nothing(home: Home, site: Site, seed: int) -> None:
    """Six moments from the first lock to readiness; the stub has an escaped daemon and segments."""
    rude = DECODE | {"env": {"STUB_ESCAPE": "1", "STUB_DELAY": "1"}}
    path = site.topology(decode=[rude])
    process = start_up(path)
    locks = home.base / ".locks"
    eventually(lambda: locks.exists() or process.poll() is not None, 20)
    time.sleep(random.Random(seed).uniform(0.0, 0.25) * (1 + seed))
    process.kill()
    process.communicate()

    result = ops.down("demo", 2.0, ops.silent)

    assert result.ok
    assert home.processes() == []
    assert not (home.base / "demo").exists()
    assert home.segments() == []
    assert list(locks.iterdir()) == []


def test_killed_session_and_up_in_the_middle_of_starts(home: Home, site: Site) -> None:
    """Also the helper that holds the lock dies, while supervisors are being born."""
    path = site.topology(prefill=[{"host": "local", "kv_cache": "1MiB", "replicas": 6}])
    process = start_up(path)
    eventually(lambda: (home.base / "demo" / "prefill-1").exists(), 20)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [*map(int, children), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert ops.down("demo", 2.0, ops.silent).ok
    assert home.processes() == []
    assert home.segments() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> Path:
    with (disk / "fill").open("wb", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))
    return disk / "fill"


def test_a_full_disk_stops_up_with_one_line_and_does_not_stop_down(
    small_disk: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_HOME", str(small_disk / "home"))
    (small_disk / "home").mkdir(mode=0o700)
    (small_disk / "home" / ".shim").symlink_to(site.home.base / ".shim")
    home = Home(small_disk)
    path = site.topology()
    filler = fill(small_disk)
    with pytest.raises(StateError, match=f"{home.base}.*: No space left on device"):
        ops.up(path, ops.UpOptions(), ops.silent)
    assert home.processes() == []

    filler.unlink()
    ops.up(path, ops.UpOptions(), ops.silent)
    fill(small_disk)
    assert ops.down("demo", 5.0, ops.silent).ok
    assert home.processes() == [] and home.segments() == []
    assert not (home.base / "demo").exists()

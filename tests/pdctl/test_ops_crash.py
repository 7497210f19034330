"""pdctl itself interrupted or killed in the middle: what it started is undone, or found by down."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from supervision import Home, Site, eventually

from pdctl import ops

DECODE = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}
CODE = """
import sys
from pathlib import Path
from pdctl import ops
ops.up(Path(sys.argv[1]), ops.UpOptions(), lambda e: print(e.kind, flush=True))
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
    assert home.processes() == []
    assert not (home.base / "demo").exists()


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

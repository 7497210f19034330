"""The lock on a deployment: who has it, and ending the one shim that will not give it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervision import Home, Lab, eventually, gone

from pdctl import ops
from pdctl.agent import Session, shim_call
from pdctl.errors import Locked, StateError
from pdctl.find import Where
from pdctl.hosts import LocalHost
from pdctl.shim import procs

HERE = Where(hosts=("local",))
HOLD = """
import sys, time
from pdctl.agent import Session
from pdctl.hosts import LocalHost
session = Session(LocalHost(), 'demo', purpose='up', wait_s=0)
print('held', flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(home: Home) -> Iterator[subprocess.Popen[str]]:
    """Another operator's `pdctl up`, that hangs with the lock held."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def shim_of(home: Home) -> int:
    return int(json.loads((home.base / ".locks" / "demo").read_text())["shim"]["pid"])


def locked() -> bool:
    return bool(ops.show_lock("demo", HERE).holders)


def test_the_holder_is_shown(home: Home, other: subprocess.Popen[str]) -> None:
    report = ops.show_lock("demo", HERE)
    (holder,) = report.holders
    assert (holder.host, holder.command, holder.pid) == ("local", "up", other.pid)
    assert holder.user and holder.machine == os.uname().nodename
    assert 0 <= holder.age_s < 60 and "since 20" in holder.text
    assert report.to_json()["schema"] == "pdctl.lock/1"
    with pytest.raises(Locked) as caught:
        Session(LocalHost(), "demo", purpose="down", wait_s=0)
    assert holder.text in str(caught.value) and "pdctl lock break" in caught.value.hint


def test_it_is_broken_by_identity_when_agreed(home: Home, other: subprocess.Popen[str]) -> None:
    """The pdctl lives on, as behind a network that broke; only its shim on the host goes."""
    shim = shim_of(home)
    shown: list[str] = []
    refused = ops.break_locks("demo", HERE, lambda held: bool(shown.extend(h.text for h in held)))
    assert not refused.broken and shown == [h.text for h in refused.holders]
    assert locked() and not gone(shim)

    report = ops.break_locks("demo", HERE, lambda _: True)
    assert report.broken and gone(shim) and other.poll() is None
    assert not locked() and list((home.base / ".locks").iterdir()) == []
    with Session(LocalHost(), "demo", purpose="up", wait_s=0):
        pass
    (entry,) = ops.audit("demo", 10, HERE).entries
    assert (entry.do, entry.result) == ("break", f"broke the lock of {report.holders[0].text}")


def test_a_stopped_holder_is_killed(home: Home, other: subprocess.Popen[str]) -> None:
    shim = shim_of(home)
    os.kill(shim, 19)
    assert ops.break_locks("demo", HERE, lambda _: True).broken
    assert gone(shim) and not locked()


def test_another_than_the_one_shown_is_left_alone(home: Home, lab: Lab) -> None:
    with Session(lab.host, "demo", purpose="up", wait_s=0):
        shim = shim_of(home)
        someone = {**procs.identity(os.getpid())}
        with pytest.raises(StateError, match="the lock has changed hands: now `pdctl up` of"):
            shim_call(lab.host, "break", {"deployment": "demo", "shim": someone})
        assert not gone(shim)
        file = home.base / ".locks" / "demo"
        record = json.loads(file.read_text())
        reused = record["shim"] | {"start_ticks": 1}
        file.write_text(json.dumps(record | {"shim": reused}))
        with pytest.raises(StateError, match="does not say which process"):
            shim_call(lab.host, "break", {"deployment": "demo", "shim": reused})
        assert not gone(shim)
        file.write_text("{}")
        assert ops.show_lock("demo", HERE).holders[0].text == "an unknown holder"
        file.write_text(json.dumps(record))


def test_nothing_to_break(home: Home) -> None:
    assert shim_call(LocalHost(), "break", {"deployment": "demo", "shim": {}})["broken"] is False
    report = ops.break_locks("demo", HERE, lambda _: True)
    assert not report.broken and report.holders == ()


def test_on_the_command_line_it_asks_or_needs_yes(home: Home, other: subprocess.Popen[str]) -> None:
    def pdctl(*args: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "pdctl", "lock", *args]
        return subprocess.run(
            argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )

    assert f"locked by `pdctl up` of {ops.show_lock('demo', HERE).holders[0].user}@" in (
        pdctl("show", "demo").stdout
    )
    shy = pdctl("break", "demo")
    assert shy.returncode == 2 and "--yes" in shy.stderr and f"pid {other.pid}" in shy.stderr
    assert locked()
    broken = pdctl("break", "demo", "-y", "--json")
    assert broken.returncode == 0 and json.loads(broken.stdout)["broken"] is True
    assert pdctl("show", "demo").stdout == "demo is not locked\n"


def test_a_lock_without_a_name_is_still_a_lock(home: Home, lab: Lab) -> None:
    with Session(lab.host, "demo", purpose="up", wait_s=0):
        (home.base / ".locks" / "demo").write_text("")
        with pytest.raises(Locked, match="an unknown holder"):
            Session(lab.host, "demo", purpose="up", wait_s=0)
    eventually(lambda: not locked())
    assert not Path(home.base / ".locks" / "demo").exists()

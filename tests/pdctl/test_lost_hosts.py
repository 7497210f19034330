"""Commands that look, when a host cannot be reached: they name it, and exit with 5."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from supervision import Home, Lab
from typer.testing import CliRunner

from pdctl import state
from pdctl.agent import Session
from pdctl.cli import app
from pdctl.errors import HostsFailed, HostUnreachable
from pdctl.find import this_machine
from pdctl.hosts import LocalHost
from pdctl.state import KnownDeployment

SLEEP = "import time; time.sleep(600)"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def half(home: Home, lab: Lab) -> Iterator[None]:
    """A deployment with `a` on this machine, and another host, on which nobody listens."""
    hosts = {"local": None, "gone": f"root@127.0.0.1:{free_port()}"}
    state.remember(KnownDeployment("demo", "", hosts, machine=this_machine(), at=1.0))
    lab.start(lab.spec(SLEEP, url=NOWHERE))
    yield
    lab.stop()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("audit demo", "started, pid"),
        ("audit demo --json", '"do": "start"'),
        ("lock show demo", "demo is not locked on the hosts that answered"),
        ("lock show demo --json", '"holders": []'),
        ("lock break demo", "demo is not locked on the hosts that answered"),
        ("logs --name demo", ""),
        ("collect demo", "pdctl-collect-demo-"),
        ("collect demo --json", "pdctl-collect-demo-"),
        ("status demo", "1 host ok, 1 failed"),
    ],
)
def test_it_is_named_and_the_rest_is_shown(half: None, words: str, shown: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 5, result.output
    assert shown in result.stdout and "Connection refused" in result.output
    if "--json" in words:
        document = json.loads(result.stdout)
        assert "Connection refused" in document.get("unreachable", document.get("missing"))["gone"]


def test_a_service_that_may_be_there_is_not_said_to_be_none(half: None) -> None:
    for words in ("logs --name demo b", "exec --name demo b -- true"):
        result = CliRunner().invoke(app, words.split())
        assert isinstance(result.exception, HostsFailed), (words, result.output)


def test_a_lock_is_broken_where_it_is_held(half: None) -> None:
    with Session(LocalHost(), "demo", purpose="up", wait_s=0):
        shown = CliRunner().invoke(app, ["lock", "show", "demo"])
        assert shown.exit_code == 5 and "locked by `pdctl up`" in shown.stdout
        broken = CliRunner().invoke(app, ["lock", "break", "demo", "-y"])
        assert broken.exit_code == 5 and "the lock on demo is broken" in broken.stdout


@pytest.mark.parametrize("do", ["audit", "tail"])
def test_one_that_answers_and_then_fails_hides_no_other(
    half: None, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, words = {"audit": ("audit", "audit demo"), "tail": ("logs", "logs --name demo")}[do]

    def refuse(*_: object, **__: object) -> None:
        raise HostUnreachable("local: command: it fell silent", host="local")

    monkeypatch.setattr(f"pdctl.{module}.shim_call", refuse)
    result = CliRunner().invoke(app, words.split())
    told = result.output + str(result.exception)
    assert "local: command: it fell silent" in told and "Connection refused" in told
    assert result.exit_code == 5 or getattr(result.exception, "exit_code", 0) == 5


def test_what_was_collected_says_what_is_missing(half: None) -> None:
    CliRunner().invoke(app, ["collect", "demo", "-o", "folder"])
    summary = json.loads(Path("folder/summary.json").read_text())
    assert summary["hosts"] == ["local"] and "Connection refused" in summary["missing"]["gone"]

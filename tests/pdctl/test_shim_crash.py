"""Intent before, identity after: a crash at any step of a start is found and cleaned up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from supervision import Home, Lab, eventually

import pdctl
from pdctl.agent import Session, request_text

DRIVER = Path(__file__).parent / "crash_shim.py"
FOLDER = str(Path(pdctl.__file__).parent)
CODE = "import time; time.sleep(600)"


def start(lab: Lab, who: str, number: int) -> bool:
    """Start a service with a crash at this step. False: it had none so late and started."""
    spec = lab.spec(CODE, files={"config.json": "{}"})
    payload = {"spec": asdict(spec), "hash": spec.hash, "token": "t0ken"}
    request = request_text(lab.host, "start", payload)
    where = [FOLDER, str(lab.home.base), who, str(number)]
    argv = [sys.executable, "-I", str(DRIVER), *where, "serve"]
    said = subprocess.run(argv, input=request.encode(), capture_output=True, timeout=60)
    return b'"started": true' not in said.stdout


def check(lab: Lab, home: Home) -> None:
    """Whatever it left is told truly, and goes without a trace."""
    with Session(lab.host, "demo", purpose="test", wait_s=5.0) as session:
        check_in(session, home)
    assert not (home.base / "demo").exists()


def check_in(session: Session, home: Home) -> None:
    def status() -> dict[str, Any]:
        services = session.call("status", {})["services"]
        return services[0] if services else {}

    # A supervisor that outlived its `start` says in a moment what it did.
    eventually(lambda: status().get("state") != "starting", 30)
    found = status()
    if found:
        assert found["state"] in ("starting", "running", "exited", "lost", "never-started")
        alive = found["state"] == "running"
        assert not alive or found["intent"], "nothing runs whose wish was not written first"
    identity = found.get("identity") or {}
    known = {identity[part]["pid"] for part in ("shim", "service") if part in identity}
    assert set(home.processes()) <= known | set(found.get("strays", ())), "no record names it"
    stopped = session.call("stop", {"services": None, "timeout": 1.0})["services"]
    assert [s["left"] for s in stopped] == [[] for _ in stopped]
    assert home.processes() == []
    session.call("purge", {"services": None})


@pytest.mark.parametrize("who", ["start", "supervise"])
def test_killed_at_every_step(home: Home, lab: Lab, who: str) -> None:
    number = 0
    while start(lab, who, number := number + 1):
        check(lab, home)
        assert number < 100
    assert number > 4, "the driver sees the steps"
    check(lab, home)


def test_a_start_after_a_crash_runs_one_service(home: Home, lab: Lab) -> None:
    """Between intent and identity: the next start sweeps what is there and starts afresh."""
    for who, number in (("start", 8), ("supervise", 2), ("supervise", 4)):
        start(lab, who, number)
        answer = lab.start(lab.spec(CODE, files={"config.json": "{}"}))
        found = lab.status()
        assert found["state"] == "running"
        pids = [found["identity"][part]["pid"] for part in ("shim", "service")]
        assert sorted(home.processes()) == sorted(pids), (who, number, answer)
        lab.stop(1.0)
        lab.call("purge", {"deployment": "demo"})
    assert json.loads((home.base / ".audit" / "demo.log").read_text().splitlines()[0])

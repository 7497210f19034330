"""A private pdctl home and the command line acting on it, as a user would: what the e2e tests stand
on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from free_ports import free_port
from supervision import Home

PREFILL = {"host": "local", "threads": 1, "kv_cache": "256MiB"}
DECODE = {"host": "local", "threads": 1, "kv_cache": "256MiB", "cpu_buffer": "128MiB"}

MODEL_NAME = "smollm2"


GUARD_S = 120.0
_GUARD = """
import subprocess, sys, time
from pathlib import Path
home, seconds = Path(sys.argv[1]), float(sys.argv[2])
sys.stdin.read()
deadline = time.monotonic() + seconds
while time.monotonic() < deadline:
    left = [p.name for p in home.glob("[!.]*")]
    if not left:
        break
    for name in left:
        subprocess.run([sys.executable, "-m", "pdctl", "down", name, "--timeout", "0"])
    time.sleep(0.5)
"""


@contextlib.contextmanager
def guarded(lab: Lab) -> Iterator[Lab]:
    """What is still up in the lab goes down with this process, also when that is killed: pytest's
    workers are, a few seconds after Ctrl-C. An `up` that goes on has the lock: it is tried again.
    """
    home = lab.env["PDCTL_HOME"]
    with subprocess.Popen(
        [sys.executable, "-c", _GUARD, home, str(GUARD_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=lab.env,
        start_new_session=True,  # Ctrl-C is not for it
    ) as guard:
        assert guard.stdin is not None
        with guard.stdin:
            yield lab


def descendants(pid: int) -> list[int]:
    """A process and all its children, parents first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(d for c in children for d in descendants(int(c)))]


@dataclass
class Lab:
    """A private pdctl home, and the command line acting on it."""

    root: Path
    model: Path

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {
            "PDCTL_HOME": str(self.root / "home"),
            "XDG_STATE_HOME": str(self.root / "state"),
            "NO_COLOR": "1",
        }

    def argv(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "pdctl", *args]

    def pdctl(self, *args: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*args), env=self.env, capture_output=True, text=True, timeout=timeout
        )

    def topology(self, name: str, **sections: Any) -> Path:
        """Write a topology (JSON is YAML); the router's port is chosen free here, the others in the
        plan."""
        path = self.root / f"{name}.yaml"
        document = {
            "name": name,
            "model": str(self.model),
            "model_name": MODEL_NAME,
            "hosts": {"local": {}},
            "router": {"host": "local", "port": free_port()},
        } | sections
        path.write_text(json.dumps(document, indent=1))
        return path


@dataclass
class Deployment:
    lab: Lab
    name: str
    topology: Path

    def up(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.lab.pdctl("up", str(self.topology), *args)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.lab.pdctl("down", self.name)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.lab.pdctl("status", self.name, "--json").stdout)
        return document

    @property
    def endpoint(self) -> str:
        return str(self.status()["endpoint"])

    def segments(self) -> list[str]:
        """Its shared memory: other deployments, also those of other tests, have their own."""
        found = Home(self.lab.root).segments()
        return [name for name in found if name.split(".")[1] == self.name]

    def service(self, name: str) -> dict[str, Any]:
        return next(s for s in self.status()["services"] if s["name"] == name)

    def get(self, service: str, path: str) -> dict[str, Any]:
        url = self.service(service)["url"]
        with urllib.request.urlopen(f"{url}{path}", timeout=10) as response:
            document: dict[str, Any] = json.load(response)
        return document

    def held(self, service: str) -> dict[str, int]:
        """The non-zero entries of an instance's ledger."""
        ledger = self.get(service, "/ledger")["ledger"]
        return {key: value for key, value in ledger.items() if value}

    def wait_idle(self, *services: str, within_s: float = 20) -> None:
        deadline = time.monotonic() + within_s
        while held := {s: h for s in services if (h := self.held(s))}:
            assert time.monotonic() < deadline, f"still held: {held}"
            time.sleep(0.1)


def running(lab: Lab, name: str, **sections: Any) -> Iterator[Deployment]:
    """A deployment for the time of a fixture; that `down` leaves nothing is checked every time."""
    deployment = Deployment(lab, name, lab.topology(name, **sections))
    result = deployment.up()
    try:
        assert result.returncode == 0, result.stderr
        yield deployment
    finally:
        down = deployment.down()
    assert down.returncode == 0, down.stderr
    assert deployment.segments() == []

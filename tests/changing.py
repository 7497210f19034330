"""For tests that change a running (stub) deployment: its topology, what is told, who runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from free_ports import free_run
from supervision import Home

from pdctl import ops
from pdctl.health import get_json

# Ports of their own: other deployments on this machine take those that pdctl would choose.
PORTS = free_run(8)
Demo = Callable[..., Path]
PREFILL: dict[str, Any] = {
    "host": "local",
    "kv_cache": "1MiB",
    "port": PORTS[0],
    "peer_port": PORTS[2],
}
DECODE: dict[str, Any] = {
    "host": "local",
    "kv_cache": "1MiB",
    "cpu_buffer": "1MiB",
    "port": PORTS[4],
}


class Told:
    """Events of a run, as words."""

    def __init__(self) -> None:
        self.events: list[ops.Event] = []

    def __call__(self, event: ops.Event) -> None:
        self.events.append(event)

    def order(self, *kinds: str) -> list[str]:
        return [f"{e.kind} {e.service}" for e in self.events if e.kind in kinds]

    def notes(self) -> str:
        return "\n".join(e.text for e in self.events if e.kind == "note")


def up(path: Path, report: ops.Report = ops.silent, **options: Any) -> ops.UpResult:
    return ops.up(path, ops.UpOptions(**options), report)


def pids() -> dict[str, int | None]:
    return {s.name: s.pid for s in ops.status("demo").services}


def states(home: Home) -> dict[str, str]:
    return {name: found["state"] for name, found in routed(home).items()}


def routed(home: Home) -> dict[str, dict[str, Any]]:
    """What the (stub) router says of each instance."""
    token = (home.dir("demo", "router") / "token").read_text().strip()
    url = home.record("demo", "router", "spec.json")["spec"]["url"]
    _, body = get_json(f"{url}/internal/instances", token=token)
    return {i["name"]: i for i in body["instances"]}

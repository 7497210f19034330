"""Carry a plan out on locked hosts, wait until it serves, or undo it.

Remembers what it started: only that is ever undone. A service that was replaced is not brought
back. Decides nothing about what should run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pdctl import state
from pdctl.errors import PdctlError
from pdctl.events import Event, EventKind, Report
from pdctl.fleet import Fleet, on_all
from pdctl.health import Watcher, wait_ready
from pdctl.plan import Plan, Step
from pdctl.services import ServiceSpec

LOG_LINES = 20
UNDO_GRACE_S = 10.0


@dataclass(slots=True)
class Launch:
    fleet: Fleet
    plan: Plan
    secret_values: Mapping[str, str]
    """Of every environment variable that a service to start names."""
    report: Report
    started: list[str] = field(default_factory=list)
    """What this run started, or may have."""

    def carry_out(self, drain_s: float) -> None:
        """Stop what goes or changes, then start what is missing, on all hosts at once."""
        ending = self.plan.of("remove", "replace")
        for step in ending:
            self._tell("stop", step)
        if ending:
            names = [s.service.name for s in ending]
            left = [r for r in self.fleet.stop(names, drain_s) if r["left"]]
            if left:
                raise PdctlError(
                    f"{left[0]['service']}: processes {left[0]['left']} cannot be stopped"
                )
            self.fleet.purge(names)
        token = self.fleet.token() or secrets.token_hex(32)
        for step in self.plan.of("keep"):
            self._tell("keep", step)
        per_host: dict[str, list[Step]] = {}
        for step in self.plan.of("start", "replace"):
            per_host.setdefault(step.service.host, []).append(step)

        def start(steps: list[Step]) -> None:
            for step in steps:
                self._start(step.service, token)
                self._tell("start", step)

        on_all(list(per_host.values()), start)

    def _start(self, service: ServiceSpec, token: str) -> None:
        self.started.append(service.name)  # first: an interrupted call may have started it
        values = self.secret_values
        payload = {
            "spec": asdict(service),
            "hash": service.hash,
            "token": token,
            "secret_env": {name: values[name] for name in service.secrets},
            "secret_files": {file: values[name] for file, name in service.secret_files.items()},
        }
        answer = self.fleet.session(service.host).call("start", payload)
        if not answer["started"]:
            self.started.remove(service.name)

    def wait(self, timeout_s: float) -> None:
        """Until all of the plan is ready. Raises ServiceFailed, after its log was reported."""

        def on_ready(service: ServiceSpec, seconds: float) -> None:
            self.report(Event("ready", service.url, service.name, service.host, seconds))

        def on_wait(service: ServiceSpec, reason: str, seconds: float) -> None:
            self.report(Event("wait", reason, service.name, service.host, seconds))

        watcher = Watcher(
            observe=lambda: {r.name: r for r in self.fleet.observe(scan=False)},
            tail=lambda name: self.fleet.tail(name, LOG_LINES),
            on_ready=on_ready,
            on_wait=on_wait,
        )
        services = [s.service for s in self.plan.of("keep", "start", "replace")]
        wait_ready(services, watcher, time.monotonic() + timeout_s)

    def undo(self) -> None:
        """Stop what this run started. One try; what it cannot stop is named, and `down` can."""
        if not self.started:
            return
        names = ", ".join(self.started)
        self.report(Event("rollback", f"stopping what this run started: {names}"))
        try:
            reports = self.fleet.stop(self.started, UNDO_GRACE_S)
            left = [r["service"] for r in reports if r["left"]]
            self.fleet.purge([name for name in self.started if name not in left])
            if not self.fleet.observe(scan=False):
                state.forget(self.fleet.deployment)
        except PdctlError as e:
            name = self.fleet.deployment
            self.report(Event("note", f"rollback failed: {e}; `pdctl down {name}` stops all"))
            return
        if left:
            self.report(Event("note", f"still running: {', '.join(left)}"))

    def _tell(self, kind: EventKind, step: Step) -> None:
        self.report(Event(kind, step.reason, step.service.name, step.service.host))

"""Keep new requests away from one instance, and wait until it has finished those it has.

It goes on running. The mark holds until it is taken back, or the instance is restarted. When it is
interrupted while it waits, it takes the mark back, if it was its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdctl.batches import serve
from pdctl.draining import Drain
from pdctl.errors import PdctlError, UsageError
from pdctl.events import Event, Report
from pdctl.find import ANYWHERE, Where, located
from pdctl.fleet import Fleet
from pdctl.hold import locked
from pdctl.restart import hosts_of
from pdctl.routing import RouterClient
from pdctl.services import ServiceSpec

LOCK_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class DrainResult:
    name: str
    service: str
    draining: bool
    left: str
    """What is still under way, in words; empty: nothing."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.drain/1",
            "name": self.name,
            "service": self.service,
            "draining": self.draining,
            "left": self.left,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True)
class DrainOptions:
    undo: bool = False
    timeout_s: float | None = None
    """How long to wait; None: the topology's drain_timeout."""


def drain(
    name: str | None, service: str, options: DrainOptions, report: Report, where: Where = ANYWHERE
) -> DrainResult:
    """Raises UsageError for what cannot be drained."""
    begun = time.monotonic()
    report(Event("phase", "asking the hosts"))
    purpose = f"drain {service}" + (" --undo" if options.undo else "")
    left = ""
    with contextlib.ExitStack() as until_finished:
        with (
            located(name, where) as found,
            locked(
                found.known,
                purpose=purpose,
                wait_s=LOCK_WAIT_S,
                needed=hosts_of(found.known, ("router", service)),
                found=found,
            ) as fleet,
        ):
            known = found.known
            running = [r.spec for r in fleet.records if r.spec and r.alive]
            spec = _instance(running, service, known.name)
            drained = Drain(router_of(fleet, running), running, [spec])
            if options.undo:
                drained.router.drain(service, False)
            else:
                until_finished.enter_context(drained.held(report))
        if not options.undo:
            warn_if_last(drained, report)
            seconds = options.timeout_s if options.timeout_s is not None else known.drain_timeout_s
            left = drained.wait(seconds, report).get(service, "")
    seconds = time.monotonic() - begun
    return DrainResult(known.name, service, not options.undo, left, seconds)


def router_of(fleet: Fleet, running: Iterable[ServiceSpec]) -> RouterClient:
    """Raises PdctlError when none runs."""
    router = next((s for s in running if s.role == "router"), None)
    token = fleet.token() if router else None
    if router is None or token is None:
        raise PdctlError(
            f"the router of {fleet.deployment} does not run", hint="`pdctl up` starts it"
        )
    return RouterClient(router.url, token)


def _instance(running: Iterable[ServiceSpec], name: str, deployment: str) -> ServiceSpec:
    instances = {s.name: s for s in running if s.role != "router"}
    if name in instances:
        return instances[name]
    if name == "router":
        raise UsageError("the router cannot be drained: it is what drains the others")
    there = f"what runs: {', '.join(sorted(instances))}" if instances else "nothing runs"
    raise UsageError(f"{deployment} has no running instance {name}", hint=there)


def warn_if_last(drain: Drain, report: Report) -> None:
    """Says so when what is drained now was needed for any answer."""
    view = drain.router.view() or {}
    names = [s.name for s in drain.leaving]
    before = [
        s
        for s in drain.running
        if s.name in names or s.name not in view or view[s.name].state != "draining"
    ]
    if serve(before) and not serve(s for s in before if s.name not in names):
        what = f"nothing is served from now on: new requests get 503 until {names[0]} is back"
        report(Event("note", what))

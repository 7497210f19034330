"""Start services again as they are: all at once, or one after the other without losing a request.

Works from the records on the hosts alone. What is restarted keeps its files, token and secrets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdctl.batches import batches, remarks
from pdctl.errors import PdctlError, UsageError
from pdctl.events import Event, Report
from pdctl.find import ANYWHERE, Where, located
from pdctl.fleet import Fleet
from pdctl.hold import locked
from pdctl.launch import Launch, Patience, show_log
from pdctl.plan import Plan, Step
from pdctl.records import ServiceRecord
from pdctl.routing import RouterClient, View
from pdctl.services import ServiceSpec
from pdctl.state import KnownDeployment

LOCK_WAIT_S = 3.0
READY_S = 300.0


@dataclass(frozen=True, slots=True)
class RestartOptions:
    services: tuple[str, ...] = ()
    """None: all; with `rolling` all but the router."""
    rolling: bool = False
    timeout_s: float | None = None
    """How long running requests may go on; None: the topology's drain_timeout."""
    wait_timeout_s: float = READY_S
    approve: Callable[[Plan], None] = lambda _: None
    """Sees the plan when nothing would be served for a while. Raises PdctlError to stop it."""


@dataclass(frozen=True, slots=True)
class RestartResult:
    name: str
    restarted: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.restart/1",
            "name": self.name,
            "restarted": list(self.restarted),
            "seconds": round(self.seconds, 3),
        }


def restart(
    name: str | None, options: RestartOptions, report: Report, where: Where = ANYWHERE
) -> RestartResult:
    """Stops at the first service that does not come back, and raises; the others go on running."""
    begun = time.monotonic()
    report(Event("phase", "asking the hosts"))
    purpose = "restart --rolling" if options.rolling else "restart"
    with (
        located(name, where) as found,
        locked(
            found.known,
            purpose=purpose,
            wait_s=LOCK_WAIT_S,
            needed=hosts_of(found.known, options.services),
            found=found,
        ) as fleet,
    ):
        known = found.known
        records = fleet.records
        chosen = _chosen(records, options, known.name)
        plan = Plan(known.name, tuple(_step(r, chosen) for r in records if r.spec or r.alive))
        if notes := remarks(plan, rolling=options.rolling):
            report(Event("phase", ""))  # it may ask
            options.approve(replace(plan, notes=notes))
        view = _view(fleet, plan)
        serving = {n for n, r in (view or {}).items() if r.serves} | {"router"}
        report(Event("phase", "changing what runs"))
        launch = Launch(fleet, plan, {}, report, awaited=frozenset(serving if view else ()))
        drain_s = options.timeout_s if options.timeout_s is not None else known.drain_timeout_s
        patience = Patience(drain_s=drain_s, ready_s=options.wait_timeout_s)
        try:
            launch.carry_out(batches(plan, rolling=options.rolling), patience)
        except PdctlError as e:
            show_log(e, report)
            raise
    return RestartResult(known.name, tuple(launch.started), time.monotonic() - begun)


def hosts_of(known: KnownDeployment, services: Collection[str]) -> set[str] | None:
    """Keys of the hosts that are to have these (none named: all). None: not known, so all hosts."""
    hosts = {host for host, name in known.services if not services or name in services}
    return hosts & known.hosts.keys() or None


def _chosen(
    records: Sequence[ServiceRecord], options: RestartOptions, deployment: str
) -> Collection[str]:
    names = sorted(r.name for r in records)
    if not names:
        raise UsageError(f"there is no deployment {deployment}", hint="`pdctl up` starts one")
    unknown = [s for s in options.services if s not in names]
    if unknown:
        raise UsageError(
            f"{deployment} has no service {unknown[0]}", hint=f"its services: {', '.join(names)}"
        )
    return options.services or [n for n in names if not (options.rolling and n == "router")]


def _step(record: ServiceRecord, chosen: Collection[str]) -> Step:
    if record.spec is None and record.name in chosen:
        raise PdctlError(
            f"{record.name}: its record was written by another version of pdctl",
            hint="`pdctl up` replaces it",
        )
    spec = record.spec or ServiceSpec(record.deployment, record.name, "mixed", record.host, ())
    kind, reason = ("restart", "asked for") if record.name in chosen else ("keep", "not asked for")
    return Step(kind, spec, reason, record.spec, running=record.alive)  # type: ignore[arg-type]


def _view(fleet: Fleet, plan: Plan) -> View | None:
    """The router's, as far as there is one."""
    router = next((s.service for s in plan.steps if s.running and s.service.role == "router"), None)
    token = fleet.token() if router else None
    return RouterClient(router.url, token).view() if router and token else None

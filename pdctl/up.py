"""Bring a deployment to what its topology says: check, start, wait, and undo on failure.

Only what this run started is ever undone. Ctrl-C (see `interrupts`) undoes too, in every phase;
with `detach` there is no wait, and what was started by then stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdctl import preflight, state
from pdctl.batches import batches
from pdctl.collect import collect_failure
from pdctl.errors import PdctlError, failed_services
from pdctl.events import Event, Report
from pdctl.find import Found, Where, located
from pdctl.fleet import Fleet, raise_failures
from pdctl.hold import leave, locked, register
from pdctl.launch import Launch, Patience, show_log
from pdctl.plan import Plan
from pdctl.records import ServiceRecord
from pdctl.wanted import Wanted, check_hosts, planned, read, unclaimed

LOCK_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class UpOptions:
    detach: bool = False
    wait_timeout_s: float | None = None
    """None: the topology's startup_timeout."""
    keep_on_failure: bool = False
    approve: Callable[[Plan], None] = lambda _: None
    """Sees the plan before anything is changed. Raises PdctlError to stop it."""


@dataclass(frozen=True, slots=True)
class UpResult:
    name: str
    endpoint: str
    plan: Plan
    started: tuple[str, ...]
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    ready: bool
    """False only with `detach`: nobody waited."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        names = {"started": self.started, "kept": self.kept, "removed": self.removed}
        return {
            "schema": "pdctl.up/1",
            "name": self.name,
            "endpoint": self.endpoint,
            **{key: list(value) for key, value in names.items()},
            "ready": self.ready,
            "seconds": round(self.seconds, 3),
        }


def plan_up(path: Path, report: Report) -> Plan:
    """What `up` would do now. Takes no lock and changes nothing."""
    wanted = read(path, report)
    report(Event("phase", "asking the hosts"))
    with located(wanted.known.name, Where(file=path)) as found:
        if found.unreachable:
            raise_failures([*found.unreachable.values()], len(found.reachable()))
        return unclaimed(wanted, found)


def up(path: Path, options: UpOptions, report: Report) -> UpResult:
    """Idempotent. Raises PdctlError when the deployment is not ready at the end."""
    return bring_up(read(path, report), "up", options, report)


def bring_up(
    wanted: Wanted,
    purpose: str,
    options: UpOptions,
    report: Report,
    *,
    found: Found | None = None,
) -> UpResult:
    """Carry out what is wanted. `found`: the deployment that this was made from; what was known of
    it is known again when it fails. Without, what is wanted does not depend on what was there.
    """
    before = found.known if found is not None else None
    begun = time.monotonic()
    name, needed = wanted.topology.name, wanted.topology.used_hosts()
    report(Event("phase", "asking the hosts"))
    with locked(
        wanted.known, purpose=purpose, wait_s=LOCK_WAIT_S, needed=needed, found=found
    ) as fleet:
        for error in fleet.lost.values():
            report(Event("note", str(error)))
        for host in fleet.late:
            report(Event("note", f"{host}: no answer yet; what may run there is left as it is"))
        records = fleet.records
        plan = planned(wanted, fleet, records, before)
        report(Event("phase", ""))  # it may ask
        options.approve(plan)
        values = preflight.secret_values(s.service for s in plan.of("start", "replace"))
        report(Event("phase", "checking the hosts"))
        for note in check_hosts(wanted, fleet, plan, records):
            report(Event("note", note))
        known = _made_known(wanted, fleet, records, report)
        report(Event("phase", "changing what runs"))
        launch = Launch(fleet, plan, values, report)
        succeeded = False
        try:
            patience = Patience(
                drain_s=wanted.topology.drain_timeout,
                ready_s=options.wait_timeout_s or wanted.topology.startup_timeout,
                wait_last=not options.detach,
            )
            launch.carry_out(batches(plan), patience)
            succeeded = True
            leave(fleet, known, needed)
        except PdctlError as e:
            show_log(e, report)
            if launch.changed or failed_services(e):  # else it was only refused
                _save_evidence(fleet, wanted.path, e, report)
            raise
        finally:
            if not succeeded and options.keep_on_failure:
                report(Event("note", f"kept for a look: {', '.join(launch.started) or 'nothing'}"))
            elif not succeeded:
                launch.undo()
                if before is not None:
                    _known_again(before, fleet)
    return UpResult(
        name=name,
        endpoint=next(s.service.url for s in plan.steps if s.service.role == "router"),
        plan=plan,
        started=tuple(launch.started),
        kept=tuple(s.service.name for s in plan.of("keep")),
        removed=tuple(s.service.name for s in plan.of("remove")),
        ready=not options.detach,
        seconds=time.monotonic() - begun,
    )


def _save_evidence(fleet: Fleet, path: Path, error: PdctlError, report: Report) -> None:
    """Before the rollback takes the logs and records away."""
    try:
        report(
            Event("note", f"what is known of the failure: {collect_failure(fleet, path, error)}")
        )
    except PdctlError as e:
        report(Event("note", f"cannot save what is known of the failure: {e}"))


def _made_known(
    wanted: Wanted, fleet: Fleet, records: Sequence[ServiceRecord], report: Report
) -> state.KnownDeployment:
    """Here and on every host, before anything starts."""
    # What is left on hosts that an earlier topology had must not be forgotten.
    known = replace(wanted.known, hosts={**fleet.addresses, **wanted.known.hosts})
    _remember(known, report)  # first: `down` finds what a killed `up` has begun
    try:
        register(fleet, known)
    except PdctlError:
        if not records:
            state.forget(known.name)
        raise
    return known


def _known_again(before: state.KnownDeployment, fleet: Fleet) -> None:
    with contextlib.suppress(PdctlError):  # a host is lost: the failure that led here says more
        register(fleet, before)
    state.remember(before)


def _remember(known: state.KnownDeployment, report: Report) -> None:
    error = state.remember(known)
    if error:
        report(Event("note", f"cannot remember {known.name} on this machine: {error}"))

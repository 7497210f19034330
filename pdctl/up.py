"""Bring a deployment to what its topology says: check, start, wait, and undo on failure.

Only what this run started is ever undone. Ctrl-C (see `interrupts`) undoes too, in every phase;
with `detach` there is no wait, and what was started by then stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdctl import command, models, preflight, state, topology, wheels
from pdctl.agent import Session, shim_call
from pdctl.batches import batches, remarks
from pdctl.collect import collect_failure
from pdctl.errors import PdctlError, ServiceFailed
from pdctl.events import Event, Report
from pdctl.find import Found, Where, latest_said, located, with_former
from pdctl.fleet import Fleet, on_all, raise_failures
from pdctl.hold import leave, locked, register
from pdctl.hosts import Host
from pdctl.launch import Launch, Patience, show_log
from pdctl.plan import Plan, allocate_ports, make_plan
from pdctl.records import ServiceRecord
from pdctl.scaling import count_of

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
    wanted = _read(path, report)
    report(Event("phase", "asking the hosts"))
    with located(wanted.known.name, Where(file=path)) as found:
        if found.unreachable:
            raise_failures([*found.unreachable.values()], len(found.reachable()))
        ask = {"models": wanted.places, "busy": True}
        probes = on_all(found.reachable(), lambda h: (h.name, shim_call(h, "probe", ask)))
        plan = _plan(wanted, found.hosts, found.records, dict(probes), _busy(dict(probes)))
        return _with_scale(plan, wanted, latest_said(found.answers.values(), plan.deployment))


def up(path: Path, options: UpOptions, report: Report) -> UpResult:
    """Idempotent. Raises PdctlError when the deployment is not ready at the end."""
    return bring_up(_read(path, report), "up", options, report)


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
        plan = _planned(wanted, fleet, records, before)
        report(Event("phase", ""))  # it may ask
        options.approve(plan)
        values = preflight.secret_values(s.service for s in plan.of("start", "replace"))
        report(Event("phase", "checking the hosts"))
        for note in _check(wanted, fleet, plan, records):
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
            if launch.changed or isinstance(e, ServiceFailed):  # else it was only refused
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


# ---- what is wanted ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    topology: topology.Topology
    path: Path
    model: models.ResolvedModel | None
    """On this machine; None when no instance is to run here."""
    places: tuple[str, ...]
    """Where other hosts may have it."""
    known: state.KnownDeployment
    """With its hosts, and those an earlier `up` used: what is left there is removed."""


def _read(path: Path, report: Report) -> Wanted:
    loaded = topology.load(path)
    for warning in loaded.warnings:
        report(Event("note", warning))
    return wanted_of(loaded.topology, path, with_former(loaded.topology, path))


def wanted_of(t: topology.Topology, path: Path, known: state.KnownDeployment) -> Wanted:
    """Raises ModelNotFound when an instance is to run here and the model is not."""
    folder = path.resolve().parent
    here = any(t.hosts[i.host].local for i in t.instances())
    model = models.resolve(t.model, folder) if here else None
    places = models.host_places(t.model, folder)
    return Wanted(t, path, model, places, known)


def _planned(
    wanted: Wanted,
    fleet: Fleet,
    records: Sequence[ServiceRecord],
    before: state.KnownDeployment | None,
) -> Plan:
    name, ask = wanted.topology.name, {"models": wanted.places, "busy": True}
    probes = dict(fleet.on_sessions(lambda s: s.call("probe", ask)))
    said = latest_said(fleet.answers.values(), name)
    if before is not None and said is not None and said.at != before.at:
        raise PdctlError(
            f"{name} was changed meanwhile from {said.machine.partition(':')[0]}",
            hint="look with `pdctl status`, and try again",
        )
    return _with_scale(_claimed(wanted, fleet, records, probes), wanted, said)


def _claimed(
    wanted: Wanted,
    fleet: Fleet,
    records: Sequence[ServiceRecord],
    probes: Mapping[str, Mapping[str, Any]],
) -> Plan:
    """A plan whose new ports are ours until we end: no other deployment is given them meanwhile.

    A port that the file asks for stays in it whoever has it; the checks name who listens there.
    """
    busy = _busy(probes)
    while True:
        plan = _plan(wanted, fleet.hosts, records, probes, busy)
        refused = _claim(fleet, plan)
        if all(ports <= busy[name] for name, ports in refused.items()):
            return plan
        for name, ports in refused.items():
            busy[name] |= ports


def _claim(fleet: Fleet, plan: Plan) -> dict[str, set[int]]:
    """Claim the ports that are new in the plan. Host's name -> those that somebody else has."""
    new: dict[str, set[int]] = {}
    for step in plan.of("start", "replace"):
        had = step.now.ports if step.now is not None and step.running else {}
        ports = set(step.service.ports.values()) - set(had.values())
        new.setdefault(fleet.hosts[step.service.host].name, set()).update(ports)

    def claim(session: Session) -> dict[str, Any]:
        return session.call("claim", {"ports": sorted(new[session.host.name])})

    concerned = [s for s in fleet.sessions if s.host.name in new]
    return {name: set(answer["refused"]) for name, answer in fleet.on_some(concerned, claim)}


def _busy(probes: Mapping[str, Mapping[str, Any]]) -> dict[str, set[int]]:
    """Host's name -> ports."""
    return {name: set(probe["busy"]) for name, probe in probes.items()}


def _with_scale(plan: Plan, wanted: Wanted, said: state.KnownDeployment | None) -> Plan:
    """Says what becomes of the numbers that `pdctl scale` had set."""
    now = {role: count_of(wanted.topology, role) for role in topology.ROLES}
    lost = [
        f"`pdctl scale` had set {role}={count}; now it is {now[role]}"
        for role, count in (said.replicas if said else {}).items()
        if role in now and now[role] != count
    ]
    return replace(plan, notes=(*lost, *plan.notes))


def _plan(
    wanted: Wanted,
    hosts: Mapping[str, Host],
    records: Sequence[ServiceRecord],
    probes: Mapping[str, Mapping[str, Any]],
    taken: Mapping[str, Collection[int]],
) -> Plan:
    """`probes` and `taken` ports by the hosts' names."""
    t = wanted.topology
    facts = {
        key: _facts(wanted, key, hosts[key], probes[hosts[key].name]) for key in t.used_hosts()
    }
    observed = [r.observed() for r in records]
    busy = {k: taken[h.name] for k, h in hosts.items() if h.name in taken}
    services = command.services(t, allocate_ports(t, observed, busy), facts)
    plan = make_plan(t.name, services, observed)
    return replace(plan, notes=remarks(plan))


def _facts(wanted: Wanted, key: str, host: Host, probe: Mapping[str, Any]) -> command.HostFacts:
    entry, name = wanted.topology.hosts[key], models.served_name(wanted.topology.model)
    return command.HostFacts(
        python=preflight.runtime_python(entry, host.base, probe),
        home=host.base,
        model_path=_model_path(wanted, host, probe) or wanted.places[0],
        model_name=wanted.model.served_name if wanted.model else name,
    )


def _model_path(wanted: Wanted, host: Host, probe: Mapping[str, Any]) -> str:
    """Where the host has the model; empty when it has not."""
    here = str(wanted.model.path) if wanted.model is not None else ""
    return here if host.is_local else str(probe["model"])


def _check(wanted: Wanted, fleet: Fleet, plan: Plan, records: Sequence[ServiceRecord]) -> list[str]:
    """Per machine: several keys may share its ports and memory. Returns what is only odd."""
    starting = [s.service for s in plan.of("start", "replace")]
    ending = {s.service.name for s in plan.of("replace", "remove")}
    keys = {h.name: {k for k, o in fleet.hosts.items() if o is h} for h in fleet.hosts.values()}

    def probed(session: Session) -> dict[str, Any]:
        host = session.host
        here = [s for s in starting if s.host in keys[host.name]]
        computes = any(s.role != "router" for s in here)
        request = preflight.probe_request(here, wanted.places if computes else ())
        if host.is_local and computes and wanted.model is not None:
            request["paths"] = [str(wanted.model.path)]
        return session.call("probe", request)

    problems: list[str] = []
    versions: dict[str, Mapping[str, Any]] = {}
    for (name, facts), session in zip(fleet.on_sessions(probed), fleet.sessions, strict=True):
        here = [s for s in starting if s.host in keys[name]]
        computes = any(s.role != "router" for s in here)
        if computes and not _model_path(wanted, session.host, facts):
            fix = f"run `pdctl sync {wanted.path} --model`"
            problems.append(f"{name}: model {wanted.topology.model} is not there: {fix}")
        leaving = [r for r in records if r.host in keys[name] and r.name in ending]
        problems += preflight.check_versions(name, facts, here, wheels.runtime_code())
        problems += preflight.check_host(name, facts, here, leaving)
        versions.update((name, v) for v in facts["versions"].values())
    preflight.raise_problems(problems)
    return preflight.differing_versions(versions)


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

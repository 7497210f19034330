"""What a topology wants of its hosts: the plan, with ports that are ours, and what is in its way.

Reads and asks; claims ports, which are free again when we end. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdctl import command, models, preflight, state, topology, wheels
from pdctl.agent import Session, shim_call
from pdctl.batches import remarks
from pdctl.events import Event, Report
from pdctl.find import Found, latest_said, with_former
from pdctl.fleet import Fleet, on_all
from pdctl.hold import changed_meanwhile
from pdctl.hosts import Host
from pdctl.plan import ObservedService, Plan, allocate_ports, make_plan
from pdctl.records import ServiceRecord, parse_services
from pdctl.scaling import count_of


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


def read(path: Path, report: Report) -> Wanted:
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


# ---- the plan ------------------------------------------------------------------------------------


def unclaimed(wanted: Wanted, found: Found) -> Plan:
    """The plan for hosts that nobody holds. Its new ports may be another's before it is done."""

    def probe(host: Host) -> tuple[str, dict[str, Any]]:
        return host.name, shim_call(host, "probe", _first_question(wanted, host, found.answers))

    probes = dict(on_all(found.reachable(), probe, undone=False))
    plan = _plan(wanted, found.hosts, found.records, probes, _busy(probes))
    return _with_scale(plan, wanted, latest_said(found.answers.values(), plan.deployment))


def planned(
    wanted: Wanted,
    fleet: Fleet,
    records: Sequence[ServiceRecord],
    before: state.KnownDeployment | None,
) -> Plan:
    """The plan for locked hosts, its ports claimed. `before`: what it was made from, if that
    matters; raises PdctlError when another has changed it since.
    """

    def probe(session: Session) -> dict[str, Any]:
        return session.call("probe", _first_question(wanted, session.host, fleet.answers))

    name, probes = wanted.topology.name, dict(fleet.on_sessions(probe))
    said = latest_said(fleet.answers.values(), name)
    if before is not None and said is not None and said.at != before.at:
        raise changed_meanwhile(said)
    return _with_scale(_claimed(wanted, fleet, records, probes), wanted, said)


def _first_question(
    wanted: Wanted, host: Host, answers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """`answers`: of each host to `status`, by its name. It hears of its own secrets only."""
    name = wanted.topology.name
    there = parse_services(host.name, answers.get(host.name, {"services": ()})["services"])
    running = [r.spec for r in there if r.deployment == name and r.alive and r.spec]
    digests = preflight.secret_digests(running)
    return {"deployment": name, "models": wanted.places, "busy": True, **digests}


def _observed(
    record: ServiceRecord, hosts: Mapping[str, Host], probes: Mapping[str, Mapping[str, Any]]
) -> ObservedService:
    host = hosts.get(record.host)
    probe = probes.get(host.name) if host is not None else None
    rotated = probe["rotated"].get(record.name, ()) if probe is not None else ()
    return replace(record.observed(), rotated=tuple(rotated))


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
    """Says which numbers that `pdctl scale` had set are lost; not of those that it sets now."""
    now = {role: count_of(wanted.topology, role) for role in topology.ROLES}
    lost = [
        f"`pdctl scale` had set {role}={count}; now it is {now[role]}"
        for role, count in (said.replicas if said else {}).items()
        if role in now and role not in wanted.known.replicas and now[role] != count
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
    observed = [_observed(r, hosts, probes) for r in records]
    busy = {k: taken[h.name] for k, h in hosts.items() if h.name in taken}
    services = command.services(t, allocate_ports(t, observed, busy), facts)
    plan = make_plan(t.name, services, observed, wanted.known.replicas)
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


# ---- what is in its way --------------------------------------------------------------------------


def check_hosts(
    wanted: Wanted, fleet: Fleet, plan: Plan, records: Sequence[ServiceRecord]
) -> list[str]:
    """Returns what is only odd. Raises PdctlError with all that keeps the plan from being done."""
    starting = [s.service for s in plan.of("start", "replace")]
    ending = {s.service.name for s in plan.of("replace", "remove")}
    # Per machine: several keys may share its ports and memory.
    keys = {h.name: {k for k, o in fleet.hosts.items() if o is h} for h in fleet.hosts.values()}

    def probed(session: Session) -> dict[str, Any]:
        host = session.host
        here = [s for s in starting if s.host in keys[host.name]]
        computes = any(s.role != "router" for s in here)
        request = preflight.probe_request(here, wanted.places if computes else ())
        if host.is_local and computes and wanted.model is not None:
            request["paths"] = [str(wanted.model.path)]
        return session.call("probe", request)

    probes = list(zip(fleet.on_sessions(probed), fleet.sessions, strict=True))
    without_model = {
        name
        for (name, facts), session in probes
        if any(s.role != "router" and s.host in keys[name] for s in starting)
        and not _model_path(wanted, session.host, facts)
    }
    sync = preflight.sync_command(wanted.path, model=bool(without_model))
    obstacles: list[preflight.Obstacle] = []
    versions: dict[str, Mapping[str, Any]] = {}
    for (name, facts), _ in probes:
        here = [s for s in starting if s.host in keys[name]]
        if name in without_model:
            obstacles.append(preflight.no_model(name, wanted.topology.model, sync))
        leaving = [r for r in records if r.host in keys[name] and r.name in ending]
        obstacles += preflight.check_versions(name, facts, here, wheels.runtime_code(), sync)
        obstacles += preflight.check_host(name, facts, here, leaving)
        versions.update((name, v) for v in facts["versions"].values())
    preflight.raise_obstacles(obstacles, wanted.path)
    return preflight.differing_versions(versions)

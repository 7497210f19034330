"""Look at a topology's hosts and at the network between them before anything is started.

Changes nothing. Needs no runtime on the hosts, only the shim. Every host is asked, whatever others
answer; what is found wrong is judged by `doctor_checks`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdctl import command, models, preflight, topology, wheels
from pdctl.agent import shim_call
from pdctl.doctor_checks import (
    Clock,
    Trouble,
    View,
    address_trouble,
    alike_troubles,
    edge_troubles,
    host_troubles,
    lacks_model,
    listen_troubles,
)
from pdctl.doctor_network import Edge, Network, Pair, Reached, edges
from pdctl.errors import EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE, HostUnreachable, PdctlError
from pdctl.events import Event, Report
from pdctl.fleet import attempt_all, opened
from pdctl.hosts import Host
from pdctl.plan import allocate_ports
from pdctl.records import ServiceRecord, parse_services
from pdctl.services import ServiceSpec
from pdctl.sizes import counted
from pdctl.topology import DecodeGroup, Instance, Topology

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PairReport:
    """One prefill and one decode instance."""

    prefill: Instance
    decode: Instance
    port: int
    """Where decode connects to prefill."""
    path: str
    """The one that KV would take."""
    reached: bool | None
    """None: nobody could try."""
    rates: Mapping[str, float]
    """Path -> bytes a second, as far as it was measured."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    name: str
    views: tuple[View, ...]
    lost: Mapping[str, PdctlError]
    """Key -> why nothing is known of that host."""
    pairs: tuple[PairReport, ...] = ()
    reached: Mapping[Edge, Reached] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()

    @property
    def exit_code(self) -> int:
        if any(isinstance(e, HostUnreachable) for e in self.lost.values()):
            return EXIT_UNREACHABLE
        return EXIT_FAILED if self.lost or any(t.severe for t in self.troubles) else EXIT_OK


def diagnose(path: Path, report: Report) -> Diagnosis:
    """Raises TopologyError only: what is wrong with hosts is part of the answer."""
    t = topology.load(path).topology
    used = t.used_hosts()
    addresses = {k: None if t.hosts[k].local else t.hosts[k].address for k in used}
    with opened(addresses) as hosts:
        report(Event("wait", f"asking {counted(len(used), 'host')}", "hosts"))
        looks = attempt_all(used, lambda k: _first_look(t, hosts[k]), undone=False)
        asked = dict(zip(used, looks, strict=True))
        lost = {k: a for k, a in asked.items() if isinstance(a, PdctlError)}
        known = {k: a for k, a in asked.items() if isinstance(a, _Look)}
        services = _services(t, hosts, known)
        exam = _Exam(t, path, hosts, services)
        found = attempt_all(list(known), lambda k: exam.view(k, known[k]), undone=False)
        views = [v for v in found if isinstance(v, View)]
        lost |= {k: v for k, v in zip(known, found, strict=True) if isinstance(v, PdctlError)}
        return _judged(t, path, views, lost, _try_network(t, hosts, services, views, report))


# ---- hosts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Look:
    """What has to be known of all hosts before ports can be given out."""

    clock: Clock
    records: tuple[ServiceRecord, ...]
    probe: Mapping[str, Any]


def _first_look(t: Topology, host: Host) -> _Look:
    answer = shim_call(host, "status", {"deployment": t.name, "scan": False})
    # Only now: the first call has brought the shim there.
    asked, before = time.time(), time.monotonic()
    theirs = float(shim_call(host, "clock", {})["time"])
    half = (time.monotonic() - before) / 2
    clock = Clock(theirs - asked - half, half)
    probe = shim_call(host, "probe", {"busy": True})
    return _Look(clock, parse_services(host.name, answer["services"]), probe)


def _services(
    t: Topology, hosts: Mapping[str, Host], known: Mapping[str, _Look]
) -> tuple[ServiceSpec, ...]:
    """As `up` would start them. Of a host that is lost only names and ports count."""
    observed = [r.observed() for look in known.values() for r in look.records]
    busy = {k: known[k].probe["busy"] if k in known else [] for k in t.used_hosts()}
    facts = {}
    for key in t.used_hosts():
        base = hosts[key].base if key in known else ""
        probe = known[key].probe if key in known else {}
        python = preflight.runtime_python(t.hosts[key], base, probe)
        facts[key] = command.HostFacts(python, base, "", "")
    return command.services(t, allocate_ports(t, observed, busy), facts)


@dataclass(frozen=True, slots=True)
class _Exam:
    topology: Topology
    path: Path
    hosts: Mapping[str, Host]
    services: tuple[ServiceSpec, ...]

    def view(self, key: str, look: _Look) -> View:
        t, entry = self.topology, self.topology.hosts[key]
        here = tuple(s for s in self.services if s.host == key)
        places = models.host_places(t.model, self.path.resolve().parent)
        others = [a for k in t.used_hosts() if k != key and (a := t.hosts[k].reachable_at)]
        names = [a for a in (entry.reachable_at,) if a is not None]
        host = self.hosts[key]
        request = preflight.probe_request(here, places)
        probe = shim_call(host, "probe", request, timeout=TIMEOUT_S)
        facts = shim_call(host, "facts", {"names": names, "towards": others})
        instances = tuple(i for i in t.instances() if i.host == key)
        return View(key, entry, probe, facts, look.clock, here, instances, look.records)


# ---- the network ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tried:
    network: Network
    reached: Mapping[Edge, Reached]
    rates: Mapping[Pair, float]
    copies: Mapping[str, float]
    services: tuple[ServiceSpec, ...]


def _try_network(
    t: Topology,
    hosts: Mapping[str, Host],
    services: tuple[ServiceSpec, ...],
    views: Sequence[View],
    report: Report,
) -> _Tried:
    network = Network(t, {v.key: hosts[v.key] for v in views}, services)
    running = frozenset(name for v in views for name in v.running)
    pairs = [(p.host, d.host) for p, d in _pairs(t)]
    with network.listening(running):
        report(Event("wait", "trying every connection", "network"))
        answering = {v.key for v in views}
        wanted = [e for e in edges(t, services) if e.target in answering]
        reached = network.reach(wanted, running)
        rates = network.rates(pairs, report)
        copies = network.copies([p for p, d in pairs if p == d])
    return _Tried(network, reached, rates, copies, services)


def _pairs(t: Topology) -> list[tuple[Instance, Instance]]:
    instances = t.instances()
    prefills = [i for i in instances if i.role == "prefill"]
    return [(p, d) for p in prefills for d in instances if d.role == "decode"]


def expected_path(decode: Instance, prefill: Instance, views: Mapping[str, View]) -> str:
    """What the topology asks for; with `auto`, the best that both hosts have."""
    assert isinstance(decode.group, DecodeGroup)
    if decode.group.transfer != "auto":
        return decode.group.transfer
    if decode.host == prefill.host:
        return "cuda_ipc" if decode.group.devices and prefill.group.devices else "shm"
    both = [views[k] for k in (decode.host, prefill.host) if k in views]
    rdma = len(both) == 2 and all(v.rdma_ports and v.versions.get("ibverbs") for v in both)
    return "rdma" if rdma else "tcp"


# ---- the whole -----------------------------------------------------------------------------------


def _judged(
    t: Topology,
    path: Path,
    views: Sequence[View],
    lost: Mapping[str, PdctlError],
    tried: _Tried,
) -> Diagnosis:
    by_key = {v.key: v for v in views}
    sync = preflight.sync_command(path, model=any(map(lacks_model, views)))
    troubles = [Trouble(k, _reason(k, e), e.hint) for k, e in lost.items()]
    wrong = [a for v in views if len(t.used_hosts()) > 1 and (a := address_trouble(v))]
    troubles += wrong
    for view in views:
        troubles += host_troubles(view, wheels.runtime_code(), t, sync)
    skip = {a.where for a in wrong}
    for view in views:
        if view.key in tried.network.heard and view.key not in skip:
            troubles += listen_troubles(view, tried.network.heard[view.key])
    troubles += edge_troubles(tried.reached, tried.network.heard, skip)
    troubles += alike_troubles(views, sync)
    ports = {s.name: s.ports["peer"] for s in tried.services if s.role == "prefill"}
    pairs = []
    for prefill, decode in _pairs(t):
        port = ports[prefill.name]
        answers = [
            r
            for e, r in tried.reached.items()
            if (e.source, e.target, e.port) == (decode.host, prefill.host, port)
        ]
        rates = {"tcp": tried.rates.get((prefill.host, decode.host), 0.0)}
        if prefill.host == decode.host:
            rates["shm"] = tried.copies.get(decode.host, 0.0)
        reached = None if not answers else not answers[0].error
        taken = expected_path(decode, prefill, by_key)
        pairs.append(PairReport(prefill, decode, port, taken, reached, rates))
    return Diagnosis(t.name, tuple(views), lost, tuple(pairs), tried.reached, tuple(troubles))


def _reason(key: str, error: PdctlError) -> str:
    return str(error).removeprefix(f"{key}: ")

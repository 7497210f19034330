"""What is wrong with a host or a connection, and what to do about it. Pure.

`doctor` gathers the facts. A trouble that is not severe may be meant so, and fails nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl import preflight
from pdctl.doctor_network import HERE, Edge, Heard, Reached
from pdctl.preflight import FREE_IT, NOT_HERE, Obstacle
from pdctl.records import ServiceRecord
from pdctl.services import ServiceSpec
from pdctl.sizes import format_size, listed
from pdctl.topology import Host, Instance, Topology
from pdctl.topology_schema import is_loopback

SKEW_S = 0.5
NOFILE = 1024
DISK_BYTES = 1 << 30
INSIDE = ("docker", "br-", "virbr", "veth", "cni", "lxcbr", "podman")
"""Interfaces that lead only to containers of their own host."""


@dataclass(frozen=True, slots=True)
class Trouble:
    where: str
    """A host's key, or `a -> b`."""
    what: str
    do: str = ""
    severe: bool = True
    edge: Edge | None = None
    """The connection that does not work, where it is one."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Of a host against ours; both in seconds."""

    ahead: float
    error: float

    def __str__(self) -> str:
        return f"{self.ahead:+.2f}±{self.error:.2f}s"


@dataclass(frozen=True, slots=True)
class View:
    """All that is known of a host that answers."""

    key: str
    entry: Host
    probe: Mapping[str, Any]
    facts: Mapping[str, Any]
    clock: Clock
    services: tuple[ServiceSpec, ...]
    instances: tuple[Instance, ...]
    records: tuple[ServiceRecord, ...]
    """Of this deployment, there."""

    @property
    def running(self) -> frozenset[str]:
        return frozenset(r.name for r in self.records if r.alive)

    @property
    def versions(self) -> Mapping[str, Any]:
        """Of the interpreter of its services; {} without one."""
        return next(iter(self.probe["versions"].values()), {})

    @property
    def interfaces(self) -> dict[str, str]:
        """Address -> interface."""
        return {a: name for name, all_ in self.facts["addresses"].items() for a in all_}

    @property
    def rdma_ports(self) -> list[Mapping[str, Any]]:
        """Those that could carry something."""
        return [p for p in self.facts["rdma"] if p["state"] == "ACTIVE" and p["gids"]]


def lacks_model(view: View) -> bool:
    """Not asked of this machine: what is missing here is fetched, or is said by its path."""
    computes = any(s.role != "router" for s in view.services)
    return computes and not view.entry.local and not view.probe["model"]


def host_troubles(view: View, code: str, topology: Topology, sync: str) -> Iterator[Trouble]:
    """`code`: the fingerprint of our own runtime; `sync`: the command that brings it and the model.
    Addresses are judged elsewhere.
    """
    for obstacle in preflight.check_versions(view.key, view.probe, view.services, code, sync):
        yield _trouble(obstacle)
    starting = [s for s in view.services if s.name not in view.running]
    wanted = {port for s in starting for port in s.ports.values()}
    ports = [p for p in view.probe["ports"] if p["port"] in wanted and p["error"] != NOT_HERE]
    for obstacle in preflight.check_host(view.key, {**view.probe, "ports": ports}, starting, ()):
        yield _trouble(obstacle)
    if lacks_model(view):
        yield _trouble(preflight.no_model(view.key, topology.model, sync))
    yield from _limits(view, topology)
    yield from _memory(view)
    yield from _gpus(view)
    yield from _rdma(view, topology)
    if abs(view.clock.ahead) - view.clock.error > SKEW_S:
        what = f"its clock is {view.clock} from ours: times in logs will not compare"
        yield Trouble(view.key, what, "run an NTP client there (chrony)", severe=False)


def _trouble(obstacle: Obstacle) -> Trouble:
    do = obstacle.do or (FREE_IT if obstacle.taken else "")
    return Trouble(obstacle.host, obstacle.what, do)


def _limits(view: View, topology: Topology) -> Iterator[Trouble]:
    facts, buffers = view.facts, sum(s.cpu_buffer_bytes for s in view.services)
    memlock = facts["memlock"]
    if buffers and not facts["may_lock"] and 0 <= memlock < buffers:
        what = (
            f"at most {format_size(memlock) if memlock else '0'} may be locked in memory, "
            f"cpu_buffer takes {format_size(buffers)}: it may be swapped out, RDMA will not take it"
        )
        do = "set memlock in /etc/security/limits.conf (LimitMEMLOCK under systemd), log in again"
        yield Trouble(view.key, what, do, severe=_wants_rdma(view, topology))
    if 0 <= facts["nofile"] < NOFILE:
        what = f"at most {facts['nofile']} files may be open: each connection takes one"
        yield Trouble(view.key, what, "set nofile in /etc/security/limits.conf", severe=False)
    if facts["disk_free"] < DISK_BYTES:
        what = f"{format_size(facts['disk_free'] or 1)} of disk are left for logs and code"
        yield Trouble(view.key, what, "make room, or set PDCTL_HOME there", severe=False)


def _memory(view: View) -> Iterator[Trouble]:
    coming = [i for i in view.instances if i.name not in view.running and not i.group.devices]
    wanted, free = sum(i.group.kv_cache for i in coming), int(view.facts["memory_free"])
    if wanted > free:
        names = listed([i.name for i in coming])
        what = f"{names}: kv_cache takes {format_size(wanted)} of memory and the model more"
        yield Trouble(view.key, f"{what}, {format_size(free)} are free", "give them less")


def _gpus(view: View) -> Iterator[Trouble]:
    known = {g["index"]: g for g in view.facts["gpus"]}
    if view.facts["gpu_error"]:
        do = "the driver has to work there: try nvidia-smi"
        yield Trouble(view.key, view.facts["gpu_error"], do, severe=any(_devices(view)))
        return
    for instance, index in _devices(view):
        gpu = known.get(index)
        if gpu is None:
            there = ", ".join(map(str, known)) or "none"
            do = "give another number in `devices`, or `cpu`"
            yield Trouble(view.key, f"{instance.name} wants GPU {index}; there are: {there}", do)
        elif instance.name not in view.running and gpu["free"] < instance.group.kv_cache:
            what = (
                f"{instance.name}: kv_cache takes {format_size(instance.group.kv_cache)} and the "
                f"model more, GPU {index} has {format_size(gpu['free'] or 1)} free"
            )
            yield Trouble(view.key, what, "see nvidia-smi there for who has it")


def _devices(view: View) -> Iterator[tuple[Instance, int]]:
    for instance in view.instances:
        ranks = instance.group.tp_size
        first = instance.replica * ranks
        for index in instance.group.devices[first : first + ranks]:
            yield instance, index


def _rdma(view: View, topology: Topology) -> Iterator[Trouble]:
    if not _wants_rdma(view, topology) or view.rdma_ports:
        return
    found = ", ".join(f"{p['device']}/{p['port']} {p['state']}" for p in view.facts["rdma"])
    what = f"rdma was asked for, and no port is active with a GID (there: {found or 'none'})"
    yield Trouble(view.key, what, "bring the device up (`rdma link`), or use `transfer: tcp`")


def _wants_rdma(view: View, topology: Topology) -> bool:
    """What decode asks for takes prefill's hosts too."""
    asked = any(group.transfer == "rdma" for group in topology.decode)
    return asked and any(i.role in ("prefill", "decode") for i in view.instances)


# ---- addresses and connections -------------------------------------------------------------------


def address_trouble(view: View) -> Trouble | None:
    """An address that leads nobody to this host. Only asked when others have to find it."""
    address = view.entry.reachable_at
    if address is None:
        return None
    meant = view.facts["resolved"].get(address, [])
    own, right = view.interfaces, better_address(view)
    do = f"write `advertise: {right}`" if right else "write an address of it as `advertise:`"
    if not meant:
        return Trouble(view.key, f"its own name {address} means nothing to it", do)
    inside = next((a for a in meant if is_loopback(a)), None)
    if inside is not None:
        return Trouble(view.key, f"{address} is {inside} to itself: no other host gets there", do)
    names = [own[a] for a in meant if a in own]
    if names and all(name.startswith(INSIDE) for name in names):
        return Trouble(view.key, f"{address} is on {names[0]}, a network inside that host", do)
    if not names and view.entry.bind is None:
        do += ", or set `bind:` where the address is translated on the way"
        return Trouble(view.key, f"{address} is no address of it: it cannot listen there", do)
    return None


def better_address(view: View) -> str:
    """What its kernel uses towards the others; else any that leads out; else empty."""
    own = view.interfaces
    sources: list[str] = [a for a in view.facts["sources"].values() if a]
    for address in [*sources, *own]:
        if not is_loopback(address) and not own.get(address, "").startswith(INSIDE):
            return address
    return ""


def listen_troubles(view: View, heard: Heard) -> Iterator[Trouble]:
    """Ports that are free, and still cannot be had."""
    taken = {
        str(p["port"]) for p in view.probe["ports"] if not p["free"] and p["error"] != NOT_HERE
    }
    owners = {str(port): s for s in view.services for port in s.ports.values()}
    for port, why in heard.failed.items():
        if port in owners and port not in taken:
            service = owners[port]
            what = f"{service.name} cannot listen on {service.bind} port {port}: {why.lower()}"
            yield Trouble(view.key, what, "set `bind:` to an address of that host")


def edge_troubles(
    reached: Mapping[Edge, Reached], heard: Mapping[str, Heard], skip: Iterable[str]
) -> Iterator[Trouble]:
    """`skip`: hosts whose address or listener is a trouble already."""
    skipped = set(skip)
    for edge, answer in reached.items():
        unheard = edge.target in heard and str(edge.port) in heard[edge.target].failed
        if edge.target in skipped or (unheard and answer.error):
            continue
        where = f"{edge.source or 'this machine'} -> {edge.target}"
        what = f"{edge.service} at {edge.address}:{edge.port} ({edge.why}): "
        severe = edge.source != HERE or edge.service == "router"
        if answer.error:
            do = f"open port {edge.port} on {edge.target} for it, or correct `advertise:`"
            yield Trouble(where, what + answer.error, do, severe, edge)
        elif answer.name and answer.name != edge.target:
            do = f"correct `advertise:` of {edge.target}"
            yield Trouble(where, f"{what}{answer.name} answers there", do, severe, edge)


def alike_troubles(views: Sequence[View], sync: str) -> Iterator[Trouble]:
    for note in preflight.differing_versions({v.key: v.versions for v in views}):
        yield Trouble("all hosts", note, f"run `{sync}`", severe=False)

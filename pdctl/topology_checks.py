"""What only several values of a topology together can tell: hosts, roles, ports, addresses. Pure.

Runs on a topology whose broken values were replaced, so that one pass reports everything;
`Broken` says which, and what would only follow from them is not reported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from pdctl.sizes import counted, exact_size
from pdctl.topology_schema import (
    ROLES,
    DecodeGroup,
    Group,
    PrefillGroup,
    Router,
    Topology,
    is_loopback,
    is_wildcard,
)
from pdctl.weights import Shape
from pdctl.yaml_marks import Path

DOCKER_BRIDGE = "172.17.0.1"
"""What every host with Docker has on docker0, so it leads to nobody else."""


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    what: str
    right: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Paths of values that were replaced, and of sections in which a key was not understood."""

    values: frozenset[Path] = frozenset()
    sections: frozenset[Path] = frozenset()

    def touches(self, path: Path) -> bool:
        """The value, or something it is part of, or a part of it, is not the user's."""
        return any(path[: len(v)] == v or v[: len(path)] == path for v in self.values)


def findings(topology: Topology, broken: Broken = Broken()) -> list[Finding]:
    checks = (_hosts, _roles, _groups, _kv_alike, _ports, _same_machine, _addresses, _transfer)
    return [finding for check in checks for finding in check(topology, broken)]


def warnings(topology: Topology) -> list[Finding]:
    """What works but is probably not meant."""
    router = topology.router
    bind = listen_address(topology, topology.host_of(router), router.bind)
    if is_loopback(bind) or router.api_keys is not None:
        return []
    path: Path = ("router", "bind") if router.bind is not None else ("router",)
    what = f"listens on {bind}, so anyone who reaches this address may use the model"
    return [Finding(path, what, "set router.api_keys to the name of a variable holding keys")]


def listen_address(topology: Topology, host: str, explicit: str | None = None) -> str:
    """What a service binds. One local host: loopback only, nothing is bound wider than needed."""
    if explicit is not None:
        return explicit
    entry = topology.hosts[host]
    if entry.bind is not None:
        return entry.bind
    spread = not entry.local or len(topology.used_hosts()) > 1
    return (entry.reachable_at if spread else None) or "127.0.0.1"


def contact_address(topology: Topology, host: str, bind: str | None = None) -> str:
    """Where others find a service that listens on `bind` (None: what the host's services bind)."""
    bound = listen_address(topology, host, bind)
    if bind is None or is_wildcard(bound):
        reachable = topology.hosts[host].reachable_at
        if reachable is not None and not is_loopback(bound):
            return reachable
    if not is_wildcard(bound):
        return bound
    return "::1" if ":" in bound else "127.0.0.1"


def model_findings(topology: Topology, shape: Shape) -> Iterator[Finding]:
    """What its runtime would refuse. The rules are the runtime's; a test holds these to them."""
    for path, group in _listed(topology):
        if group.tp_size not in (allowed := tp_sizes(shape)):
            what = (
                f"{group.tp_size} does not split this model of {shape.heads} attention heads, "
                f"{shape.kv_heads} KV heads and {shape.intermediate} MLP columns evenly"
            )
            yield Finding((*path, "tp_size"), what, f"use one of {', '.join(map(str, allowed))}")
        elif group.kv_cache < 2 * (block := _block_bytes(topology, group, shape)):
            count = counted(group.kv_cache // block, "block")
            what = f"{exact_size(group.kv_cache)} holds {count} of {block:,} bytes"
            right = f"at least 2 are needed: {exact_size(2 * block)} or more"
            yield Finding((*path, "kv_cache"), what, right)


def tp_sizes(shape: Shape) -> list[int]:
    """Every tp_size that splits the model evenly."""
    return [
        size
        for size in range(1, shape.heads + 1)
        if shape.heads % size == 0
        and shape.intermediate % size == 0
        and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
    ]


def _block_bytes(topology: Topology, group: Group, shape: Shape) -> int:
    """One block of all ranks together; beyond as many ranks as KV heads, each has a whole one."""
    auto = "bfloat16" if group.devices else "float32"
    number = {"float32": 4, "bfloat16": 2}[auto if topology.dtype == "auto" else topology.dtype]
    heads = max(shape.kv_heads, group.tp_size)
    return shape.layers * 2 * heads * group.block_size * shape.head_dim * number


def _listed(topology: Topology) -> Iterator[tuple[Path, Group]]:
    for role, groups in topology.groups().items():
        for index, group in enumerate(groups):
            yield (role, index), group


def _hosts(topology: Topology, broken: Broken) -> Iterator[Finding]:
    if ("hosts",) in broken.values:
        return
    known = ", ".join(topology.hosts)
    sections: list[tuple[Path, Router | Group]] = [(("router",), topology.router)]
    sections += _listed(topology)
    for path, section in sections:
        if broken.touches((*path, "host")):
            continue
        if section.host is None:
            if len(topology.hosts) > 1 and path not in broken.sections:
                yield Finding(path, "host is missing", f"say which of {known} runs it")
        elif section.host not in topology.hosts:
            close = difflib.get_close_matches(section.host, topology.hosts, n=1)
            right = f"did you mean {close[0]!r}?" if close else f"known hosts: {known}"
            yield Finding((*path, "host"), f"there is no host {section.host!r}", right)


def _roles(topology: Topology, broken: Broken) -> Iterator[Finding]:
    if () in broken.sections or any(broken.touches((role,)) for role in ROLES):
        return
    if not (topology.prefill or topology.decode or topology.mixed):
        yield Finding((), "has no instances", "add prefill and decode, or mixed")
    elif topology.prefill and not topology.decode:
        yield Finding(("prefill",), "has no decode to hand over to", "add decode, or use mixed")
    elif topology.decode and not topology.prefill:
        yield Finding(("decode",), "has no prefill to receive from", "add prefill, or use mixed")


def _groups(topology: Topology, broken: Broken) -> Iterator[Finding]:
    for path, group in _listed(topology):
        touched = any(broken.touches((*path, key)) for key in ("replicas", "tp_size", "devices"))
        if group.devices and not touched:
            yield from _gpus(path, group)
        if (
            isinstance(group, PrefillGroup | DecodeGroup)
            and len(group.rdma.device) > 1
            and len(group.rdma.device) != group.replicas
        ):
            what = f"names {len(group.rdma.device)} RDMA devices for {group.replicas} replicas"
            right = "give one device, or one for each replica"
            yield Finding((*path, "rdma", "device"), what, right)
        for name in sorted(set(group.secrets) & set(group.env)):
            what = f"{name} is in secrets too"
            yield Finding((*path, "env", name), what, "keep the one in secrets")


def _gpus(path: Path, group: Group) -> Iterator[Finding]:
    if group.tp_size > 1 and path[0] != "mixed":
        what = f"{group.tp_size} GPUs for one instance work for mixed ones only"
        yield Finding((*path, "tp_size"), what, "use 1, and more replicas for more throughput")
    elif len(group.devices) != group.replicas * group.tp_size:
        ranks = f" of tp_size {group.tp_size}" if group.tp_size > 1 else ""
        each = f"{group.tp_size} GPU numbers" if group.tp_size > 1 else "one GPU number"
        what = f"names {len(group.devices)} GPUs for {group.replicas} replicas{ranks}"
        yield Finding((*path, "devices"), what, f"give {each} for each replica")


def _kv_alike(topology: Topology, broken: Broken) -> Iterator[Finding]:
    """What prefill and decode compare when they meet, as far as the file tells it."""
    paired = [(p, g) for p, g in _listed(topology) if p[0] != "mixed"]
    for path, group in paired[1:]:
        first_path, first = paired[0]
        where = f"{first_path[0]}[{first_path[1]}]"
        if group.block_size != first.block_size and not (
            broken.touches((*path, "block_size")) or broken.touches((*first_path, "block_size"))
        ):
            what = f"{group.block_size} differs from {first.block_size} in {where}"
            yield Finding((*path, "block_size"), what, "prefill and decode need the same one")
        if bool(group.devices) != bool(first.devices) and not (
            topology.dtype != "auto"
            or broken.touches(("dtype",))
            or broken.touches((*path, "devices"))
            or broken.touches((*first_path, "devices"))
        ):
            what = f"a GPU would use bfloat16 and a CPU float32, and {where} has the other kind"
            yield Finding((*path, "devices"), what, "set dtype to float32 or bfloat16 for all")
            return


def _ports(topology: Topology, broken: Broken) -> Iterator[Finding]:
    router = topology.router
    taken = {(topology.host_of(router), router.port): "router"}
    if broken.touches(("router", "port")) or broken.touches(("router", "host")):
        taken = {}
    for instance in topology.instances():
        path: Path = (instance.role, instance.group_index)
        if any(broken.touches((*path, key)) for key in ("host", "replicas")):
            continue
        for purpose, port in instance.wanted_ports().items():
            key = "port" if purpose == "http" else "peer_port"
            if port is None or broken.touches((*path, key)):
                continue
            if port > 65535:
                yield Finding((*path, key), f"reaches {port} for {instance.name}", "start lower")
                break
            use = instance.name if purpose == "http" else f"{instance.name}'s peers"
            owner = taken.setdefault((instance.host, port), use)
            if owner != use:
                what = f"port {port} is wanted for {use} and for {owner} on host {instance.host}"
                yield Finding((*path, key), what, "choose another, or leave it out")
                break


def _same_machine(topology: Topology, broken: Broken) -> Iterator[Finding]:
    """Two keys for one machine would hide port clashes."""
    if broken.touches(("hosts",)):
        return
    first: dict[str, str] = {}
    for key, host in topology.hosts.items():
        address = "this machine" if host.local else str(host.address)
        other = first.setdefault(address, key)
        if other != key:
            what = f"is {address}, and so is {other}"
            yield Finding(("hosts", key), what, "keep one of them, or give the other its address")


def _addresses(topology: Topology, broken: Broken) -> Iterator[Finding]:
    used = topology.used_hosts()
    if len(used) < 2 or broken.touches(("hosts",)):
        return
    for key in used:
        host = topology.hosts[key]
        address = host.reachable_at
        path: Path = ("hosts", key)
        if address is None:
            right = "add `advertise:` with an address of this machine in their network"
            yield Finding(path, "has no address that the other hosts could reach", right)
        elif not _may_lead_here(address):
            field = "advertise" if host.advertise is not None else "address"
            what = f"{address} does not lead here from the other hosts"
            right = "give an address in their network"
            if field == "advertise" and _may_lead_here(host.address):
                right = f"leave it out: {host.address} is used then"
            yield Finding((*path, field), what, right)
    bind = topology.router.bind
    if bind is not None and is_loopback(bind):
        what = f"{bind} cannot be reached by instances on other hosts"
        yield Finding(("router", "bind"), what, "leave it out, or give an address of that host")


def _may_lead_here(address: str | None) -> bool:
    """From other hosts, as far as the address itself tells."""
    if address in (None, "local", DOCKER_BRIDGE):
        return False
    return not (is_loopback(str(address)) or is_wildcard(str(address)))


def _transfer(topology: Topology, broken: Broken) -> Iterator[Finding]:
    homes = {topology.host_of(group) for group in topology.prefill}
    for index, group in enumerate(topology.decode):
        path: Path = ("decode", index)
        one_host = group.transfer in ("cuda_ipc", "shm")
        if not one_host or broken.touches(("prefill",)) or broken.touches(path):
            continue
        if group.transfer == "cuda_ipc" and not all(g.devices for g in (group, *topology.prefill)):
            what = "cuda_ipc is between GPUs, and not all of prefill and this group have devices"
            yield Finding((*path, "transfer"), what, "use auto or shm")
        others = sorted(homes - {topology.host_of(group)})
        if others:
            there = f"but there is some on {', '.join(others)}"
            what = f"{group.transfer} needs prefill on the same host, {there}"
            yield Finding((*path, "transfer"), what, "use auto or tcp")

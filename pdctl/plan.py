"""Compare what a topology wants with what its hosts report: ordered steps and ports. Pure.

`command` gives the wanted services, `ops` observes and carries the steps out.
Knows no files, no SSH, no clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pdctl.errors import PdctlError
from pdctl.services import ServiceSpec
from pdctl.topology import Topology

StepKind = Literal["start", "keep", "replace", "remove", "restart"]

_FIRST_PORT = {"http": 8100, "peer": 9100}


@dataclass(frozen=True, slots=True)
class ObservedService:
    """A service directory as found on a host. `spec` is None when its record cannot be read."""

    name: str
    host: str
    spec: ServiceSpec | None
    spec_hash: str
    alive: bool
    """Its supervisor or its process runs, proven by identity."""
    rotated: tuple[str, ...] = ()
    """Variables of secrets of which it has another value than we have now."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do about one service. `remove` stops an orphan; `keep` does nothing; `restart` starts
    it again as it was, with the files and secrets it has on its host.

    The service of a `remove` has only deployment, name and host when its record was unreadable.
    """

    kind: StepKind
    service: ServiceSpec
    reason: str
    now: ServiceSpec | None = None
    """As it runs, or ran; None: not there, or its record was unreadable."""
    running: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Removals, then the topology's services in its order. `batches` says what comes when."""

    deployment: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    """What one should know before it is carried out."""

    def of(self, *kinds: StepKind) -> tuple[Step, ...]:
        return tuple(s for s in self.steps if s.kind in kinds)

    @property
    def changes(self) -> bool:
        return any(s.kind != "keep" for s in self.steps)

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of what runs and would be stopped, if only to start again."""
        return tuple(s.service.name for s in self.steps if s.running and s.kind != "keep")


def make_plan(
    deployment: str,
    wanted: Sequence[ServiceSpec],
    observed: Iterable[ObservedService],
    scaled: Collection[str] = (),
) -> Plan:
    """Steps from what is to what should be. Two equal calls give equal plans.

    A service that moved to another host is removed there and started here. `scaled`: roles of which
    a number was asked for; an instance of one that is not wanted any more is no orphan.
    """
    found = {(o.host, o.name): o for o in observed}
    steps = [_step(service, found.pop((service.host, service.name), None)) for service in wanted]
    names = {service.name for service in wanted}
    removals = [
        _removal(deployment, found[key], scaled=key[1] not in names and _role(found[key]) in scaled)
        for key in sorted(found)
    ]
    return Plan(deployment, (*removals, *steps))


def stop_order(services: Iterable[ServiceSpec]) -> tuple[tuple[ServiceSpec, ...], ...]:
    """Waves in which services go down: the router first, so that nothing new comes in."""
    everything = tuple(services)
    routers = tuple(s for s in everything if s.role == "router")
    others = tuple(s for s in everything if s.role != "router")
    return tuple(wave for wave in (routers, others) if wave)


def allocate_ports(
    topology: Topology,
    observed: Iterable[ObservedService],
    busy: Mapping[str, Collection[int]],
) -> dict[str, dict[str, int]]:
    """Service -> purpose -> port: as the file says, else as the service has it, else a free one.

    `busy` are the ports of each host that somebody listens on or has claimed, ours included.
    """
    wanted = _wanted_ports(topology)
    hosts = {name: host for name, host, _ in wanted}
    taken: dict[str, set[int]] = {host: set() for host in hosts.values()}
    result: dict[str, dict[str, int]] = {name: {} for name in hosts}

    def assign(name: str, purpose: str, port: int) -> None:
        result[name][purpose] = port
        taken[hosts[name]].add(port)

    for name, _, ports in wanted:
        for purpose, port in ports.items():
            if port is not None:
                assign(name, purpose, port)
    current = {(o.host, o.name): o for o in observed}
    for name, host, ports in wanted:
        now = current.get((host, name))
        for purpose in ports:
            kept = _kept(now, purpose, busy.get(host, ()))
            if purpose not in result[name] and kept is not None and kept not in taken[host]:
                assign(name, purpose, kept)
    for name, host, ports in wanted:
        for purpose in ports:
            if purpose not in result[name]:
                avoid = taken[host] | set(busy.get(host, ()))
                assign(name, purpose, _first_free(purpose, avoid, host))
    return result


def _step(service: ServiceSpec, now: ObservedService | None) -> Step:
    if now is None:
        return Step("start", service, "not there yet")
    if not now.alive:
        return Step("start", service, "not running")
    changed = [] if now.spec_hash == service.hash else _differences(now.spec, service)
    changed += [f"the secret {name}" for name in now.rotated]
    if not changed:
        return Step("keep", service, "unchanged", now.spec, running=True)
    return Step("replace", service, f"changed: {', '.join(changed)}", now.spec, running=True)


def _role(service: ObservedService) -> str:
    """By its name, which is there when the record cannot be read."""
    return service.name.partition("-")[0]


def _removal(deployment: str, now: ObservedService, *, scaled: bool) -> Step:
    # The role of an unreadable record is not known, and does not matter for stopping it.
    service = now.spec or ServiceSpec(deployment, now.name, "mixed", now.host, argv=())
    reason = "orphan: not in the topology" if now.alive else "orphan: left over, not running"
    return Step("remove", service, "scaled down" if scaled else reason, now.spec, running=now.alive)


def _differences(old: ServiceSpec | None, new: ServiceSpec) -> list[str]:
    """Names of what differs; of a JSON file, its keys. Never values: those may be private."""
    if old is None:
        return ["its record cannot be read"]
    before, after = asdict(old), asdict(new)
    names = [key for key in after if key != "files" and before[key] != after[key]]
    for file in sorted(old.files.keys() | new.files.keys()):
        names += _file_differences(file, old.files.get(file, ""), new.files.get(file, ""))
    # By the topology's keys. Most config values show up as fields of the spec too; once is enough.
    return list(dict.fromkeys(re.sub("_(bytes|s)$", "", name) for name in names))


def _file_differences(name: str, old: str, new: str) -> list[str]:
    if old == new:
        return []
    before, after = _json_object(old), _json_object(new)
    if before is None or after is None:
        return [name]
    keys = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    return keys or [name]


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _wanted_ports(topology: Topology) -> list[tuple[str, str, dict[str, int | None]]]:
    """Name, host, and purpose -> port or None, of every service."""
    router = topology.router
    return [
        ("router", topology.host_of(router), {"http": router.port}),
        *((i.name, i.host, i.wanted_ports()) for i in topology.instances()),
    ]


def _kept(now: ObservedService | None, purpose: str, busy: Collection[int]) -> int | None:
    """The port a service has already. A dead one's port may have gone to a stranger since."""
    if now is None or now.spec is None:
        return None
    port = now.spec.ports.get(purpose)
    return None if port is None or (not now.alive and port in busy) else port


def _first_free(purpose: str, avoid: Collection[int], host: str) -> int:
    for port in range(_FIRST_PORT[purpose], 65536):
        if port not in avoid:
            return port
    raise PdctlError(f"host {host} has no free port above {_FIRST_PORT[purpose]}")

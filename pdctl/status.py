"""What a deployment is doing now: processes from each host, health and ledgers over HTTP.

Always live; reads only. The token is asked of the host and used, never shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pdctl.agent import shim_call
from pdctl.errors import UsageError
from pdctl.find import ANYWHERE, Found, Where, deployments, located
from pdctl.fleet import on_all
from pdctl.health import get_json, probe_ready
from pdctl.hosts import Host
from pdctl.locks import LockHolder, holders
from pdctl.records import ServiceRecord

Health = Literal["healthy", "starting", "unready", "draining", "down"]
"""
starting  its process is there, but does not answer yet
unready   it answers, and says that it cannot serve
draining  it could serve, but the router was told to give it nothing new
down      its process is gone
"""
_KV_COUNTER = "kv_bytes_"


@dataclass(frozen=True, slots=True)
class BufferStatus:
    """A decode instance's CPU buffer, in blocks, and what was waited and copied since the start."""

    total: int
    used: int
    quarantined: int
    waiting: int
    """Requests that wait for blocks of the buffer or of the device."""
    reserve_seconds: float
    swap_in_seconds: float
    swap_outs: int
    swap_out_seconds: float
    swapped_seconds: float
    """How long requests were out of the device pool, all together."""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    name: str
    role: str
    host: str
    state: str
    health: Health
    reason: str
    """Why it is not healthy, or what is odd about it; else empty."""
    pid: int | None
    uptime_s: float | None
    url: str
    ports: dict[str, int]
    supervised: bool
    exit: dict[str, Any] | None
    strays: tuple[int, ...]
    tp_size: int | None = None
    """Processes, or GPUs, that compute it together. None: not known, or it computes nothing."""
    peers: dict[str, str | None] = field(default_factory=dict)
    """Path to each peer, None where down."""
    kv_bytes: dict[str, int] = field(default_factory=dict)
    """KV moved since the start, by path."""
    idle: bool | None = None
    """Nothing is held for any request. None: not known."""
    held: dict[str, int] = field(default_factory=dict)
    """What the ledger holds now."""
    buffer: BufferStatus | None = None
    """Decode only."""
    requests: int | None = None
    """Finished since the start."""
    orphan: bool = False
    """The topology has no such service any more."""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    name: str
    endpoint: str
    """Base URL for clients: the router's."""
    services: tuple[ServiceStatus, ...]
    unreachable: dict[str, str] = field(default_factory=dict)
    """Host -> why nothing is known of what runs there."""
    hosts_ok: int = 0
    locks: tuple[LockHolder, ...] = ()
    """Who is changing it now."""

    @property
    def healthy(self) -> bool:
        well = all(s.health == "healthy" for s in self.services)
        return bool(self.services) and well and not self.unreachable

    @property
    def kv_bytes(self) -> int:
        """KV that arrived at decode instances since they started."""
        return sum(sum(s.kv_bytes.values()) for s in self.services if s.role == "decode")

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.status/1",
            "name": self.name,
            "endpoint": self.endpoint,
            "healthy": self.healthy,
            "kv_bytes": self.kv_bytes,
            "services": [{**asdict(s), "strays": list(s.strays)} for s in self.services],
            "unreachable": self.unreachable,
            "hosts_ok": self.hosts_ok,
            "locks": [asdict(holder) for holder in self.locks],
        }


def status(name: str | None, where: Where = ANYWHERE) -> DeploymentStatus:
    """Ask the hosts and every service, all at once. Raises UsageError when there is nothing."""
    with located(name, where) as found:
        return assess(found)


def assess(found: Found) -> DeploymentStatus:
    """The same for a deployment that was found already."""
    records = found.records
    if not records and not found.unreachable:
        others = deployments()
        hint = f"there are: {', '.join(others)}" if others else "start one: `pdctl up TOPOLOGY`"
        raise UsageError(f"there is no deployment {found.name}", hint=hint)
    in_router = _router_view(records, found.hosts)
    peers = [r.name for r in records if r.spec and r.spec.role == "prefill"]
    services = on_all(
        records, lambda r: _service(r, in_router, peers, found.is_orphan(r)), undone=False
    )
    return DeploymentStatus(
        found.name,
        _endpoint(services),
        tuple(sorted(services, key=_order)),
        unreachable=found.lost(),
        hosts_ok=len(found.reachable()),
        locks=holders(found),
    )


def _order(service: ServiceStatus) -> tuple[int, str, int]:
    kind, _, number = service.name.rpartition("-")
    order = ("router", "prefill", "decode", "mixed")
    rank = order.index(service.role) if service.role in order else len(order)
    return rank, kind, int(number) if number.isdigit() else 0


def _endpoint(services: Iterable[ServiceStatus]) -> str:
    urls = {s.role: s.url for s in services}
    return urls.get("router", "")


def _router_view(
    records: Iterable[ServiceRecord], hosts: Mapping[str, Host]
) -> Mapping[str, Mapping[str, Any]]:
    """What the router knows of each instance, by name. {} without a router that answers."""
    router = next((r for r in records if r.spec and r.spec.role == "router" and r.alive), None)
    if router is None or router.spec is None or router.host not in hosts:
        return {}
    ask = {"deployment": router.deployment}
    token = shim_call(hosts[router.host], "token", ask)["token"] or ""
    _, body = get_json(f"{router.spec.url}/internal/instances", token=token)
    found = body.get("instances")
    return {i["name"]: i for i in found if "name" in i} if isinstance(found, list) else {}


def _service(
    record: ServiceRecord,
    in_router: Mapping[str, Mapping[str, Any]],
    prefills: Sequence[str],
    orphan: bool,
) -> ServiceStatus:
    health, reason = _health(record, in_router.get(record.name, {}), prefills)
    if orphan:
        reason = "; ".join(filter(None, ["orphan: not in the topology any more", reason]))
    spec, last = record.spec, record.exit
    ledger: dict[str, Any] = {}
    if spec and spec.role != "router" and health in ("healthy", "unready", "draining"):
        _, ledger = get_json(f"{spec.url}/ledger")
    counters: dict[str, float] = ledger.get("counters") or {}
    held: dict[str, int] = ledger.get("ledger") or {}
    finished = counters.get("requests_finished")
    return ServiceStatus(
        name=record.name,
        role=spec.role if spec else "unknown",
        host=record.host,
        state=record.state,
        health=health,
        reason=reason,
        pid=record.service.pid if record.service and record.state == "running" else None,
        uptime_s=record.uptime_s,
        url=spec.url if spec else "",
        ports=spec.ports if spec else {},
        supervised=record.supervised,
        exit={**asdict(last), "text": str(last)} if last else None,
        strays=record.strays,
        tp_size=ledger.get("tp_size"),
        peers={name: peer.get("path") for name, peer in (ledger.get("peers") or {}).items()},
        kv_bytes={
            key.removeprefix(_KV_COUNTER): int(value)
            for key, value in counters.items()
            if key.startswith(_KV_COUNTER)
        },
        idle=ledger.get("idle"),
        held={key: value for key, value in held.items() if value},
        buffer=_buffer(ledger),
        requests=int(finished) if finished is not None else None,
        orphan=orphan,
    )


def _buffer(ledger: Mapping[str, Any]) -> BufferStatus | None:
    """From the answer of `/ledger`; None where there is no buffer."""
    total = (ledger.get("totals") or {}).get("buffer_blocks_total", 0)
    held, counters = ledger.get("ledger") or {}, ledger.get("counters") or {}
    if not total:
        return None
    return BufferStatus(
        total=total,
        used=held.get("buffer_blocks", 0),
        quarantined=held.get("quarantined_blocks", 0),
        waiting=held.get("waiting", 0),
        reserve_seconds=counters.get("reserve_seconds", 0.0),
        swap_in_seconds=counters.get("swap_in_seconds", 0.0),
        swap_outs=int(counters.get("swap_outs", 0)),
        swap_out_seconds=counters.get("swap_out_seconds", 0.0),
        swapped_seconds=counters.get("swapped_seconds", 0.0),
    )


def _health(
    record: ServiceRecord, registered: Mapping[str, Any], prefills: Sequence[str]
) -> tuple[Health, str]:
    if record.ended:
        strays = f"; processes {list(record.strays)} outlived it" if record.strays else ""
        return "down", record.how_it_ended() + strays
    if record.spec is None:
        return "unready", "its record was written by another version of pdctl"
    readiness = probe_ready(record.spec, record.service, prefills)
    if not readiness.reachable:
        return "starting", readiness.reason
    if not readiness.ready:
        return "unready", readiness.reason
    if registered.get("state") == "draining":
        count = int(registered.get("in_flight", 0))
        return "draining", f"it gets no new requests; {count or 'none'} under way"
    if registered.get("state", "ready") != "ready":
        return "unready", f"the router says: {registered.get('reason') or registered['state']}"
    odd = "" if record.supervised else "its supervisor was killed: its exit will not be recorded"
    return "healthy", odd

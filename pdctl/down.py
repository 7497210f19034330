"""Stop a deployment and prove that nothing of it is left: processes, ports, shared memory.

Works from the records on the hosts alone: without the topology file, after it was edited, and
after anything was killed. Idempotent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl import state
from pdctl.agent import shim_call
from pdctl.errors import PdctlError
from pdctl.events import Event, Report
from pdctl.find import ANYWHERE, Found, Where, located, told, unheard, whereabouts
from pdctl.fleet import Fleet, Names, on_all
from pdctl.hold import changed_meanwhile, locked
from pdctl.hosts import Host
from pdctl.preflight import describe_port
from pdctl.records import ServiceRecord, parse_services

LOCK_WAIT_S = 3.0
END_S = 5.0
LAST_LOOK_S = 5.0
"""An interrupted `down` waits so long for a host's word on what still runs there."""


@dataclass(frozen=True, slots=True)
class StoppedService:
    name: str
    host: str
    was: str
    pids: tuple[int, ...]
    """What lived of it."""
    killed: tuple[int, ...]
    """What did not end when asked to."""
    segments: tuple[str, ...]
    """Shared memory it had left behind."""
    problems: tuple[str, ...]
    """What is still there. Empty: proven gone."""


@dataclass(frozen=True, slots=True)
class DownResult:
    name: str
    services: tuple[StoppedService, ...]
    notes: tuple[str, ...]
    unreachable: dict[str, str]
    """Host -> why nothing is known of what runs there."""
    hosts_ok: int
    """Those on which everything was done."""
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.unreachable and not any(s.problems for s in self.services)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.down/1",
            "name": self.name,
            "ok": self.ok,
            "services": [
                {
                    "name": s.name,
                    "host": s.host,
                    "was": s.was,
                    "pids": list(s.pids),
                    "killed": list(s.killed),
                    "segments": list(s.segments),
                    "problems": list(s.problems),
                }
                for s in self.services
            ],
            "notes": list(self.notes),
            "unreachable": self.unreachable,
            "hosts_ok": self.hosts_ok,
            "seconds": round(self.seconds, 3),
        }


def down(
    name: str | None, timeout_s: float | None, report: Report, where: Where = ANYWHERE
) -> DownResult:
    """Stop everything of the deployment; the router first, so that nothing new comes in.

    Services have `timeout_s` to finish their requests; None: the topology's drain_timeout.
    """
    report(Event("phase", "asking the hosts"))
    known = whereabouts(name, where)
    return _down(known, "down", _grace_s(known, timeout_s), report, _waves)


def down_orphans(
    name: str | None, timeout_s: float | None, report: Report, where: Where = ANYWHERE
) -> DownResult:
    """Stop the services that the topology does not name any more; leave all others.

    Raises PdctlError when another has changed what is wanted before the hosts were locked.
    """
    report(Event("phase", "asking the hosts"))
    with located(name, where) as found:

        def orphans(records: Sequence[ServiceRecord]) -> list[Names]:
            names: dict[str, list[str]] = {}
            for record in filter(found.is_orphan, records):
                names.setdefault(record.host, []).append(record.name)
            return [names]

        grace_s = _grace_s(found.known, timeout_s)
        return _down(found.known, "down --orphans", grace_s, report, orphans, found)


def _down(
    known: state.KnownDeployment,
    purpose: str,
    grace_s: float,
    report: Report,
    waves: Callable[[Sequence[ServiceRecord]], list[Names]],
    found: Found | None = None,
) -> DownResult:
    """`waves`: what to stop, one after the other; the last one holds all that goes. `found`: what
    they were made from, if that matters.
    """
    begun = time.monotonic()
    services: list[StoppedService] = []
    notes: list[str] = []
    hosts_ok = 0
    heard = bool(known.at) or state.recall_gone(known.name) is not None
    with (
        locked(known, purpose=purpose, wait_s=LOCK_WAIT_S, needed=(), found=found) as fleet,
        _saying_how_far(fleet, purpose, report) as ran,
    ):
        more = True
        while more:
            if found is not None:
                _check_unchanged(found, fleet)
            records = fleet.records
            ran |= {r.name for r in records if r.alive}
            names = waves(records)
            stopped, others = _stop(fleet, records, names, grace_s, report)
            services += stopped
            notes += others
            if not any(s.problems for s in stopped):
                fleet.purge(names[-1])
            hosts_ok += len(fleet.sessions)
            heard = heard or bool(stopped) or _heard_of(fleet)
            for host in fleet.late:
                report(Event("note", f"{host} does not answer yet; waiting for it"))
            report(Event("phase", "waiting for the other hosts"))
            if more := fleet.go_on():
                fleet.observe()
        lost = {host: str(e) for host, e in fleet.lost.items()}
        if not heard and not lost:
            notes.append(unheard(known.name))
        seconds = time.monotonic() - begun
        result = DownResult(known.name, tuple(services), tuple(notes), lost, hosts_ok, seconds)
        if result.ok and names[-1] is None:
            state.forget(known.name)
    return result


def _check_unchanged(found: Found, fleet: Fleet) -> None:
    """A locked host that says what none had said before may run what was wanted since."""
    before = [known for known, _ in told(found.answers.values(), found.name)]
    for said, _ in told(fleet.answers.values(), found.name):
        if said not in before:
            raise changed_meanwhile(said)


def _heard_of(fleet: Fleet) -> bool:
    """Whether something of this name ever ran there: its audit outlives it."""
    ask = {"lines": 1}
    return any(answer["audit"] for _, answer in fleet.on_sessions(lambda s: s.call("audit", ask)))


@contextlib.contextmanager
def _saying_how_far(fleet: Fleet, purpose: str, report: Report) -> Iterator[set[str]]:
    """An interrupt asks once more what still runs. Yields names, to be filled: what ran."""
    ran: set[str] = set()

    def left(host: Host) -> list[str]:
        ask = {"deployment": fleet.deployment, "scan": False}
        answer = shim_call(host, "status", ask, timeout=LAST_LOOK_S)
        return [r.name for r in parse_services(host.name, answer["services"]) if r.alive]

    try:
        yield ran
    except KeyboardInterrupt:
        still = set(ran)
        with contextlib.suppress(PdctlError, KeyboardInterrupt):  # then nothing better is known
            hosts = [session.host for session in fleet.sessions]
            still = {name for names in on_all(hosts, left, undone=False) for name in names}
        stopped = ", ".join(sorted(ran - still)) or "nothing"
        running = ", ".join(sorted(ran & still)) or "nothing"
        report(Event("note", f"stopped: {stopped}; still running, or about to end: {running}"))
        report(Event("note", f"`pdctl {purpose} {fleet.deployment}` again does the rest"))
        raise


def _grace_s(known: state.KnownDeployment, timeout_s: float | None) -> float:
    """Beyond the drain a service needs a moment to end by itself."""
    return timeout_s if timeout_s is not None else known.drain_timeout_s + END_S


def _stop(
    fleet: Fleet,
    records: Sequence[ServiceRecord],
    waves: Sequence[Names],
    grace_s: float,
    report: Report,
) -> tuple[tuple[StoppedService, ...], tuple[str, ...]]:
    """What became of each service, and notes on what others hold."""
    services: list[StoppedService] = []
    notes: list[str] = []
    report(Event("phase", "waiting for services to end"))
    for wave in waves:
        seen = {(s.host, s.name) for s in services}
        for record in records:
            if (record.host, record.name) not in seen and _is_in(record, wave):
                report(Event("stop", record.state, record.name, record.host))
        for found in fleet.stop(wave, grace_s, undone=False):
            stopped, others = _judge(fleet, found, records)
            services.append(stopped)
            notes += others
            if stopped.problems or (stopped.host, stopped.name) not in seen:
                report(_told(stopped))
    return _last_each(services), tuple(notes)


def _is_in(record: ServiceRecord, wave: Names) -> bool:
    if isinstance(wave, Mapping):
        return record.name in wave.get(record.host, ())
    return wave is None or record.name in wave


def _waves(records: Sequence[ServiceRecord]) -> list[Names]:
    """Names to stop together. The last wave is everything: also what has marks but no record."""
    routers = [r for r in records if r.spec and r.spec.role == "router" and r.alive]
    return [{r.host: [r.name] for r in routers}, None] if routers else [None]


def _last_each(services: Sequence[StoppedService]) -> tuple[StoppedService, ...]:
    """One entry per service. The wave of everything looks again at what an earlier one stopped."""
    found: dict[tuple[str, str], StoppedService] = {}
    for service in services:
        earlier = found.get((service.host, service.name))
        if earlier is None or service.problems:
            found[service.host, service.name] = service
    return tuple(found.values())


def _judge(
    fleet: Fleet, found: Mapping[str, Any], records: Sequence[ServiceRecord]
) -> tuple[StoppedService, list[str]]:
    """What the host found of a service after the stop: what is left of it, and what is others'."""
    machine = found["host"]
    keys = (r.host for r in records if r.name == found["service"])
    host = next((key for key in keys if fleet.hosts[key].name == machine), machine)
    problems = [f"processes {found['left']} do not end"] if found["left"] else []
    notes: list[str] = []
    for port in found["ports"]:
        ours = str(port.get("service") or "").startswith(f"{fleet.deployment}/")
        (problems if ours else notes).append(describe_port(port))
    service = StoppedService(
        name=found["service"],
        host=host,
        was=found["was"],
        pids=tuple(found["pids"]),
        killed=tuple(found["killed"]),
        segments=tuple(found["segments"]),
        problems=tuple(problems),
    )
    return service, notes


def _told(service: StoppedService) -> Event:
    if service.problems:
        return Event("fail", "; ".join(service.problems), service.name, service.host)
    return Event("stopped", service.was, service.name, service.host)

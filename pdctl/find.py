"""Where a deployment is: by the local cache, a topology file, or the address of any of its hosts.

Each host's record names all hosts of its deployment, so one that answers leads to the others. Only
reads. What cannot be reached is part of the answer.
"""

from __future__ import annotations

import contextlib
import difflib
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdctl import state, topology
from pdctl.agent import shim_call, user_name
from pdctl.errors import HostUnreachable, PdctlError, UsageError
from pdctl.fleet import look, machines, on_all, opened
from pdctl.hosts import Host, LocalHost
from pdctl.records import ServiceRecord, parse_services
from pdctl.scaling import scaled, to_record
from pdctl.shim.files import NAME
from pdctl.state import KnownDeployment

WHICH = "say which: as NAME, or with `--name NAME` where the command takes something else first"
HERE = ("local", "localhost")


@dataclass(frozen=True, slots=True)
class Where:
    """What the user says of where to look; nothing: the local cache, or this machine."""

    file: Path | None = None
    """A topology."""
    hosts: tuple[str, ...] = ()
    """Addresses; one of the deployment's hosts is enough."""


ANYWHERE = Where()


@dataclass(slots=True)
class Found:
    """A deployment as its hosts report it. `hosts` stay open as long as `located` does."""

    known: KnownDeployment
    seeds: frozenset[str] = frozenset()
    """Addresses given instead of keys: they give way to the keys under which a host is known."""
    addresses: dict[str, str | None] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    records: tuple[ServiceRecord, ...] = ()
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host's name -> what its shim's `status` answered."""
    unreachable: dict[str, PdctlError] = field(default_factory=dict)
    """Key -> why nothing is known of what runs there."""

    @property
    def name(self) -> str:
        return self.known.name

    def reachable(self) -> list[Host]:
        return machines(h for key, h in self.hosts.items() if key not in self.unreachable)

    def lost(self) -> dict[str, str]:
        """For a result: of `unreachable`, the errors in words."""
        return {key: str(error) for key, error in self.unreachable.items()}

    def by_address(self) -> dict[str | None, Host]:
        """Open hosts that are called by their key; not those that were given by address."""
        named = {key: h for key, h in self.hosts.items() if h.name in self.hosts or h.is_local}
        return {self.addresses[key]: host for key, host in named.items()}

    def host_of(self, record: ServiceRecord) -> Host:
        """The machine whose shim told of the record: another topology may have called it else."""
        if record.host in self.hosts:
            return self.hosts[record.host]
        return next(
            host
            for host in self.reachable()
            for service in self.answers[host.name]["services"]
            if (service["service"], service["dir"]) == (record.name, record.dir)
        )

    def is_orphan(self, record: ServiceRecord) -> bool:
        """Not in the topology any more. Where no topology is known nothing is an orphan."""
        wanted = self.known.services
        return bool(wanted) and (record.host, record.name) not in wanted


@contextlib.contextmanager
def located(name: str | None, where: Where = ANYWHERE, *, gone: bool = False) -> Iterator[Found]:
    """Look at all hosts of a deployment. Those that do not answer are in `unreachable`, and may be
    all; whoever shows what was found names them. Raises PdctlError when its name is not known then.

    `gone`: also of one that is down, where it was; without a name, the last one.
    """
    found = Found(_start(name, where, gone=gone), frozenset(where.hosts))
    more: Mapping[str, str | None] = found.known.hosts or {"local": None}
    lost: dict[str, PdctlError] = {}
    with contextlib.ExitStack() as stack:
        while more:
            _ask(found, more, stack.enter_context(opened(more)))
            more, lost = further(found.addresses, told(found.answers.values(), found.name))
        found.unreachable.update(lost)
        found.records = tuple(r for r in found.records if r.deployment == found.name)
        _settle(found, where)
        yield found


def whereabouts(name: str | None, where: Where = ANYWHERE) -> KnownDeployment:
    """Enough to lock a deployment. Asks its hosts only when nothing else tells its name."""
    if where.hosts and not where.file and name is None:
        with located(None, where) as found:
            return found.known
    return _start(name, where)


def latest_said(answers: Iterable[Mapping[str, Any]], name: str) -> KnownDeployment | None:
    """What the last `up` or `scale` let the hosts know, from their answers to `status`."""
    return max((k for k, _ in told(answers, name)), key=lambda k: k.at, default=None)


def deployments() -> tuple[str, ...]:
    """Names known on this machine: by records here, or by an `up` from here to other hosts."""
    here = {r.deployment for r in look([LocalHost()], None)}
    known = (state.recall(name) for name in state.names())
    return tuple(sorted(here | {k.name for k in known if k and any(k.hosts.values())}))


def unheard(name: str) -> str:
    """For a typo. No failure: a script may take down what it could not even start."""
    close = difflib.get_close_matches(name, deployments(), n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return f"no deployment {name} has ever run here{guess}"


def resolve_name(name: str | None, *, gone: bool = False) -> str:
    """The given name, or that of the only deployment. Raises UsageError naming those there are.

    `gone`: where there is none, the last one that there was.
    """
    if name is not None:
        return name
    found = deployments()
    if len(found) == 1:
        return found[0]
    if not found and gone and (last := state.last_gone() or _last_audited()):
        return last
    if not found:
        raise UsageError("there is no deployment here", hint="start one: `pdctl up TOPOLOGY`")
    raise UsageError(f"there are {len(found)} deployments: {', '.join(found)}", hint=WHICH)


def _last_audited() -> str | None:
    """The deployment that was changed last on this machine, perhaps from another one."""
    names: list[str] = shim_call(LocalHost(), "audited", {})["names"]
    return names[0] if names else None


def known_of(t: topology.Topology, path: Path) -> KnownDeployment:
    """What an `up` of this topology from here lets every host know."""
    used = {key: None if t.hosts[key].local else t.hosts[key].address for key in t.used_hosts()}
    wanted = ((t.host_of(t.router), "router"), *((i.host, i.name) for i in t.instances()))
    return KnownDeployment(
        name=t.name,
        topology=str(path.resolve()),
        hosts=used,
        drain_timeout_s=t.drain_timeout,
        machine=this_machine(),
        services=tuple(wanted),
        at=time.time(),
        recorded=to_record(t, path.resolve().parent),
    )


def with_former(t: topology.Topology, path: Path) -> KnownDeployment:
    """As `known_of`, with the hosts that an earlier `up` from here used."""
    known = known_of(t, path)
    cached = state.recall(known.name)
    return replace(known, hosts={**(cached.hosts if cached else {}), **known.hosts})


def this_machine() -> str:
    """User, host and pdctl's home: another home on the same machine is another place."""
    return f"{user_name()}@{socket.gethostname()}:{LocalHost().base}"


# ---- how it is done ------------------------------------------------------------------------------


def _start(name: str | None, where: Where, *, gone: bool = False) -> KnownDeployment:
    """What is known before any host was asked. The name is empty when only they can tell."""
    if name is not None and not NAME.match(name):
        raise UsageError(f"{name!r} is not the name of a deployment")
    given: dict[str, str | None] = {h: None if h in HERE else h for h in where.hosts}
    if where.file is not None:
        known = with_former(topology.load(where.file).topology, where.file)
        if name not in (None, known.name):
            raise UsageError(f"{where.file} describes {known.name}, not {name}")
        return replace(known, hosts=given) if given else known
    if given:
        return KnownDeployment(name or "", "", given)
    name = resolve_name(name, gone=gone)
    was = state.recall_gone(name) if gone else None
    return state.recall(name) or was or KnownDeployment(name, "")


def _ask(found: Found, addresses: Mapping[str, str | None], hosts: Mapping[str, Host]) -> None:
    """Add these hosts and what they answer. A host is then known by its keys in the topology."""

    def ask(host: Host) -> tuple[Host, dict[str, Any] | PdctlError]:
        try:
            return host, shim_call(host, "status", {"deployment": found.name or None})
        except PdctlError as e:
            return host, e

    answers = on_all(machines(hosts.values()), ask, undone=False)
    for host, answer in answers:
        keys = {key for key, h in hosts.items() if h is host}
        address = addresses[next(iter(keys))]
        if isinstance(answer, PdctlError):
            found.unreachable.update(dict.fromkeys(keys, answer))
        else:
            found.answers[host.name] = answer
            found.records += parse_services(host.name, answer["services"])
            if not found.name:
                found.known = replace(found.known, name=_only(answer))
            for _, own_keys in told([answer], found.name):
                keys = (keys - found.seeds or own_keys or keys) | own_keys
        found.hosts.update(dict.fromkeys(keys, host))
        found.addresses.update(dict.fromkeys(keys, address))
    if not found.name:
        first = next(iter(found.unreachable.values()), None)
        raise first or UsageError(f"there is no deployment on {', '.join(found.hosts)}")


def _only(answer: Mapping[str, Any]) -> str:
    """The deployment on a host; empty when it has none."""
    names = sorted(filter(NAME.match, answer["deployments"]))  # it becomes the name of a file
    if len(names) > 1:
        raise UsageError(f"there are {len(names)} deployments: {', '.join(names)}", hint=WHICH)
    return names[0] if names else ""


def told(answers: Iterable[Mapping[str, Any]], name: str) -> list[tuple[KnownDeployment, set[str]]]:
    """What each host was told of the deployment, and under which keys it is in there."""
    said = []
    for answer in answers:
        entry = answer["deployments"].get(name) or {}
        known = KnownDeployment.parse(entry)
        if known is not None and known.name == name:
            said.append((known, set(map(str, entry.get("keys", ())))))
    return said


def further(
    asked: Mapping[str, str | None], said: Iterable[tuple[KnownDeployment, set[str]]]
) -> tuple[dict[str, str | None], dict[str, PdctlError]]:
    """Hosts the records name that were not asked yet, and those that cannot be from here."""
    said = list(said)
    answered = {key for _, keys in said for key in keys}
    more: dict[str, str | None] = {}
    lost: dict[str, PdctlError] = {}
    for known, _ in said:
        for key, address in known.hosts.items():
            if key in answered:
                continue
            if address is None and known.machine != this_machine():
                lost[key] = _no_address(key, known.machine)
            elif address not in asked.values():
                more[key if key not in asked else str(address)] = address
    return more, lost


def _no_address(key: str, machine: str) -> HostUnreachable:
    return HostUnreachable(
        f"{key}: it is the machine of {machine.partition(':')[0]}, and its address is not known",
        host=key,
        hint="run pdctl there, or give the address with --host",
    )


def _settle(found: Found, where: Where) -> None:
    """Take the latest word on the deployment, and remember it here.

    What its hosts say is the truth, whatever the clocks of those who told them; what is remembered
    here counts where none of them says anything.
    """
    cached = state.recall(found.name)
    said = [known for known, _ in told(found.answers.values(), found.name)]
    heard = [*([cached] if cached else []), *said]
    latest = max(said or [*heard, found.known], key=lambda known: known.at)
    if where.file is not None:
        # The file is what the user looks at; how it was scaled is not in it.
        last = max(heard, key=lambda known: known.at, default=KnownDeployment(found.name, ""))
        at = max([0.0, *(known.at for known in said)])
        latest = replace(found.known, at=at, replicas=last.replicas, recorded=last.recorded)
        latest = replace(latest, services=_wanted(latest) or latest.services)
    elif latest.machine != this_machine():
        latest = replace(latest, topology="")  # a path there
    else:
        latest = replace(latest, services=_wanted(latest) or latest.services)
    found.known = replace(latest, hosts=dict(found.addresses), machine=this_machine())
    if found.records and found.known != cached:
        state.remember(found.known)


def _wanted(known: KnownDeployment) -> tuple[tuple[str, str], ...]:
    """Services of the topology as its file is now, scaled as it was; none when it is gone or
    broken.
    """
    try:
        now = scaled(topology.load(Path(known.topology)).topology, known.replicas)
    except PdctlError:
        return ()
    return known_of(now, Path(known.topology)).services if now.name == known.name else ()

"""The hosts of one deployment, asked and changed together.

`Fleet` holds the deployment's lock on every host for as long as it is open; `look` only reads.
Knows how to reach hosts; decides nothing about services.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, TypeVar

from pdctl.agent import CALL_TIMEOUT_S, Session, shim_call
from pdctl.errors import HostsFailed, HostUnreachable, Locked, PdctlError
from pdctl.hosts import Host, LocalHost
from pdctl.records import ServiceRecord, parse_services
from pdctl.remote import Routes, SshHost

FAN_OUT = 64
"""Hosts talked to at once. Threads only wait: with few, a host that is off would delay others."""
PROMPT_S = 1.0
"""A host that is not needed is late when it comes so long after the one before it."""

T = TypeVar("T")
R = TypeVar("R")
Names = Sequence[str] | Mapping[str, Sequence[str]] | None
"""Services: by name wherever they are, by the key of their host, or all."""


@contextlib.contextmanager
def opened(
    addresses: Mapping[str, str | None], already: Mapping[str | None, Host] | None = None
) -> Iterator[dict[str, Host]]:
    """Topology's key -> host, closed at the end. Keys with one address mean one machine.

    An address of None is this machine. Others are connected to on first use. `already`: hosts by
    address that somebody else has opened, and closes.
    """
    routes = Routes()
    by_address = dict(already or {})
    with contextlib.ExitStack() as stack:
        stack.callback(routes.close)
        for key, address in addresses.items():
            if address not in by_address:
                host = LocalHost() if address is None else SshHost(key, address, routes=routes)
                by_address[address] = host
                stack.callback(host.close)
        yield {key: by_address[address] for key, address in addresses.items()}


def machines(hosts: Iterable[Host]) -> list[Host]:
    """Each machine once, in a fixed order: locks are always taken in the same one."""
    return sorted({id(h): h for h in hosts}.values(), key=lambda h: h.name)


def look(hosts: Iterable[Host], deployment: str | None) -> tuple[ServiceRecord, ...]:
    """Records of one deployment, or of all, without taking a lock."""
    found = on_all(
        machines(hosts),
        lambda h: (h, shim_call(h, "status", {"deployment": deployment})),
        undone=False,
    )
    return tuple(r for h, answer in found for r in parse_services(h.name, answer["services"]))


def attempt_all(
    items: Sequence[T], do: Callable[[T], R], *, undone: bool = True, at_once: int = FAN_OUT
) -> list[R | PdctlError]:
    """Run for all at once, and wait for all: what each gave, or why it failed.

    When interrupted too, so that nothing is changed any more while that is undone; but not where
    nothing will be `undone`.
    """

    def attempt(item: T) -> R | PdctlError:
        try:
            return do(item)
        except PdctlError as e:
            return e

    if len(items) == 1:
        return [attempt(items[0])]
    pool = ThreadPoolExecutor(max_workers=max(1, min(at_once, len(items))))
    try:
        return list(pool.map(attempt, items))
    finally:
        pool.shutdown(wait=undone, cancel_futures=True)


def on_all(
    items: Sequence[T], do: Callable[[T], R], *, undone: bool = True, at_once: int = FAN_OUT
) -> list[R]:
    """Run for all at once. After all have ended, raises what failed: of several, HostsFailed."""
    outcomes = attempt_all(items, do, undone=undone, at_once=at_once)
    good = [o for o in outcomes if not isinstance(o, PdctlError)]
    raise_failures([o for o in outcomes if isinstance(o, PdctlError)], len(good))
    return good


def raise_failures(errors: Sequence[PdctlError], ok: int) -> None:
    if errors:
        raise errors[0] if len(errors) + ok == 1 else HostsFailed(errors, ok)


class Fleet:
    """Locked hosts. A host key of the topology leads to its machine's session.

    `needed`: keys that nothing can be done without; None: all. What fails elsewhere goes into
    `lost`, and the others do not wait for it: `go_on` does, when they have been seen to.
    """

    def __init__(
        self,
        deployment: str,
        hosts: Mapping[str, Host],
        *,
        purpose: str,
        wait_s: float,
        needed: Collection[str] | None = None,
    ) -> None:
        self.deployment = deployment
        self.hosts = dict(hosts)
        self.sessions: list[Session] = []
        self.addresses: dict[str, str | None] = {}
        """Of the keys, where `hold.locked` has made this."""
        self.answers: dict[str, dict[str, Any]] = {}
        """Host's name -> what its shim's `status` answered last."""
        self.records: tuple[ServiceRecord, ...] = ()
        """As they were observed last."""
        self.lost: dict[str, PdctlError] = {}
        """Host's name -> why nothing could be done there."""
        self._needed = {hosts[key].name for key in (hosts if needed is None else needed)}
        self._wait_s = wait_s
        pool = ThreadPoolExecutor(max_workers=FAN_OUT)
        self._opening = {
            pool.submit(Session, host, deployment, purpose=purpose): host
            for host in machines(hosts.values())
        }
        pool.shutdown(wait=False)
        try:
            self._admit(self._prompt())
        except BaseException:
            self.close()
            raise

    @property
    def late(self) -> list[str]:
        """Names of hosts that have neither answered nor failed yet."""
        return [host.name for host in self._opening.values()]

    def go_on(self) -> bool:
        """Leave these hosts, and turn to those that were late. False: none of them has come."""
        for session in self.sessions:
            session.close()
        self.sessions = []
        self._admit(wait(self._opening).done)
        return bool(self.sessions)

    def tolerate(self) -> None:
        """From now on no host is needed."""
        self._needed = set()

    def _prompt(self) -> set[Future[Session]]:
        """The needed hosts, and all that have answered before nothing came for a while."""
        wait([f for f, host in self._opening.items() if host.name in self._needed])
        pending = set(self._opening)
        while pending:
            came, pending = wait(pending, timeout=PROMPT_S, return_when=FIRST_COMPLETED)
            if not came:
                break
        return set(self._opening) - pending

    def _admit(self, arrived: Collection[Future[Session]]) -> None:
        """Lock these, the first before the others: two runs at once do not take half each."""
        hosts = {f: self._opening.pop(f) for f in list(self._opening) if f in arrived}
        opened = {host.name: _outcome(f) for f, host in hosts.items()}
        self.sessions = [s for s in opened.values() if not isinstance(s, PdctlError)]
        failed = {n: e for n, e in opened.items() if isinstance(e, PdctlError)}
        self._settle(failed, len(self.sessions))
        for some in (self.sessions[:1], self.sessions[1:]):
            self.on_some(some, lambda s: s.lock(self._wait_s))

    def _settle(self, failed: Mapping[str, PdctlError], ok: int) -> None:
        """Raise what nothing can be done without or against; leave the other hosts alone."""
        if failed:
            fatal = self._needed & failed.keys() or any(
                isinstance(e, Locked) for e in failed.values()
            )
            if fatal:
                raise_failures([*failed.values()], ok)
            self.lost.update(failed)
            self.sessions = [s for s in self.sessions if s.host.name not in failed]

    def session(self, key: str) -> Session:
        """Raises HostUnreachable when nothing can be asked of that host now."""
        for session in self.sessions:
            if session.host is self.hosts.get(key):
                return session
        why = self.lost.get(self.hosts[key].name) if key in self.hosts else None
        raise why or HostUnreachable(
            f"{key}: it is none of the hosts of {self.deployment} that answer",
            host=key,
            hint="`pdctl status` names those",
        )

    def observe(self, *, scan: bool = True) -> tuple[ServiceRecord, ...]:
        """Records of all hosts. Without `scan` it looks for no strays: cheap enough to poll."""
        self.answers = dict(self.on_sessions(lambda s: s.call("status", {"scan": scan})))
        machine = {session.host.name: session.host for session in self.sessions}
        found: list[ServiceRecord] = []
        for name, answer in self.answers.items():
            for record in parse_services(name, answer["services"]):
                found.append(record)
                # It also goes by the keys under which it got its services, whatever a file says.
                self.hosts.setdefault(record.host, machine[name])
        self.records = tuple(found)
        return self.records

    def on_sessions(
        self, do: Callable[[Session], dict[str, Any]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Host's name and answer, of all that have one."""
        return self.on_some(self.sessions, do)

    def on_some(
        self, sessions: Sequence[Session], do: Callable[[Session], R], *, undone: bool = True
    ) -> list[tuple[str, R]]:
        names = [s.host.name for s in sessions]
        outcomes = dict(zip(names, attempt_all(sessions, do, undone=undone), strict=True))
        failed = {n: o for n, o in outcomes.items() if isinstance(o, PdctlError)}
        self._settle(failed, len(outcomes) - len(failed))
        return [(n, o) for n, o in outcomes.items() if not isinstance(o, PdctlError)]

    def stop(self, names: Names, grace_s: float, *, undone: bool = True) -> list[dict[str, Any]]:
        """Stop these services; what was found afterwards. Hosts that have none are left alone.

        `undone`: as for `attempt_all`.
        """
        there = {id(s): self._there(s, names) for s in self.sessions}

        def stop(session: Session) -> dict[str, Any]:
            payload = {"services": there[id(session)], "timeout": grace_s}
            return session.call("stop", payload, timeout=grace_s + CALL_TIMEOUT_S)

        concerned = [s for s in self.sessions if there[id(s)] != []]
        answers = self.on_some(concerned, stop, undone=undone)
        return [{**report, "host": host} for host, a in answers for report in a["services"]]

    def purge(self, names: Names) -> None:
        self.on_sessions(lambda s: s.call("purge", {"services": self._there(s, names)}))

    def _there(self, session: Session, names: Names) -> Sequence[str] | None:
        if not isinstance(names, Mapping):
            return names
        keys = [key for key, host in self.hosts.items() if host is session.host]
        return sorted({name for key in keys for name in names.get(key, ())})

    def tail(self, service: str, lines: int) -> list[str]:
        payload = {"services": [service], "lines": lines}
        answers = self.on_sessions(lambda s: s.call("tail", payload))
        return [line for _, answer in answers for line in answer["logs"].get(service, [])]

    def token(self) -> str | None:
        """The token of what runs already; None when nothing does."""
        answers = self.on_sessions(lambda s: s.call("token", {}))
        return next((a["token"] for _, a in answers if a["token"]), None)

    def close(self) -> None:
        for late in self._opening:
            late.add_done_callback(_close)
        for session in self.sessions:
            session.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _outcome(opened: Future[Session]) -> Session | PdctlError:
    try:
        return opened.result()
    except PdctlError as e:
        return e


def _close(opened: Future[Session]) -> None:
    if opened.exception() is None:
        opened.result().close()

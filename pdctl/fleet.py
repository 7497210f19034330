"""The hosts of one deployment, asked and changed together.

`Fleet` holds the deployment's lock on every host for as long as it is open; `look` only reads.
Knows how to reach hosts; decides nothing about services.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from pdctl.agent import CALL_TIMEOUT_S, Session, shim_call
from pdctl.hosts import Host, LocalHost
from pdctl.records import ServiceRecord, parse_services
from pdctl.ssh import Routes, SshHost

T = TypeVar("T")
R = TypeVar("R")
Names = Sequence[str] | Mapping[str, Sequence[str]] | None
"""Services: by name wherever they are, by the key of their host, or all."""


@contextlib.contextmanager
def opened(addresses: Mapping[str, str | None]) -> Iterator[dict[str, Host]]:
    """Topology's key -> host, closed at the end. Keys with one address mean one machine.

    An address of None is this machine. Others are connected to on first use.
    """
    routes = Routes()
    by_address: dict[str | None, Host] = {}
    for key, address in addresses.items():
        if address not in by_address:
            by_address[address] = (
                LocalHost() if address is None else SshHost(key, address, routes=routes)
            )
    try:
        yield {key: by_address[address] for key, address in addresses.items()}
    finally:
        for host in by_address.values():
            host.close()
        routes.close()


def machines(hosts: Iterable[Host]) -> list[Host]:
    """Each machine once, in a fixed order: locks are always taken in the same one."""
    return sorted({id(h): h for h in hosts}.values(), key=lambda h: h.name)


def look(hosts: Iterable[Host], deployment: str | None) -> tuple[ServiceRecord, ...]:
    """Records of one deployment, or of all, without taking a lock."""
    found = on_all(
        machines(hosts), lambda h: (h, shim_call(h, "status", {"deployment": deployment}))
    )
    return tuple(r for h, answer in found for r in parse_services(h.name, answer["services"]))


def on_all(items: Sequence[T], do: Callable[[T], R]) -> list[R]:
    """Run for all at once; raises the first failure after all have ended."""
    if len(items) == 1:
        return [do(items[0])]
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(items)))) as pool:
        return list(pool.map(do, items))


class Fleet:
    """Locked hosts. A host key of the topology leads to its machine's session."""

    def __init__(
        self, deployment: str, hosts: Mapping[str, Host], *, purpose: str, wait_s: float
    ) -> None:
        self.deployment = deployment
        self.hosts = dict(hosts)
        self.sessions: list[Session] = []
        try:
            for host in machines(hosts.values()):
                self.sessions.append(Session(host, deployment, purpose=purpose, wait_s=wait_s))
        except BaseException:
            self.close()
            raise

    def session(self, key: str) -> Session:
        host = self.hosts[key]
        return next(s for s in self.sessions if s.host is host)

    def observe(self, *, scan: bool = True) -> tuple[ServiceRecord, ...]:
        """Records of all hosts. Without `scan` it looks for no strays: cheap enough to poll."""
        answers = self.on_sessions(lambda s: s.call("status", {"scan": scan}))
        return tuple(
            record
            for host, answer in answers
            for record in parse_services(host, answer["services"])
        )

    def on_sessions(
        self, do: Callable[[Session], dict[str, Any]]
    ) -> list[tuple[str, dict[str, Any]]]:
        return on_all(self.sessions, lambda s: (s.host.name, do(s)))

    def stop(self, names: Names, grace_s: float) -> list[dict[str, Any]]:
        """Stop these services; what was found afterwards."""

        def stop(session: Session) -> dict[str, Any]:
            payload = {"services": self._there(session, names), "timeout": grace_s}
            return session.call("stop", payload, timeout=grace_s + CALL_TIMEOUT_S)

        answers = self.on_sessions(stop)
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

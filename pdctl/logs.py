"""Logs of a deployment's services, merged from all its hosts: the last lines, or as they come.

Following outlives restarts, rotation and hosts: one that is lost is said, and followed again from
the line where it was lost.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pdctl.agent import open_shim, request_text, shim_call
from pdctl.errors import PdctlError, UsageError
from pdctl.find import ANYWHERE, Found, Where, located
from pdctl.fleet import attempt_all, raise_failures
from pdctl.hosts import Channel, Host

SILENCE_S = 20.0
"""A follower on a host says every few seconds that it is there; after this it is lost."""
RETRY_S = (0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class LogLine:
    service: str
    """Empty for `lost` and `found`."""
    line: str
    """Of the log; or why the host was lost."""
    host: str
    event: Literal["line", "lost", "found"] = "line"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.log/1",
            "event": self.event,
            "service": self.service,
            "host": self.host,
            "line": self.line,
        }


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which lines."""

    services: tuple[str, ...] = ()
    """None named: all."""
    lines: int = 50
    """Last ones of each service."""
    since_s: float | None = None
    """None older than this, by the time in the line itself."""

    def payload(self, name: str) -> dict[str, Any]:
        return {
            "deployment": name,
            "services": list(self.services) or None,
            "lines": self.lines,
            "since_s": self.since_s,
        }


def logs(
    name: str | None, query: LogQuery, *, follow: bool, where: Where = ANYWHERE
) -> Iterator[LogLine]:
    """Lines that are there; with `follow`, then new ones for ever.

    After `down` the last lines of the services that were stopped are still there.
    """
    with located(name, where) as found:
        if follow:
            if not found.unreachable:  # else they may be there, and are followed when it is back
                _check(found.name, query.services, [r.name for r in found.records])
            yield from _follow(found, query)
        else:
            yield from _last(found, query)


def _last(found: Found, query: LogQuery) -> Iterator[LogLine]:
    payload, names = query.payload(found.name), _host_names(found)
    hosts, lost = found.reachable(), dict(found.unreachable)
    logs: dict[tuple[str, str], list[str]] = {}
    answers = attempt_all(hosts, lambda h: shim_call(h, "tail", payload)["logs"], undone=False)
    for host, told in zip((h.name for h in hosts), answers, strict=True):
        if isinstance(told, PdctlError):
            lost[host] = told
        else:
            logs.update({(s, names.get((host, s), host)): lines for s, lines in told.items()})
    for key, error in lost.items():
        yield LogLine("", str(error), key, "lost")
    known = {service for service, _ in logs}
    if query.services:  # only those were looked for, and one that runs may have no log yet
        known |= {r.name for r in found.records}
    if lost and (not known or not known.issuperset(query.services)):  # they may be there
        raise_failures([*lost.values()], len(found.answers.keys() - lost.keys()))
    _check(found.name, query.services, sorted(known))
    order = query.services or sorted(known)
    for service, host in sorted(logs, key=lambda key: (order.index(key[0]), key[1])):
        yield from (LogLine(service, line, host) for line in logs[service, host])


def _check(name: str, services: Sequence[str], known: Sequence[str]) -> None:
    if not known and not services:
        raise UsageError(f"there are no logs of {name}", hint="`pdctl status` shows what there is")
    unknown = [s for s in services if s not in known]
    if unknown:
        there = f"its services: {', '.join(sorted(known))}" if known else "it has none"
        raise UsageError(f"{name} has no service {unknown[0]}", hint=there)


def _host_names(found: Found) -> Mapping[tuple[str, str], str]:
    """(machine's name, service) -> the topology's key: several may mean one machine."""
    machine = {key: host.name for key, host in found.hosts.items()}
    return {(machine.get(r.host, r.host), r.name): r.host for r in found.records}


# ---- following -----------------------------------------------------------------------------------


def _follow(found: Found, query: LogQuery) -> Iterator[LogLine]:
    arrived: queue.Queue[LogLine] = queue.Queue(maxsize=1000)
    names = _host_names(found)
    followers = [
        _Follower(host, query.payload(found.name), names, arrived)
        for host in {id(h): h for h in found.hosts.values()}.values()
    ]
    for key in found.unreachable.keys() - found.hosts.keys():
        yield LogLine("", str(found.unreachable[key]), key, "lost")
    try:
        for follower in followers:
            threading.Thread(target=follower.run, daemon=True).start()
        while True:
            yield arrived.get()
    finally:
        for follower in followers:
            follower.end()


@dataclass(slots=True)
class _Follower:
    """Keeps one host's logs coming, in a thread of its own."""

    host: Host
    payload: dict[str, Any]
    names: Mapping[tuple[str, str], str]
    arrived: queue.Queue[LogLine]
    after: dict[str, list[int]] = field(default_factory=dict)
    """Where each service's log was read to."""
    ended: threading.Event = field(default_factory=threading.Event)
    channel: Channel | None = None

    def run(self) -> None:
        failures = 0
        while not self.ended.is_set():
            reason = f"{self.host.name}: its log follower ended"
            try:
                for heard in self._listen():
                    if failures:
                        self._tell(LogLine("", "followed again", self.host.name, "found"))
                    failures = 0
                    self._pass_on(heard)
            except PdctlError as e:
                reason = str(e)
            if not failures:
                self._tell(LogLine("", reason, self.host.name, "lost"))
            failures += 1
            self.host.close()  # what is left of the connection
            self.ended.wait(RETRY_S[min(failures, len(RETRY_S)) - 1])

    def _listen(self) -> Iterator[dict[str, Any]]:
        with contextlib.closing(open_shim(self.host, "follow")) as channel:
            self.channel = channel
            request = {**self.payload, "after": self.after}
            channel.send(request_text(self.host, "follow", request))
            while not self.ended.is_set():
                text = channel.receive(SILENCE_S)
                if text is None:
                    return
                yield json.loads(text)

    def _pass_on(self, heard: dict[str, Any]) -> None:
        if heard:
            service = heard["service"]
            self.after[service] = heard["at"]
            host = self.names.get((self.host.name, service), self.host.name)
            self._tell(LogLine(service, heard["line"], host))

    def _tell(self, item: LogLine) -> None:
        while not self.ended.is_set():
            with contextlib.suppress(queue.Full):
                self.arrived.put(item, timeout=0.5)
                return

    def end(self) -> None:
        self.ended.set()
        if self.channel is not None:
            self.channel.close()

"""Logs of a deployment's services, from all its hosts: the last lines, or as they come."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdctl.agent import request_text, shim_argv, shim_call
from pdctl.errors import PdctlError, UsageError
from pdctl.find import ANYWHERE, Where, located
from pdctl.hosts import Channel, Host


@dataclass(frozen=True, slots=True)
class LogLine:
    service: str
    line: str


def logs(
    name: str | None, services: Sequence[str], lines: int, *, follow: bool, where: Where = ANYWHERE
) -> Iterator[LogLine]:
    """The last `lines` of each service (none named: all); with `follow`, then new ones for ever.

    After `down` the last lines of the services that were stopped are still there.
    """
    with located(name, where) as found:
        if follow:
            known = [r.name for r in found.records]
            _check(found.name, services, known)
            yield from _follow(found.name, services or known, lines, found.reachable())
        else:
            yield from _last(found.name, services, lines, found.reachable())


def _last(
    name: str, services: Sequence[str], lines: int, hosts: Sequence[Host]
) -> Iterator[LogLine]:
    found: dict[str, list[str]] = {}
    for host in hosts:
        payload = {"deployment": name, "services": list(services) or None, "lines": lines}
        found.update(shim_call(host, "tail", payload)["logs"])
    _check(name, services, found)
    for service in services or sorted(found):
        yield from (LogLine(service, line) for line in found[service])


def _check(name: str, services: Sequence[str], known: Sequence[str] | dict[str, list[str]]) -> None:
    if not known and not services:
        raise UsageError(f"there are no logs of {name}", hint="`pdctl status` shows what there is")
    unknown = [s for s in services if s not in known]
    if unknown:
        there = f"its services: {', '.join(sorted(known))}" if known else "it has none"
        raise UsageError(f"{name} has no service {unknown[0]}", hint=there)


def _follow(
    name: str, services: Sequence[str], lines: int, hosts: Sequence[Host]
) -> Iterator[LogLine]:
    arrived: queue.Queue[LogLine | PdctlError | None] = queue.Queue(maxsize=1000)
    channels = [host.channel(shim_argv(host, "follow")) for host in hosts]
    try:
        for host, channel in zip(hosts, channels, strict=True):
            payload = {"deployment": name, "services": list(services), "lines": lines}
            channel.send(request_text(host, "follow", payload))
            threading.Thread(target=_pump, args=(channel, arrived), daemon=True).start()
        for _ in channels:
            while (item := arrived.get()) is not None:
                if isinstance(item, PdctlError):
                    raise item
                yield item
    finally:
        for channel in channels:
            channel.close()


def _pump(channel: Channel, arrived: queue.Queue[LogLine | PdctlError | None]) -> None:
    try:
        while (text := channel.receive(None)) is not None:
            arrived.put(LogLine(**json.loads(text)))
    except PdctlError as e:
        arrived.put(e)
    arrived.put(None)

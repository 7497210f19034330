"""Who has to reach whom in a deployment, tried out from host to host, and how fast.

Each host listens for a moment on the very addresses and ports that its services are to have; where
a service of the deployment has a port already, it is only connected to. Judges nothing.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.agent import open_shim, request_text, shim_call
from pdctl.errors import PdctlError
from pdctl.events import Event, Report
from pdctl.fleet import attempt_all, on_all
from pdctl.hosts import Host
from pdctl.services import ServiceSpec
from pdctl.shim import measure
from pdctl.topology import Topology, contact_address, listen_address

LISTEN_S = 300.0
STREAM_S = 0.3
"""How long each path is measured."""
MARGIN_S = 20.0
NOTHING = {"any": 0, "failed": {"any": "its listener did not answer"}}
HERE = ""
"""In place of a host's key: the machine that runs pdctl."""

Pair = tuple[str, str]
"""Keys of a prefill instance's host and of a decode instance's."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A connection that the deployment needs. Hosts are keys of the topology."""

    source: str
    target: str
    address: str
    port: int
    service: str
    """Who listens."""
    why: str


@dataclass(frozen=True, slots=True)
class Reached:
    error: str
    """Empty: it works."""
    name: str = ""
    """Who answered, of our own listeners."""
    rate: float = 0.0
    """Bytes a second."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of the listening on one host."""

    spare: int
    """One more port on the address of its services; 0: none could be had."""
    failed: Mapping[str, str]
    """Port, or `any` -> why it cannot be listened on."""


def edges(t: Topology, services: Sequence[ServiceSpec]) -> list[Edge]:
    """Every connection between hosts, and from here, each once."""
    by_name = {s.name: s for s in services}
    router = by_name["router"]
    address = {s.name: contact_address(t, s.host) for s in services}
    address["router"] = contact_address(t, router.host, t.router.bind)

    def to(service: ServiceSpec, purpose: str, source: str, why: str) -> Edge:
        port = service.ports[purpose]
        return Edge(source, service.host, address[service.name], port, service.name, why)

    found = [to(router, "http", HERE, "pdctl and clients ask the router")]
    for s in services:
        if s.role == "router":
            continue
        found.append(to(s, "http", HERE, "pdctl asks whether it is ready"))
        found.append(to(s, "http", router.host, "the router forwards requests"))
        found.append(to(router, "http", s.host, "instances register with the router"))
        if s.role == "decode":
            prefills = [p for p in services if p.role == "prefill"]
            found += [to(p, "peer", s.host, "decode fetches KV from prefill") for p in prefills]
    return list(dict.fromkeys(found))


class Network:
    """Reachable hosts (key -> host) that listen for as long as this is open."""

    def __init__(
        self, t: Topology, hosts: Mapping[str, Host], services: Sequence[ServiceSpec]
    ) -> None:
        self._t = t
        self._hosts = hosts
        self._services = services
        self._token = secrets.token_hex(16)
        self.heard: dict[str, Heard] = {}

    @contextlib.contextmanager
    def listening(self, running: frozenset[str]) -> Iterator[None]:
        """`running`: services that have their ports already."""
        with contextlib.ExitStack() as stack:

            def listen(key: str) -> Heard:
                try:
                    return self._listen(key, running, stack)
                except PdctlError as e:
                    return Heard(0, {"any": str(e)})

            heard = on_all(list(self._hosts), listen, undone=False)
            self.heard = dict(zip(self._hosts, heard, strict=True))
            yield

    def _listen(self, key: str, running: frozenset[str], stack: contextlib.ExitStack) -> Heard:
        ours = [s for s in self._services if s.host == key and s.name not in running]
        request = {
            "binds": [[p, s.bind] for s in ours for p in s.ports.values()],
            "any": listen_address(self._t, key),
            "token": self._token,
            "name": key,
            "seconds": LISTEN_S,
        }
        host = self._hosts[key]
        channel = open_shim(host, "listen")
        stack.callback(channel.close)
        channel.send(request_text(host, "listen", request))
        line = channel.receive(MARGIN_S)
        while line is not None and not line.startswith("{"):
            line = channel.receive(MARGIN_S)  # what the login's shell had to say
        answer: dict[str, Any] = json.loads(line) if line else NOTHING
        return Heard(answer["any"], answer["failed"])

    def reach(self, wanted: Sequence[Edge], plain: frozenset[str]) -> dict[Edge, Reached]:
        """Try all connections, from all sources at once. `plain`: services, not listeners."""
        by_source: dict[str, list[Edge]] = {}
        for edge in wanted:
            if edge.source == HERE or edge.source in self._hosts:
                by_source.setdefault(edge.source, []).append(edge)

        def ask(source: str) -> dict[Edge, Reached]:
            targets = [_target(e, 0.0, e.service in plain) for e in by_source[source]]
            return dict(zip(by_source[source], self._ask(source, targets), strict=True))

        answers = on_all(list(by_source), ask, undone=False) if by_source else []
        return {edge: reached for answer in answers for edge, reached in answer.items()}

    def rates(
        self, pairs: Sequence[tuple[str, str]], report: Report
    ) -> dict[tuple[str, str], float]:
        """(prefill's host, decode's host) -> bytes a second by TCP, in the direction of the KV.

        In rounds in which no host sends or receives twice. 0: it could not be measured.
        """
        found: dict[Pair, float] = {}
        for number, round_ in enumerate(rounds(pairs), 1):
            report(Event("wait", f"measuring, round {number}", "network"))

            def measured(pair: Pair) -> tuple[Pair, float]:
                prefill, decode = pair
                heard = self.heard.get(prefill)
                if heard is None or not heard.spare or decode not in self._hosts:
                    return pair, 0.0
                address = contact_address(self._t, prefill)
                edge = Edge(decode, prefill, address, heard.spare, "", "")
                return pair, self._ask(decode, [_target(edge, STREAM_S, False)])[0].rate

            found.update(on_all(round_, measured, undone=False))
        return found

    def copies(self, keys: Sequence[str]) -> dict[str, float]:
        """Key -> bytes a second into shared memory by one thread."""
        known = [k for k in dict.fromkeys(keys) if k in self._hosts]

        def copy(key: str) -> float:
            return float(shim_call(self._hosts[key], "copy", {})["rate"])

        answers = attempt_all(known, copy, undone=False)
        return {k: a for k, a in zip(known, answers, strict=True) if isinstance(a, float)}

    def _ask(self, source: str, targets: list[dict[str, Any]]) -> list[Reached]:
        request = {"targets": targets, "token": self._token}
        if source == HERE:
            answer = measure.reach("", request)
        else:
            try:
                answer = shim_call(self._hosts[source], "reach", request)
            except PdctlError as e:
                return [Reached(f"{source} could not try: {e}") for _ in targets]
        return [Reached(a["error"], a["name"], a["rate"]) for a in answer["answers"]]


def _target(edge: Edge, seconds: float, plain: bool) -> dict[str, Any]:
    where = {"address": edge.address, "port": edge.port}
    return {**where, "seconds": seconds, "plain": plain}


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Each pair once; within a round no first and no second half comes twice."""
    left, found = list(dict.fromkeys(pairs)), []
    while left:
        firsts: set[str] = set()
        seconds: set[str] = set()
        now = []
        for first, second in left:
            if first not in firsts and second not in seconds:
                firsts.add(first)
                seconds.add(second)
                now.append((first, second))
        left = [pair for pair in left if pair not in now]
        found.append(now)
    return found

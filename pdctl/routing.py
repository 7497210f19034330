"""The router as pdctl uses it: what it knows of the instances, and which are to get nothing new.

Speaks to /internal of the router and to /ledger of instances. Starts and stops nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdctl.errors import PdctlError
from pdctl.health import get_json, post_json
from pdctl.services import ServiceSpec
from pdctl.sizes import counted

View = Mapping[str, "Routed"]
"""Instances by name, as the router sees them."""


@dataclass(frozen=True, slots=True)
class Routed:
    name: str
    role: str
    state: str
    reason: str
    """Why it gets no request; empty when it does."""
    incarnation: str
    in_flight: int
    """Requests under way there; of a prefill instance, those without a first byte."""
    links: frozenset[str]
    """Decode: prefill instances with which it may be paired."""

    @property
    def serves(self) -> bool:
        return self.state == "ready" and (self.role != "decode" or bool(self.links))

    @property
    def lives(self) -> bool:
        return self.state not in ("dead", "leaving")

    @staticmethod
    def parse(found: Mapping[str, Any]) -> Routed:
        return Routed(
            name=str(found["name"]),
            role=str(found.get("role", "")),
            state=str(found.get("state", "")),
            reason=str(found.get("reason", "")),
            incarnation=str(found.get("incarnation", "")),
            in_flight=int(found.get("in_flight", 0)),
            links=frozenset(found.get("links") or ()),
        )


@dataclass(frozen=True, slots=True)
class RouterClient:
    url: str
    token: str

    def view(self) -> dict[str, Routed] | None:
        """None: it does not answer."""
        status, body = get_json(f"{self.url}/internal/instances", token=self.token)
        found = body.get("instances")
        if status != 200 or not isinstance(found, list):
            return None
        return {i["name"]: Routed.parse(i) for i in found}

    def drain(self, name: str, draining: bool) -> None:
        """Send this instance nothing new, or again something. Raises PdctlError."""
        body = {"name": name, "draining": draining}
        status, answer = post_json(f"{self.url}/internal/drain", body, token=self.token)
        if status != 200:
            error = answer.get("error")
            reason = error.get("message") if isinstance(error, dict) else None
            raise PdctlError(f"the router at {self.url}: {reason or 'it does not answer'}")


def unseen(view: View | None, services: Iterable[ServiceSpec], former: Mapping[str, str]) -> str:
    """What the router lacks before all of `services` get requests; empty: nothing.

    `former` are incarnations that have ended. A drained instance lacks nothing.
    """
    if view is None:
        return "it does not answer"
    instances = [s for s in services if s.role != "router"]
    for service in instances:
        routed = view.get(service.name)
        if routed is None or routed.incarnation == former.get(service.name):
            return f"{service.name} to register"
        if routed.state not in ("ready", "draining"):
            return routed.reason or f"{service.name}, which is {routed.state}"
    prefills = {s.name for s in instances if s.role == "prefill"}
    for service in instances:
        missing = prefills - view[service.name].links if service.role == "decode" else ()
        if missing:
            return f"the path from {service.name} to {', '.join(sorted(missing))}"
    return ""


def owed(service: ServiceSpec, view: View, running: Iterable[ServiceSpec]) -> str:
    """What a drained instance still has to finish, in words; empty: nothing.

    Looked at in the order in which a request goes: what was not seen at one place is at a later.
    """
    routed = view.get(service.name)
    if routed is None or not routed.lives:
        return ""
    if routed.in_flight:
        return _requests(routed.in_flight)
    if service.role == "prefill":
        for decode in (s for s in running if s.role == "decode"):
            status, ledger = get_json(f"{decode.url}/ledger")
            if status != 200 and decode.name in view and view[decode.name].lives:
                return f"what {decode.name} has of it, which does not answer"
            peer = (ledger.get("peers") or {}).get(service.name) or {}
            if peer.get("requests"):
                return f"{_requests(peer['requests'])} of {decode.name}"
    status, ledger = get_json(f"{service.url}/ledger")
    if status != 200:
        return "its ledger, which does not answer"
    return _requests(max(ledger.get("front_requests", 0), ledger["ledger"].get("requests", 0)))


def _requests(count: int) -> str:
    return counted(count, "request") if count else ""

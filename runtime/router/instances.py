"""What the router remembers of each instance, and what a request holds of it while it runs.

Records only: `registry` decides with them, `policy` weighs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from runtime.router_protocol import Registration

State = Literal["ready", "starting", "unreachable", "mismatch", "draining", "leaving", "dead"]


@dataclass(slots=True, eq=False)
class Instance:
    """One process, from its first registration to its end. Compared by identity, never by name."""

    info: Registration
    first_seen: float
    last_seen: float
    reachable: bool
    """The router itself got an answer at `url`. (It never contacts prefill instances.)"""
    why_unreachable: str = "not contacted yet"
    draining: bool = False
    """Somebody asked that it gets no new request. Those under way go on."""
    failures: int = 0
    """In a row; any success clears it."""
    suspect_until: float = 0.0
    mismatch: str = ""
    in_flight: int = 0
    """Leases: whole requests for decode and mixed, requests without a first byte for prefill."""
    prompt_bytes: int = 0
    """Bodies of the requests whose first byte is still out."""
    settled: int = 0
    """Prefill: leases that the instance itself no longer counts. A reply that does not stream shows
    the router no first byte, so its lease outlives the prefill leg."""
    foreign: int = 0
    """Requests it reported beyond our leases: other clients, or another router."""
    ok: int = 0
    failed: int = 0
    links: set[str] = field(default_factory=set)
    """Decode: prefill instances with a live path, reported since their present incarnation came."""
    bad_links: dict[str, float] = field(default_factory=dict)
    """Decode: prefill name -> until when the link between them is avoided."""

    @property
    def name(self) -> str:
        return self.info.name


@dataclass(frozen=True, slots=True)
class Target:
    """An instance that takes whole requests. `prefills` is empty for mixed instances only."""

    instance: Instance
    prefills: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class Eligible:
    """Who may get a request of one model now.

    `preferred` leaves out what failed a moment ago, unless that leaves nothing.
    """

    preferred: tuple[Target, ...]
    all: tuple[Target, ...]
    valid_until: float


class Lease:
    """One request's share of an instance's, or a pair's, load. Call `end` exactly once."""

    __slots__ = ("_decode", "_owes", "_prefill", "_weight")

    def __init__(self, decode: Instance, prefill: Instance | None, weight: int) -> None:
        self._decode = decode
        self._prefill = prefill
        self._owes: Instance | None = prefill or decode
        self._weight = weight
        decode.in_flight += 1
        if prefill is not None:
            prefill.in_flight += 1
        self._owes.prompt_bytes += weight

    def first_byte(self) -> None:
        """The prefill leg is over."""
        owes, self._owes = self._owes, None
        if owes is None:
            return
        owes.prompt_bytes -= self._weight
        if owes is self._prefill:
            owes.in_flight -= 1
            owes.settled = min(owes.settled, owes.in_flight)

    def end(self, served: bool) -> None:
        """`served`: both legs did their work. What failed is counted where it is blamed."""
        self.first_byte()
        self._decode.in_flight -= 1
        if served:
            self._decode.ok += 1
            if self._prefill is not None:
                self._prefill.ok += 1

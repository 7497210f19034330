"""Compare what a topology wants with what its hosts report: ordered steps and ports. Pure.

`command` gives the wanted services, `ops` observes and carries the steps out.
Knows no files, no SSH, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdctl.services import ServiceSpec

StepKind = Literal["start", "keep", "replace", "remove"]


@dataclass(frozen=True, slots=True)
class ObservedService:
    """A service directory as found on a host. `spec` is None when its record cannot be read."""

    name: str
    host: str
    spec: ServiceSpec | None
    spec_hash: str
    alive: bool
    """Its supervisor or its process runs, proven by identity."""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do about one service. `remove` stops an orphan; `keep` does nothing."""

    kind: StepKind
    service: ServiceSpec
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in the order they are carried out: removals, then one wave of everything to start."""

    deployment: str
    steps: tuple[Step, ...]

    def of(self, *kinds: StepKind) -> tuple[Step, ...]:
        return tuple(s for s in self.steps if s.kind in kinds)

    @property
    def changes(self) -> bool:
        return any(s.kind != "keep" for s in self.steps)

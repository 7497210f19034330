"""What a shim reports of a service, typed, and how `plan` sees it.

Parses a host's answers; asks none. The records may come from another version of pdctl: what cannot
be read becomes None and is still stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pdctl.errors import StateError
from pdctl.plan import ObservedService
from pdctl.services import ServiceSpec

State = Literal["starting", "running", "exited", "lost", "never-started"]
"""lost: it died unrecorded, because its supervisor was killed too or the host rebooted."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, for ever: a pid alone may come to mean another."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class ExitRecord:
    code: int | None
    signal: int | None
    error: str
    """Why the program could not be run at all; else empty."""
    at: float
    """Unix time on the host."""
    ran_s: float
    asked: bool
    """It was told to stop."""

    @property
    def status(self) -> int | None:
        """Exit code, negative for a signal."""
        return -self.signal if self.signal is not None else self.code

    def __str__(self) -> str:
        if self.error:
            return self.error
        if self.signal is None:
            return f"exited with code {self.code} after {self.ran_s:.1f} s"
        try:
            name = signal.Signals(self.signal).name
        except ValueError:
            name = f"signal {self.signal}"
        return f"killed by {name} after {self.ran_s:.1f} s"


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A service directory on a host, as its shim found it."""

    deployment: str
    name: str
    host: str
    dir: str
    state: State
    supervised: bool
    """Its supervisor lives: exits are recorded, and a stop reaches every descendant."""
    spec: ServiceSpec | None
    spec_hash: str
    service: Identity | None
    shim: Identity | None
    exit: ExitRecord | None
    uptime_s: float | None
    rebooted: bool
    strays: tuple[int, ...]
    """Processes of it that outlived both the service and its supervisor."""

    @property
    def alive(self) -> bool:
        """A supervisor that only records the exit does not count: a start waits for its end."""
        return self.state in ("starting", "running")

    @property
    def ended(self) -> bool:
        return self.state in ("exited", "lost", "never-started")

    def how_it_ended(self) -> str:
        if self.exit is not None:
            return str(self.exit)
        if self.rebooted:
            return "the host was rebooted"
        if self.state == "never-started":
            return "its start was interrupted"
        return "killed together with its supervisor; the exit was not recorded"

    def observed(self) -> ObservedService:
        return ObservedService(
            name=self.name,
            host=self.host,
            spec=self.spec,
            spec_hash=self.spec_hash,
            alive=self.alive,
        )


def parse_services(host: str, services: Iterable[dict[str, Any]]) -> tuple[ServiceRecord, ...]:
    return tuple(parse_service(host, s) for s in services)


def parse_service(host: str, found: dict[str, Any]) -> ServiceRecord:
    """One entry of the shim's `status`. Raises StateError when it makes no sense.

    The host is the one of the record: several keys of a topology may mean the same machine.
    """
    try:
        if found["state"] not in get_args(State):
            raise ValueError(f"state {found['state']!r}")
        known = found["identity"] or {}
        last = found["exit"]
        return ServiceRecord(
            deployment=found["deployment"],
            name=found["service"],
            host=found["spec"].get("host") or host,
            dir=found["dir"],
            state=found["state"],
            supervised=found["supervised"],
            spec=parse_spec(found["spec"]),
            spec_hash=found["hash"],
            service=_identity(known, "service"),
            shim=_identity(known, "shim"),
            exit=ExitRecord(**last) if last else None,
            uptime_s=found["uptime_s"],
            rebooted=found["rebooted"],
            strays=tuple(found["strays"]),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise StateError(
            f"{host}: a record of {found.get('dir', 'a service')} cannot be understood: {e!r}",
            hint="was it written by another version of pdctl?",
        ) from e


def parse_spec(spec: dict[str, Any]) -> ServiceSpec | None:
    """The recorded spec, or None when another version of pdctl wrote it."""
    names = {f.name for f in fields(ServiceSpec)}
    if not spec or not spec.keys() <= names:
        return None
    try:
        lists: dict[str, Any] = {
            key: tuple(spec[key]) for key in ("argv", "secrets") if key in spec
        }
        return ServiceSpec(**{**spec, **lists})
    except TypeError:
        return None


def _identity(known: dict[str, Any], part: str) -> Identity | None:
    if part not in known:
        return None
    return Identity(known[part]["pid"], known[part]["start_ticks"], known["boot_id"])

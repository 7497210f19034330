"""Who holds a deployment's lock on its hosts, and taking it away from one who will not come back.

A lock frees itself when its pdctl ends. `break_locks` is for the rest: a connection that broke
without a word, so that the host still waits for its pdctl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdctl.agent import shim_call
from pdctl.find import ANYWHERE, Found, Where, located


@dataclass(frozen=True, slots=True)
class LockHolder:
    host: str
    """Where the lock is held."""
    text: str
    """Who it is, in one line."""
    user: str
    machine: str
    """Where their pdctl runs."""
    pid: int
    command: str
    since: float
    """Unix time on the host."""
    age_s: float

    @staticmethod
    def parse(host: str, entry: dict[str, Any]) -> LockHolder:
        by = entry.get("by") or {}
        return LockHolder(
            host=host,
            text=str(entry.get("text", "an unknown holder")),
            user=str(by.get("user", "")),
            machine=str(by.get("host", "")),
            pid=int(by.get("pid") or 0),
            command=str(by.get("command", "")),
            since=float(entry.get("since") or 0.0),
            age_s=round(float(entry.get("age_s") or 0.0), 1),
        )


@dataclass(frozen=True, slots=True)
class LockReport:
    name: str
    holders: tuple[LockHolder, ...]
    broken: bool = False
    """They held it until now."""

    def to_json(self) -> dict[str, Any]:
        holders = [asdict(h) for h in self.holders]
        return {
            "schema": "pdctl.lock/1",
            "name": self.name,
            "holders": holders,
            "broken": self.broken,
        }


def holders(found: Found) -> tuple[LockHolder, ...]:
    return _parsed(_held(found))


def show(name: str | None, where: Where = ANYWHERE) -> LockReport:
    with located(name, where) as found:
        return LockReport(found.name, holders(found))


def break_locks(
    name: str | None, where: Where, agree: Callable[[Sequence[LockHolder]], bool]
) -> LockReport:
    """End the shims that hold the lock, when `agree` does; with hosts given, only there."""
    with located(name, where) as found:
        held = {h: e for h, e in _held(found).items() if not where.hosts or h in where.hosts}
        report = LockReport(found.name, _parsed(held))
        if not held or not agree(report.holders):
            return report
        for host in found.reachable():
            if host.name in held:
                payload = {"deployment": found.name, "shim": held[host.name].get("shim")}
                shim_call(host, "break", payload)
        return LockReport(found.name, report.holders, broken=True)


def _parsed(held: Mapping[str, dict[str, Any]]) -> tuple[LockHolder, ...]:
    return tuple(LockHolder.parse(host, entry) for host, entry in held.items())


def _held(found: Found) -> dict[str, dict[str, Any]]:
    """Host's name -> the lock's record there."""
    return {
        host: entry
        for host, answer in found.answers.items()
        if (entry := answer["locks"].get(found.name)) is not None
    }

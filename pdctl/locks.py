"""Who holds a deployment's lock on its hosts, and taking it away from one who will not come back.

A lock frees itself when its pdctl ends. `break_locks` is for the rest: a connection that broke
without a word, so that the host still waits for its pdctl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdctl.agent import shim_call
from pdctl.find import ANYWHERE, Found, Where, located
from pdctl.fleet import on_all
from pdctl.hosts import Host


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
    unreachable: dict[str, str]
    """Host -> why nothing is known of its lock."""
    broken: bool = False
    """They held it until now."""

    def to_json(self) -> dict[str, Any]:
        holders = [asdict(h) for h in self.holders]
        return {
            "schema": "pdctl.lock/1",
            "name": self.name,
            "holders": holders,
            "broken": self.broken,
            "unreachable": self.unreachable,
        }


def holders(found: Found) -> tuple[LockHolder, ...]:
    return _parsed(_held(found))


def show(name: str | None, where: Where = ANYWHERE) -> LockReport:
    with located(name, where) as found:
        return LockReport(found.name, holders(found), found.lost())


def break_locks(
    name: str | None, where: Where, agree: Callable[[Sequence[LockHolder]], bool]
) -> LockReport:
    """End the shims that hold the lock, when `agree` does; with hosts given, only there."""
    with located(name, where) as found:
        held = {h: e for h, e in _held(found).items() if not where.hosts or h in where.hosts}
        lost = {h: e for h, e in found.lost().items() if not where.hosts or h in where.hosts}
        report = LockReport(found.name, _parsed(held), lost)
        if not held or not agree(report.holders):
            return report

        def end(host: Host) -> None:
            payload = {"deployment": found.name, "shim": held[host.name].get("shim")}
            shim_call(host, "break", payload)

        on_all([h for h in found.reachable() if h.name in held], end)
        return replace(report, broken=True)


def _parsed(held: Mapping[str, dict[str, Any]]) -> tuple[LockHolder, ...]:
    return tuple(LockHolder.parse(host, entry) for host, entry in held.items())


def _held(found: Found) -> dict[str, dict[str, Any]]:
    """Host's name -> the lock's record there."""
    return {
        host: entry
        for host, answer in found.answers.items()
        if (entry := answer["locks"].get(found.name)) is not None
    }

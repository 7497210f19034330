"""What was changed in a deployment, by whom: the audit lines of all its hosts, merged by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdctl.agent import shim_call
from pdctl.find import ANYWHERE, Where, located
from pdctl.fleet import on_all


@dataclass(frozen=True, slots=True)
class AuditEntry:
    at: float
    """Unix time on the host."""
    host: str
    deployment: str
    user: str
    machine: str
    """Where their pdctl ran."""
    pid: int
    version: str
    """Of that pdctl."""
    command: str
    do: str
    """start, stop, purge or break."""
    service: str
    result: str


def audit(name: str | None, lines: int, where: Where = ANYWHERE) -> tuple[AuditEntry, ...]:
    """The last changes on each host, oldest first. They are kept after `down`: without a name, of
    the last deployment when there is none now.
    """
    with located(name, where, gone=True) as found:
        payload = {"deployment": found.name, "lines": lines}
        answers = on_all(
            found.reachable(), lambda h: (h.name, shim_call(h, "audit", payload)["audit"])
        )
    entries = [_entry(host, line) for host, found_lines in answers for line in found_lines]
    return tuple(sorted(entries, key=lambda e: e.at))


def to_json(entries: Sequence[AuditEntry]) -> dict[str, Any]:
    return {"schema": "pdctl.audit/1", "entries": [asdict(e) for e in entries]}


def _entry(host: str, line: dict[str, Any]) -> AuditEntry:
    by = line.get("by") or {}
    return AuditEntry(
        at=float(line.get("at") or 0.0),
        host=host,
        deployment=str(line.get("deployment", "")),
        user=str(by.get("user", "")),
        machine=str(by.get("host", "")),
        pid=int(by.get("pid") or 0),
        version=str(by.get("version", "")),
        command=str(by.get("command", "")),
        do=str(line.get("do", "")),
        service=str(line.get("service", "")),
        result=str(line.get("result", "")),
    )

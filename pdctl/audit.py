"""What was changed in a deployment, by whom: the audit lines of all its hosts, merged by time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdctl.agent import shim_call
from pdctl.errors import PdctlError
from pdctl.find import ANYWHERE, Where, located
from pdctl.fleet import attempt_all
from pdctl.hosts import Host


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


@dataclass(frozen=True, slots=True)
class AuditReport:
    name: str
    entries: tuple[AuditEntry, ...]
    """Oldest first."""
    unreachable: dict[str, str]
    """Host -> why its changes are not among them."""

    def to_json(self) -> dict[str, Any]:
        entries = [asdict(e) for e in self.entries]
        return {"schema": "pdctl.audit/1", "entries": entries, "unreachable": self.unreachable}


def audit(name: str | None, lines: int, where: Where = ANYWHERE) -> AuditReport:
    """The last changes on each host. They are kept after `down`: without a name, of the last
    deployment when there is none now.
    """
    with located(name, where, gone=True) as found:
        payload = {"deployment": found.name, "lines": lines}

        def ask(host: Host) -> list[dict[str, Any]]:
            return list(shim_call(host, "audit", payload)["audit"])

        hosts, lost = found.reachable(), found.lost()
        entries: list[AuditEntry] = []
        for host, told in zip(hosts, attempt_all(hosts, ask, undone=False), strict=True):
            if isinstance(told, PdctlError):
                lost[host.name] = str(told)
            else:
                entries += [_entry(host.name, line) for line in told]
        return AuditReport(found.name, tuple(sorted(entries, key=lambda e: e.at)), lost)


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

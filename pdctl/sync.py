"""Bring the runtime, its packages and the model onto a topology's hosts, ready for `up`.

Each host gets what its roles need, resolved and packed here; nothing is compiled and nothing has to
be installed there but python3. Hosts with a `python:` of their own, and this machine, are left
alone. Every host is tried, whatever happens to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl import models, topology
from pdctl.errors import EXIT_OK, HostsFailed
from pdctl.events import Report
from pdctl.fleet import machines, on_all, opened
from pdctl.sync_host import ROUTER, HostSync, Job, SyncOptions, packed
from pdctl.topology import Topology

AT_ONCE = 8
"""Hosts: each gets hundreds of megabytes from this machine."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    name: str
    hosts: tuple[HostSync, ...]

    @property
    def exit_code(self) -> int:
        errors = [h.error for h in self.hosts if h.error is not None]
        return HostsFailed(errors, len(self.hosts) - len(errors)).exit_code if errors else EXIT_OK

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "pdctl.sync/1",
            "name": self.name,
            "hosts": [
                {
                    "host": h.host,
                    "state": h.state,
                    "code": h.code,
                    "about": h.about,
                    "bytes_sent": h.nbytes,
                    "model": h.model,
                    "error": str(h.error) if h.error else "",
                    "hint": h.error.hint if h.error else "",
                    "seconds": round(h.seconds, 3),
                }
                for h in self.hosts
            ],
        }


def sync(path: Path, options: SyncOptions, report: Report) -> SyncResult:
    """Idempotent. What goes wrong on a host is in the result; a wrong topology is raised."""
    t = topology.load(path).topology
    used = {k: t.hosts[k].address for k in t.used_hosts() if not t.hosts[k].local}
    with opened(used) as hosts, packed(options) as packs:
        files = models.host_files(t.model, path.resolve().parent) if options.model and used else []
        jobs = [
            Job(host, _extras(t, keys), _own_python(t, keys), packs, files, report)
            for host in machines(hosts.values())
            for keys in [[k for k, h in hosts.items() if h is host]]
        ]
        done = on_all(jobs, Job.run, undone=False, at_once=AT_ONCE)
        return SyncResult(t.name, tuple(done))


def _extras(t: Topology, keys: Sequence[str]) -> tuple[str, ...]:
    """Of pdctl's extras, those that the roles on these hosts need. A router needs no torch."""
    groups = [i.group for i in t.instances() if i.host in keys]
    if not groups:
        return ROUTER
    extras = ["runtime"]
    if any(g.devices for g in groups):
        extras.append("cuda12")
    if any(group.transfer == "rdma" for group in t.decode):
        extras.append("rdma")
    return tuple(extras)


def _own_python(t: Topology, keys: Sequence[str]) -> str:
    """An interpreter the user looks after; empty when sync is to do it."""
    return next((p for k in keys if (p := t.hosts[k].python) is not None), "")

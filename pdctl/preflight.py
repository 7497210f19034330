"""Checks before anything starts: ports, shared memory, files, secrets. All problems at once.

Pure but for reading our own environment; the facts come from each host's shim (`probe`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pdctl.errors import PdctlError, UsageError
from pdctl.records import ServiceRecord
from pdctl.services import ServiceSpec
from pdctl.sizes import format_size


def secret_values(services: Iterable[ServiceSpec]) -> dict[str, str]:
    """Values of all variables the services name. Raises UsageError for those that are not set."""
    users: dict[str, list[str]] = {}
    for service in services:
        for name in {*service.secrets, *service.secret_files.values()}:
            users.setdefault(name, []).append(service.name)
    missing = sorted(name for name in users if not os.environ.get(name))
    if missing:
        wants = "; ".join(f"{n} (for {', '.join(users[n])})" for n in missing)
        raise UsageError(
            f"these environment variables are not set: {wants}",
            hint="export them before `pdctl up`, or take them out of the topology",
        )
    return {name: os.environ[name] for name in users}


def probe_request(services: Sequence[ServiceSpec], paths: Collection[str]) -> dict[str, Any]:
    """What to ask the shim of the host on which `services` are to start."""
    ports = [[port, s.bind] for s in services for port in s.ports.values()]
    return {"ports": ports, "paths": sorted({*paths, *(s.argv[0] for s in services)})}


def check_host(
    host: str,
    facts: Mapping[str, Any],
    starting: Sequence[ServiceSpec],
    leaving: Sequence[ServiceRecord],
) -> list[str]:
    """What keeps `starting` from running there. What `leaving` holds now counts as free."""
    problems = [f"{host}: {facts['unwritable']}"] if facts["unwritable"] else []
    problems += [f"{host}: {p} does not exist" for p in facts["missing"]]
    problems += [f"{host}: {p} cannot be read" for p in facts["unreadable"]]
    # Of the services to start, strays of an earlier life may hold a port: the start sweeps them.
    gone = {f"{s.deployment}/{s.name}" for s in starting}
    gone |= {f"{r.deployment}/{r.name}" for r in leaving}
    owners = {port: s.name for s in starting for port in s.ports.values()}
    for port in facts["ports"]:
        if not port["free"] and port.get("service") not in gone:
            problems.append(f"{host}: {owners[port['port']]}: {describe_port(port)}")
    wanted = sum(s.cpu_buffer_bytes for s in starting)
    freed = sum(r.spec.cpu_buffer_bytes for r in leaving if r.spec and r.alive)
    room = facts["shm"]["free"] + freed
    if wanted > room:
        who = ", ".join(s.name for s in starting if s.cpu_buffer_bytes)
        problems.append(
            f"{host}: {who}: cpu_buffer needs {format_size(wanted)} of shared memory, "
            f"/dev/shm has {format_size(room)} free of {format_size(facts['shm']['total'])}"
        )
    return problems


def describe_port(port: Mapping[str, Any]) -> str:
    """A port that cannot be had, and who has it, as far as the host lets us see."""
    where = f"port {port['port']} on {port['bind']}"
    if port.get("service"):
        return f"{where} is used by pdctl's {port['service']} (pid {port['pid']})"
    if "pid" in port:
        return f"{where} is taken by pid {port['pid']} ({port['command']}, user {port['user']})"
    return f"{where}: {port['error']}"


def raise_problems(problems: Sequence[str]) -> None:
    if problems:
        raise PdctlError(
            "\n".join(problems),
            hint="nothing was started; free what is taken, or change the topology",
        )

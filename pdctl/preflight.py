"""Checks before anything starts: ports, memory, files, versions, secrets. All problems at once.

Pure but for reading our own environment; the facts come from each host's shim (`probe`).
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl import __version__
from pdctl.errors import PdctlError, UsageError
from pdctl.records import ServiceRecord
from pdctl.services import ServiceSpec
from pdctl.shim.rotated import digest
from pdctl.shim.synced import CODE
from pdctl.sizes import format_size, listed
from pdctl.topology import Host as HostEntry

UNSYNCED_PYTHON = f"{CODE}/current/venv/bin/python"
"""Below a host's base; named for a host on which nothing was synced yet."""
NOT_HERE = os.strerror(errno.EADDRNOTAVAIL)
FREE_IT = "free what is taken, or change the topology"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps services from running on a host."""

    host: str
    what: str
    do: str = ""
    taken: bool = False
    """Something else has what they need: FREE_IT is what to do."""

    def __str__(self) -> str:
        return f"{self.host}: {self.what}" + (f": {self.do}" if self.do else "")


def sync_command(path: Path, *, model: bool) -> str:
    """What brings a host all that it lacks."""
    return f"pdctl sync {shlex.quote(str(path))}" + (" --model" if model else "")


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


def secret_digests(services: Iterable[ServiceSpec]) -> dict[str, Any]:
    """What to add to a `probe`, to hear which of them have another value of a secret than we.

    Without the variables that are not set here: what runs goes on without them.
    """
    key = secrets.token_hex(32)
    digests: dict[str, dict[str, str]] = {}
    for service in services:
        for name in {*service.secrets, *service.secret_files.values()}:
            if value := os.environ.get(name):
                digests.setdefault(service.name, {})[name] = digest(key, value)
    return {"secrets": {"key": key, "digests": digests}} if digests else {}


def runtime_python(entry: HostEntry, base: str, probe: Mapping[str, Any]) -> str:
    """The interpreter that services of a host run: the topology's, else on another host the one
    that `sync` put there, else our own."""
    if entry.python is not None:
        return entry.python
    if entry.local:
        return sys.executable
    return str(probe["code"]["python"]) if probe.get("code") else f"{base}/{UNSYNCED_PYTHON}"


def probe_request(services: Sequence[ServiceSpec], models: Collection[str]) -> dict[str, Any]:
    """What to ask the shim of the host on which `services` are to start.

    `models`: the places where it may have the model.
    """
    ports = [[port, s.bind] for s in services for port in s.ports.values()]
    pythons = sorted({s.argv[0] for s in services})
    systemd = any(s.supervisor == "systemd" for s in services)
    return {"ports": ports, "models": list(models), "pythons": pythons, "systemd": systemd}


def check_host(
    host: str,
    facts: Mapping[str, Any],
    starting: Sequence[ServiceSpec],
    leaving: Sequence[ServiceRecord],
) -> list[Obstacle]:
    """What keeps `starting` from running there. What `leaving` holds now counts as free."""
    found = [Obstacle(host, facts["unwritable"])] if facts["unwritable"] else []
    found += [Obstacle(host, f"{p} does not exist") for p in facts["missing"]]
    found += [Obstacle(host, f"{p} cannot be read") for p in facts["unreadable"]]
    if facts["systemd"]:
        found.append(Obstacle(host, f"supervisor: systemd: {facts['systemd']}"))
    # Of the services to start, strays of an earlier life may hold a port: the start sweeps them.
    gone = {f"{s.deployment}/{s.name}" for s in starting}
    gone |= {f"{r.deployment}/{r.name}" for r in leaving}
    owners = {port: s.name for s in starting for port in s.ports.values()}
    for port in facts["ports"]:
        if not port["free"] and port.get("service") not in gone:
            what = f"{owners[port['port']]}: {describe_port(port)}"
            found.append(Obstacle(host, what, taken="pid" in port))
    wanted = sum(s.cpu_buffer_bytes for s in starting)
    freed = sum(r.spec.cpu_buffer_bytes for r in leaving if r.spec and r.alive)
    room = facts["shm"]["free"] + freed
    if wanted > room:
        who = listed([s.name for s in starting if s.cpu_buffer_bytes])
        what = (
            f"{who}: cpu_buffer needs {format_size(wanted)} of shared memory, "
            f"/dev/shm has {format_size(room)} free of {format_size(facts['shm']['total'])}"
        )
        found.append(Obstacle(host, what, taken=True))
    return found


def no_model(host: str, model: str, sync: str) -> Obstacle:
    return Obstacle(host, f"model {model} is not there", f"run `{sync}`")


def check_versions(
    host: str, facts: Mapping[str, Any], starting: Sequence[ServiceSpec], code: str, sync: str
) -> list[Obstacle]:
    """What is wrong with the interpreters there; `code` is the fingerprint of our own runtime,
    `sync` the command that brings it.
    """
    compute = {s.argv[0] for s in starting if s.role != "router"}
    obstacles = []
    for python, found in facts["versions"].items():
        synced = f"/{CODE}/" in python
        own = f"install pdctl {__version__} for it, or leave out `python:` and run `{sync}`"
        fix = f"run `{sync}`" if synced else own
        ours = f"{__version__} (code {code})"
        what = ""
        if found.get("error") == "does not exist" and synced:
            what = f"has no runtime yet, this pdctl is {ours}"
        elif "error" in found:
            what = f"{python} {found['error']}"
        elif not found["code"]:
            what = f"{python} has no runtime, this pdctl is {ours}"
        elif found["code"] != code:
            theirs = f"{found['runtime'] or 'unknown'} (code {found['code']})"
            what = f"its runtime is {theirs}, this pdctl is {ours}"
        elif python in compute and found["native"]:
            what = f"runtime._native cannot be loaded ({found['native']})"
        if what:
            obstacles.append(Obstacle(host, what, fix))
    return obstacles


def differing_versions(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Host -> what `versions.report` told there. A line for each package that is not alike."""
    notes = []
    for key in ("python", "torch"):
        users: dict[str, list[str]] = {}
        for host, found in sorted(hosts.items()):
            if found.get(key):
                users.setdefault(found[key], []).append(host)
        if len(users) > 1:
            each = ", ".join(f"{v} on {' and '.join(names)}" for v, names in users.items())
            notes.append(f"{key} differs between hosts: {each}")
    return notes


def describe_port(port: Mapping[str, Any]) -> str:
    """A port that cannot be had, and who has it, as far as the host lets us see."""
    where = f"port {port['port']} on {port['bind']}"
    if port.get("service"):
        return f"{where} is used by pdctl's {port['service']} (pid {port['pid']})"
    if "pid" in port:
        return f"{where} is taken by pid {port['pid']} ({port['command']}, user {port['user']})"
    if port["error"] == NOT_HERE:
        return f"{where}: the host does not have this address"
    return f"{where}: {port['error']}"


def raise_obstacles(obstacles: Sequence[Obstacle], path: Path) -> None:
    """`path`: the topology."""
    if obstacles:
        more = f"`pdctl doctor {shlex.quote(str(path))}` says more"
        do = FREE_IT if any(o.taken for o in obstacles) else more
        raise PdctlError("\n".join(map(str, obstacles)), hint=f"nothing was started; {do}")

"""Everything about a deployment on this host that helps to find out what went wrong, redacted.

Only reads. What is private is taken out here, before anything is sent.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

from . import deployment, facts, redact
from .files import checked, read_json
from .logs import last_log
from .ports import listeners
from .probe import shm_room
from .procs import boot_id
from .service import Service, service_names

LOG_BYTES = 1 << 20
OLD_LOG_BYTES = 256 << 10
AUDIT_BYTES = 256 << 10
GPU_TIMEOUT_S = 10.0
RECORDS = ("spec.json", "identity.json", "exit.json", "family.json")


def collect(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Per service: file name -> text; then the audit and facts of the host."""
    name = checked(request["deployment"])
    services = [Service(base, name, n) for n in service_names(base, name)]
    values: set[str] = set()
    for service in services:
        values |= _private(service)
    known = redact.document(deployment.known(base, name))
    audit = _end_of(os.path.join(base, ".audit", name + ".log"), AUDIT_BYTES)
    return {
        "services": {s.name: _files(s, values) for s in services},
        "known": redact.text(json.dumps(known, indent=1), values),
        "audit": redact.text(audit or "", values),
        "facts": _host(base),
    }


def _private(service: Service) -> set[str]:
    """Values of this service that nobody else may see."""
    values = redact.private_values(read_json(service.path("env")), service.spec.get("secrets", ()))
    for name in ("token", *service.spec.get("secret_files", {})):
        found = _end_of(service.path(name), LOG_BYTES) or ""
        values |= redact.private_values({name: found}, [name])
    return values


def _files(service: Service, values: Iterable[str]) -> dict[str, str]:
    files = {n: _end_of(service.path(n), LOG_BYTES) for n in RECORDS}
    files.update((n, _end_of(service.path(n), LOG_BYTES)) for n in service.spec.get("files", {}))
    files["out.log"] = _end_of(service.path("out.log"), LOG_BYTES)
    files["out.log.1"] = _end_of(service.path("out.log.1"), OLD_LOG_BYTES)
    files["last.out.log"] = _end_of(last_log(service), OLD_LOG_BYTES)
    env = redact.environment(read_json(service.path("env")), service.spec.get("secrets", ()))
    files["env.json"] = json.dumps(env, indent=1)
    if service.spec:
        record = redact.document(read_json(service.path("spec.json")))
        files["spec.json"] = json.dumps(record, indent=1)
    return {n: redact.text(found, values) for n, found in files.items() if found is not None}


def _end_of(path: str, limit: int) -> str | None:
    """The last `limit` bytes of a file, from the start of a line; None: there is no such file."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - limit))
            found = f.read().decode(errors="replace")
    except OSError:
        return None
    # Half a line may hold half a secret, which no value would match.
    return found.partition("\n")[2] if size > limit else found


def _host(base: str) -> dict[str, Any]:
    """What `doctor` asks too, and what is going on there now."""
    return {
        **facts.facts(base, {}),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "boot_id": boot_id(),
        "uptime_s": float((_end_of("/proc/uptime", LOG_BYTES) or "0").split()[0]),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "memory": (_end_of("/proc/meminfo", LOG_BYTES) or "").splitlines()[:5],
        "shm": shm_room(),
        "listening": sorted({port for _, port in listeners()}),
        "nvidia_smi": _nvidia_smi(),
    }


def _nvidia_smi() -> str:
    """As it prints: it names the processes that hold memory."""
    try:
        found = subprocess.run(
            ["nvidia-smi"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=GPU_TIMEOUT_S,
        )
    except FileNotFoundError:
        return "no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return found.stdout.decode(errors="replace")

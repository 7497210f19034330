"""Look at services of this host and change nothing: records, logs, the token."""

from __future__ import annotations

import os
from typing import Any

from . import deployment as deployments
from . import lock
from .files import checked
from .procs import marked
from .service import Service, deployment_names, service_names


def tails(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Last lines by service (None: all). `.last` answers for those that are not here any more."""
    deployment, names = request["deployment"], request.get("services")
    if names is None:
        kept = os.path.join(".last", checked(deployment))
        suffix = ".out.log"
        last = [n[: -len(suffix)] for n in service_names(base, kept) if n.endswith(suffix)]
        names = service_names(base, deployment) or last
    logs = {n: tail(Service(base, deployment, n), int(request["lines"])) for n in names}
    return {"logs": {n: lines for n, lines in logs.items() if lines is not None}}


def tail(service: Service, lines: int) -> list[str] | None:
    """The last lines of the log, also when only `.last` has it; None: neither. Reads no more."""
    base, deployment = os.path.split(os.path.dirname(service.dir))
    last = os.path.join(base, ".last", deployment, service.name + ".out.log")
    path = service.path("out.log") if os.path.exists(service.path("out.log")) else last
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            start = max(0, size - max(65536, 256 * lines))
            f.seek(start)
            found = f.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    if start and found:
        del found[0]  # cut somewhere in the middle
    return found[-lines:] if lines else []


def token(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """The deployment's token while anything of it runs; None: the next `up` makes a fresh one."""
    for name in service_names(base, request["deployment"]):
        service = Service(base, request["deployment"], name)
        if service.live():
            try:
                with open(service.path("token")) as f:
                    return {"token": f.read().strip() or None}
            except FileNotFoundError:
                continue
    return {"token": None}


def status(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Services of one deployment, or of all, and what is known of each deployment as a whole.

    `scan` looks for strays too, in all of /proc.
    """
    wanted = request.get("deployment")
    names = deployment_names(base) if wanted is None else [wanted]
    found = []
    for name in names:
        marks = marked(os.path.join(base, name)) if request.get("scan", True) else None
        known = service_names(base, name)
        found += [Service(base, name, n).describe(marks) for n in known]
    return {
        "services": found,
        "deployments": {n: deployments.known(base, n) for n in names},
        "locks": {n: lock.holder(base, n) for n in names},
    }

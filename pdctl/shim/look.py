"""Look at services of this host and change nothing: records, locks, the token."""

from __future__ import annotations

import os

from . import deployment as deployments
from . import lock
from .procs import marked
from .service import Service, deployment_names, service_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


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

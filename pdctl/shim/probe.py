"""What a host has room for: ports, shared memory, files, interpreters. Changes nothing."""

from __future__ import annotations

import glob
import os

from . import interpreters, ports
from .synced import current, model_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SHM = "/dev/shm"


def probe(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Answers for the wanted `ports` ([port, address]), `paths`, `pythons` (interpreters) and the
    state directory. `models`: places where a model may be, of which the first that is there counts.
    `busy`: whether to look which ports others have, in tables that may be long. `secrets`: digests
    of those that services of `deployment` should have (see `rotated`).
    """
    place = model(request.get("models", []))
    paths = [*request.get("paths", []), *filter(None, [place])]
    return {
        "ports": [ports.port(base, int(number), bind) for number, bind in request.get("ports", [])],
        "busy": ports.busy() if request.get("busy") else [],
        "shm": shm_room(),
        "missing": [p for p in paths if not os.path.exists(p)],
        "unreadable": [p for p in paths if os.path.exists(p) and not os.access(p, os.R_OK)],
        "unwritable": unwritable(base),
        "code": current(base),
        "versions": {p: interpreters.ask(p) for p in request.get("pythons", [])},
        "model": place,
        "systemd": _why_no_systemd() if request.get("systemd") else "",
        "rotated": _rotated(base, request) if "secrets" in request else {},
    }


def _rotated(base: str, request: dict[str, Any]) -> dict[str, list[str]]:
    from . import rotated  # few have secrets

    return rotated.rotated(base, request)


def _why_no_systemd() -> str:
    from . import systemd  # few want it

    return systemd.why_not()


def model(places: list[str]) -> str:
    """The first of the places that exists. `{models}` and `{hub}` are caches; `*` is any name."""
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    for place in places:
        path = place.replace("{models}", model_cache()).replace("{hub}", hub)
        for found in sorted(glob.glob(path)) if "*" in place else [path]:
            # A folder is whole when it has its configuration: `sync` sends that last.
            if os.path.isfile(found) or os.path.isfile(os.path.join(found, "config.json")):
                return found
    return ""


def shm_room() -> dict[str, int]:
    try:
        room = os.statvfs(SHM)
    except OSError:
        return {"free": 0, "total": 0}
    return {"free": room.f_bavail * room.f_frsize, "total": room.f_blocks * room.f_frsize}


def unwritable(base: str) -> str:
    """Why nothing can be written below `base`; empty when it can."""
    where = base
    while not os.path.lexists(where):
        where = os.path.dirname(where)
    if not os.path.isdir(where):
        return f"{where}: Not a directory"
    if not os.access(where, os.W_OK | os.X_OK):
        return f"{where}: Permission denied"
    return ""

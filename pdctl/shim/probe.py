"""What a host has room for: ports, shared memory, files, interpreters. Changes nothing.

Finds who holds a port as far as /proc shows it, and whether that is a service of pdctl.
"""

from __future__ import annotations

import errno
import glob
import os
import pwd
import socket
from typing import Any

from . import provision, systemd, versions
from .procs import marker_of
from .store import model_cache

SHM = "/dev/shm"


def probe(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Answers for the wanted `ports` ([port, address]), `paths`, `pythons` (interpreters) and the
    state directory. `models`: places where a model may be, of which the first that is there counts.
    """
    place = model(request.get("models", []))
    paths = [*request.get("paths", []), *filter(None, [place])]
    return {
        "ports": [port(base, int(number), bind) for number, bind in request.get("ports", [])],
        "listening": sorted({number for _, number in _listeners()}),
        "shm": shm_room(),
        "missing": [p for p in paths if not os.path.exists(p)],
        "unreadable": [p for p in paths if os.path.exists(p) and not os.access(p, os.R_OK)],
        "unwritable": unwritable(base),
        "code": provision.current(base),
        "versions": {p: versions.ask(p) for p in request.get("pythons", [])},
        "model": place,
        "systemd": systemd.why_not() if request.get("systemd") else "",
    }


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


def port(base: str, number: int, bind: str) -> dict[str, Any]:
    """Whether a server could listen there now, and who does when not."""
    answer: dict[str, Any] = {"port": number, "bind": bind, "free": True, "error": ""}
    try:
        found = socket.getaddrinfo(
            bind or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(1)
    except OSError as e:
        answer.update(free=False, error=e.strerror or str(e))
        if e.errno == errno.EADDRINUSE:
            answer.update(_holder(base, number))
    return answer


def _holder(base: str, number: int) -> dict[str, Any]:
    """pid, user, command and service of who listens; what /proc does not show to us is left out."""
    inodes = {inode for inode, listening in _listeners() if listening == number}
    for name in os.listdir("/proc"):
        if name.isdigit() and _has_socket(name, inodes):
            return _describe(base, int(name))
    return {}


def _listeners() -> list[tuple[str, int]]:
    """Socket inode and port of everything that listens on TCP here."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}") as f:
                rows = [line.split() for line in list(f)[1:]]
        except OSError:
            continue  # a kernel without IPv6
        listening = (row for row in rows if row[3] == "0A")
        found += [(f"socket:[{r[9]}]", int(r[1].rsplit(":", 1)[1], 16)) for r in listening]
    return found


def _has_socket(pid: str, inodes: set[str]) -> bool:
    try:
        for handle in os.listdir(f"/proc/{pid}/fd"):
            try:
                if os.readlink(f"/proc/{pid}/fd/{handle}") in inodes:
                    return True
            except OSError:
                continue  # closed meanwhile
    except OSError:
        pass  # gone, or another user's
    return False


def _describe(base: str, pid: int) -> dict[str, Any]:
    try:
        with open(f"/proc/{pid}/comm") as f:
            command = f.read().strip()
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return {}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    where = marker_of(pid) or ""
    ours = os.path.relpath(where, base) if where.startswith(base + "/") else None
    return {"pid": pid, "command": command, "user": user, "service": ours}


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

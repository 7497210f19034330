"""TCP ports of this host: whether one is free, and who holds it, as far as /proc shows it to us."""

from __future__ import annotations

import errno
import os
import pwd
import socket
from typing import Any

from .procs import marker_of


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
    inodes = {inode for inode, listening in listeners() if listening == number}
    for name in os.listdir("/proc"):
        if name.isdigit() and _has_socket(name, inodes):
            return _describe(base, int(name))
    return {}


def listeners() -> list[tuple[str, int]]:
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

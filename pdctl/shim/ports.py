"""TCP ports of this host: whether one is free, who holds it, and who is about to.

Between a plan and the moment when its service listens another deployment may be planned, also one
of another user. So a port is claimed first, by an abstract Unix socket of a name made from it: the
kernel gives each name once a network, shows it to everybody, and frees it with the last process.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
from collections.abc import Iterable

from .procs import marker_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CLAIM = "pdctl/port/"
_claimed: dict[int, socket.socket] = {}
"""By this process, for as long as it lives."""


def port(base: str, number: int, bind: str) -> dict[str, Any]:
    """Whether a server could listen there now, and who does when not."""
    answer: dict[str, Any] = {"port": number, "bind": bind, "free": True, "error": ""}
    try:
        # As bytes: for text, python loads its tables of international names.
        host = bind.encode() or None
        found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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


def claim(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Claim `ports` until our end. `refused`: those that somebody listens on or has claimed."""
    wanted = [int(number) for number in request["ports"]]
    return {"refused": [n for n in wanted if not (_claim(n) and port(base, n, "")["free"])]}


def handles(numbers: Iterable[int]) -> list[int]:
    """Claims of these ports, to pass on; of those that could be had. One who wants another's port
    learns it when it listens."""
    return [_claimed[n].fileno() for n in numbers if _claim(n)]


def _claim(number: int) -> bool:
    if number in _claimed:
        return True
    s = socket.socket(socket.AF_UNIX)
    try:
        s.bind(f"\0{_CLAIM}{number}")
    except OSError:
        s.close()
        return False
    _claimed[number] = s
    return True


def busy() -> list[int]:
    """Ports on which somebody listens, or which somebody has claimed, we too."""
    return sorted({number for _, number in listeners()} | _claims())


def _claims() -> set[int]:
    with open("/proc/net/unix") as f:
        names = (line.rpartition(f" @{_CLAIM}")[2].strip() for line in f if f" @{_CLAIM}" in line)
        return {int(name) for name in names if name.isdigit()}


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

"""Processes of a host: who they are, whether they live, how to signal one and no other.

Owns identity (pid, start ticks, boot id) and the walks through /proc. Knows no files of pdctl.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Collection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARKER = "PDCTL_SERVICE"
"""Environment variable of every supervised process: its service's directory."""


class Proc:
    """`ticks`: start time since boot; with pid and boot id it names one process for ever."""

    __slots__ = ("pid", "ppid", "ticks")

    def __init__(self, pid: int, ppid: int, ticks: int) -> None:
        self.pid, self.ppid, self.ticks = pid, ppid, ticks


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def proc(pid: int) -> Proc | None:
    """The process, or None when it is gone or a zombie: a zombie holds nothing and runs nothing."""
    try:
        stat = _contents(f"/proc/{pid}/stat")
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name in front may hold anything
    if fields[0] in (b"Z", b"X"):
        return None
    return Proc(pid, int(fields[1]), int(fields[19]))


def _contents(path: str) -> bytes:
    """Without a file object: walks through /proc read very many of them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        pieces = [os.read(handle, 65536)]
        while pieces[-1]:
            pieces.append(os.read(handle, 65536))
        return b"".join(pieces)
    finally:
        os.close(handle)


def identity(pid: int) -> dict[str, int]:
    found = proc(pid)
    return {"pid": pid, "start_ticks": found.ticks if found else 0}


def is_alive(record: Any, boot: str) -> bool:
    """Whether the very process of an identity record lives: a reused pid or a reboot means no, and
    so does what is no such record."""
    if not is_identity(record) or boot != boot_id():
        return False
    found = proc(record["pid"])
    return found is not None and found.ticks == record["start_ticks"]


def is_identity(record: Any) -> bool:
    return isinstance(record, dict) and all(
        isinstance(record.get(key), int) for key in ("pid", "start_ticks")
    )


def uptime_s(ticks: int) -> float:
    with open("/proc/uptime") as f:
        up = float(f.read().split()[0])
    return round(max(0.0, up - ticks / os.sysconf("SC_CLK_TCK")), 2)


def send(pid: int, ticks: int, sig: int) -> bool:
    """Signal the process with this identity and no other. False: it is gone."""
    handle = None
    try:
        if hasattr(os, "pidfd_open"):
            try:
                handle = os.pidfd_open(pid)
            except OSError as e:
                if e.errno == errno.ESRCH:
                    return False
        # With a pidfd taken before this look, the pid cannot come to mean another process after it.
        found = proc(pid)
        if found is None or found.ticks != ticks:
            return False
        if handle is not None:
            signal.pidfd_send_signal(handle, sig)
        else:
            os.kill(pid, sig)
        return True
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(roots: Collection[Proc]) -> list[Proc]:
    """Live processes below `roots` (which are not among them), parents before children.

    A root whose pid has come to mean another meanwhile has none: they would be a stranger's.
    """
    if not roots:
        return []  # without a walk: asked of every service that is gone
    alive = {p.pid: p for p in filter(None, map(proc, _pids()))}
    children: dict[int, list[Proc]] = {}
    for p in alive.values():
        children.setdefault(p.ppid, []).append(p)
    below: list[Proc] = []
    level = [p.pid for p in roots if p.pid in alive and alive[p.pid].ticks == p.ticks]
    own = {p.pid for p in roots}
    while level:
        found = [p for pid in level for p in children.get(pid, ()) if p.pid not in own]
        below += found
        level = [p.pid for p in found]
    return below


def own_family() -> list[Proc]:
    """Our descendants."""
    me = proc(os.getpid())
    return descendants([me]) if me else []


def own_children() -> list[Proc] | None:
    """Our descendants by the kernel's child lists, without a walk of /proc; None: it has none."""
    below: list[Proc] = []
    level = [os.getpid()]
    while level:
        pids: list[int] = []
        for pid in level:
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as f:
                        pids += map(int, f.read().split())
            except OSError:
                if pid == os.getpid():
                    return None
        below += [p for p in map(proc, pids) if p]
        level = pids
    return below


def marked(under: str) -> dict[str, list[Proc]]:
    """Live processes of our uid whose environment names a service directory at or below `under`."""
    lineage: set[int] = set()
    ancestor = proc(os.getpid())
    while ancestor:  # a pdctl that runs inside of a service must not find itself
        lineage.add(ancestor.pid)
        ancestor = proc(ancestor.ppid)
    found: dict[str, list[Proc]] = {}
    for pid in _pids():
        where = None if pid in lineage else marker_of(pid)
        if where and (where + "/").startswith(under.rstrip("/") + "/"):
            p = proc(pid)
            if p and marker_of(pid) == where:  # still: the pid was not another's in between
                found.setdefault(where, []).append(p)
    return found


def marker_of(pid: int) -> str | None:
    try:
        # First, for it tells nearly all apart. It starts with the first variable: no NUL before it.
        environment = b"\0" + _contents(f"/proc/{pid}/environ")
        _, mark, rest = environment.partition(b"\0%s=" % MARKER.encode())
        if not mark or os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return None
        if not os.path.samefile(f"/proc/{pid}/root", "/"):
            return None  # in a container: the same path is another directory there
        return os.fsdecode(rest.partition(b"\0")[0])
    except OSError:
        pass  # gone, or not ours to read
    return None

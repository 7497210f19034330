"""Which process writes: pid, start ticks and boot id, and the proof that it is dead.

Reads /proc only; never signals anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    num_threads: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may itself hold spaces and parentheses: count from its end.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], num_threads=int(fields[17]), start_ticks=int(fields[19]))


def own_identity() -> ProcessIdentity:
    pid = os.getpid()
    stat = _stat(pid)
    assert stat is not None
    return ProcessIdentity(pid, stat.start_ticks, _BOOT_ID.read_text().strip())


def seen_alive(identity: ProcessIdentity) -> bool:
    """This very process runs, and is visible from here (same boot, same pid namespace)."""
    return _BOOT_ID.read_text().strip() == identity.boot_id and not _gone(identity)


def proven_dead(identity: ProcessIdentity) -> bool:
    """It can execute nothing any more. Only meaningful for one that `seen_alive` was once true for:

    another container's process is not visible at all, and not being visible proves nothing.
    """
    return _gone(identity)


def _gone(identity: ProcessIdentity) -> bool:
    stat = _stat(identity.pid)
    if stat is None or stat.start_ticks != identity.start_ticks:
        return True
    # A zombie leader whose other threads still run is not dead.
    return stat.state in "ZX" and stat.num_threads <= 1

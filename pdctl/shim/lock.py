"""The right to change one deployment on this host, who has it, and how to take it away.

A flock held by the shim of a running pdctl, so it dies with its holder. Only when the network broke
without a word can a holder outlast its pdctl: then `break_lock` ends that one shim, by identity.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time

from .files import Refused, checked, private_dir, read_json
from .procs import boot_id, identity, is_alive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

POLL_S = 0.05
TERM_S = 1.0
KILL_S = 5.0


class DeploymentLock:
    def __init__(self, base: str, deployment: str) -> None:
        os.makedirs(base, 0o700, exist_ok=True)
        private_dir(os.path.join(base, ".locks"))
        self.path = _path(base, deployment)
        self._handle = -1

    def take(self, by: dict[str, Any], wait_s: float) -> None:
        """Raises Refused (kind locked), naming the holder, when not had within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= deadline:
                found = read_json(self.path)
                raise Refused("locked", f"locked by {described(found)}", holder=found)
            time.sleep(POLL_S)
        known = {"by": by, "since": time.time(), "boot_id": boot_id()}
        text = json.dumps({**known, "shim": identity(os.getpid())})
        with contextlib.suppress(OSError):  # on a full disk the lock still holds, without a name
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)

    def _try(self) -> bool:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder removes the file: a lock on a removed one would exclude nobody.
            if os.fstat(handle).st_nlink:
                self._handle = handle
                return True
        except OSError:
            pass
        os.close(handle)
        return False

    def release(self) -> None:
        if self._handle >= 0:
            os.unlink(self.path)
            os.close(self._handle)
            self._handle = -1


def described(found: dict[str, Any]) -> str:
    by = found.get("by")
    if not isinstance(by, dict):
        return "an unknown holder"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.get("since", 0)))
    who = f"{by.get('user')}@{by.get('host')}, pid {by.get('pid')}"
    return f"`pdctl {by.get('command')}` of {who}, since {since} UTC"


def holder(base: str, deployment: str) -> dict[str, Any] | None:
    """Who holds the lock now; None: nobody."""
    path = _path(base, deployment)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        found = read_json(path)
        return {**found, "text": described(found), "age_s": time.time() - found.get("since", 0)}
    finally:
        os.close(handle)
    return None


def break_lock(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """End the shim that was shown to hold the lock (`shim`: its identity), and no other."""
    deployment = request["deployment"]
    now = holder(base, deployment)
    if now is None:
        return {"broken": False}
    known, boot = now.get("shim"), now.get("boot_id", "")
    if not known or not is_alive(known, boot):
        raise Refused("state", "the lock does not say which process holds it", _LOOK)
    if known != request["shim"]:
        raise Refused("state", f"the lock has changed hands: now {now['text']}", _LOOK)
    for sig, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        send(known["pid"], known["start_ticks"], sig)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not is_alive(known, boot):
                _sweep(base, deployment, request)
                return {"broken": True, "holder": now}
            time.sleep(POLL_S)
    raise Refused("state", f"its process {known['pid']} does not end")


_LOOK = "see `pdctl lock show`"


def _sweep(base: str, deployment: str, request: dict[str, Any]) -> None:
    """Remove the dead holder's file, unless the next one has it already."""
    lock = DeploymentLock(base, deployment)
    with contextlib.suppress(Refused):
        lock.take(request.get("by", {}), 0.0)
        lock.release()


def _path(base: str, deployment: str) -> str:
    return os.path.join(base, ".locks", checked(deployment))

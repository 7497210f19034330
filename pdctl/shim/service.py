"""One service's directory on this host, and what is true of it now.

spec.json      the wanted state, its hash, and who asked for it: written before anything starts
identity.json  pids and start ticks, boot id: written before the service's program runs
family.json    the descendants seen last, for the day their supervisor is killed
exit.json      how the service ended
lock           held by the supervisor while it lives
env, token, out.log, out.log.1, and the files of the spec
"""

from __future__ import annotations

import fcntl
import glob
import os

from .files import NAME, checked, read_json
from .procs import Proc, boot_id, descendants, is_alive, uptime_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OWN_FILES = frozenset(
    ("spec.json", "identity.json", "family.json", "exit.json", "stop.json", "lock", "env", "token")
)


def names_in(folder: str) -> list[str]:
    """Of what is there and not hidden; none in what is no folder."""
    try:
        return sorted(n for n in os.listdir(folder) if NAME.match(n))
    except (FileNotFoundError, NotADirectoryError):
        return []


def service_names(base: str, deployment: str) -> list[str]:
    """Folders with a record of ours. What else somebody put there is none of our business."""
    folder = os.path.join(base, deployment)
    return [n for n in names_in(folder) if not OWN_FILES.isdisjoint(names_in(f"{folder}/{n}"))]


def deployment_names(base: str) -> list[str]:
    return [n for n in names_in(base) if service_names(base, n)]


class Service:
    """Reads the records when made; what lives is looked up on every call."""

    def __init__(self, base: str, deployment: str, name: str) -> None:
        self.deployment, self.name = checked(deployment), checked(name)
        self.dir = os.path.join(base, self.deployment, self.name)
        record = read_json(self.path("spec.json"))
        self.spec: dict[str, Any] = record.get("spec") or {}
        self.hash: str = record.get("hash") or ""
        self.intent: dict[str, Any] = record.get("intent") or {}

    def path(self, name: str) -> str:
        return os.path.join(self.dir, name)

    @property
    def in_systemd(self) -> bool:
        """Its supervisor is in a scope of the user's systemd: see `systemd`."""
        return self.spec.get("supervisor") == "systemd"

    def held(self) -> bool:
        """Whether a supervisor, or a start under way, holds the directory's lock."""
        try:
            handle = os.open(self.path("lock"), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def identity(self) -> dict[str, Any]:
        return read_json(self.path("identity.json"))

    def live(self) -> dict[str, Proc]:
        """`shim` and `service`, each only when verified alive."""
        known = self.identity()
        boot = known.get("boot_id", "")
        return {
            part: Proc(known[part]["pid"], 0, known[part]["start_ticks"])
            for part in ("shim", "service")
            if is_alive(known.get(part), boot)
        }

    def kin(self, marks: dict[str, list[Proc]]) -> dict[int, Proc]:
        """Every live process of this service: recorded, in `marks`, or below one of those."""
        boot = self.identity().get("boot_id", "")
        found = {p.pid: p for p in self.live().values()}
        found.update((p.pid, p) for p in marks.get(self.dir, ()))
        for pid, ticks in read_json(self.path("family.json")).get("members", ()):
            if is_alive({"pid": pid, "start_ticks": ticks}, boot):
                found[pid] = Proc(pid, 0, ticks)
        found.update((p.pid, p) for p in descendants(found.values()))
        return found

    def state(self) -> str:
        """starting, running, exited, lost (died unrecorded), or never-started."""
        live = self.live()
        if "service" in live:
            return "running"
        if os.path.exists(self.path("exit.json")):
            return "exited"
        known = self.identity()
        if "shim" in live or (not known and self.held()):
            return "starting"
        return "lost" if known else "never-started"

    def describe(self, marks: dict[str, list[Proc]] | None) -> dict[str, Any]:
        """All of it as JSON. Without `marks` it looks for no strays: cheap enough to poll."""
        live, known = self.live(), self.identity()
        kin = self.kin(marks) if marks is not None and not live else {}
        return {
            "deployment": self.deployment,
            "service": self.name,
            "dir": self.dir,
            "spec": self.spec,
            "hash": self.hash,
            "intent": self.intent,
            "state": self.state(),
            "supervised": "shim" in live,
            "identity": known or None,
            "rebooted": bool(known) and known.get("boot_id") != boot_id(),
            "exit": read_json(self.path("exit.json")) or None,
            "uptime_s": uptime_s(live["service"].ticks) if "service" in live else None,
            "strays": sorted(kin),
        }

    def unlink_segments(self) -> list[str]:
        """Remove this service's shared memory segments. Only when nothing of it lives."""
        prefix = self.spec.get("shm_prefix") or ""
        if not prefix or "/" in prefix:
            return []
        gone = []
        for path in glob.glob(f"/dev/shm/{glob.escape(prefix)}.*"):
            try:
                if os.lstat(path).st_uid == os.getuid():
                    os.unlink(path)
                    gone.append(os.path.basename(path))
            except FileNotFoundError:
                pass
        return gone

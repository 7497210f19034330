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
from .procs import Proc, boot_id, descendants, is_alive, is_identity, uptime_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OWN_FILES = frozenset(
    ("spec.json", "identity.json", "family.json", "exit.json", "stop.json", "lock", "env", "token")
)


# At least one is there from before the start until the folder is gone.
_RECORDS = frozenset(("spec.json", "identity.json", "lock"))
_PARTS = ("shim", "service")


def names_in(folder: str) -> list[str]:
    """Of what is there and not hidden; none in what is no folder."""
    try:
        return sorted(n for n in os.listdir(folder) if NAME.match(n))
    except (FileNotFoundError, NotADirectoryError):
        return []


def service_names(base: str, deployment: str) -> list[str]:
    """Folders with a record of ours. What else somebody put there is none of our business: a link,
    a copy of a service's folder, or notes of theirs."""
    folder = os.path.join(base, deployment)
    return [n for n in names_in(folder) if _is_ours(os.path.join(folder, n), deployment, n)]


def _is_ours(folder: str, deployment: str, name: str) -> bool:
    if os.path.islink(folder) or _RECORDS.isdisjoint(names_in(folder)):
        return False
    spec = _spec(read_json(os.path.join(folder, "spec.json")).get("spec"))
    return not spec or (spec.get("deployment"), spec.get("name")) == (deployment, name)


def _spec(found: Any) -> dict[str, Any]:
    """{} for what is none: whoever damaged a record, what it was of can still be stopped."""
    if not isinstance(found, dict):
        return {}
    kinds: dict[str, Any] = {"argv": list, "secrets": list}
    kinds.update(dict.fromkeys(("ports", "files", "secret_files"), dict))
    texts = ("deployment", "name", "host", "bind", "shm_prefix", "supervisor")
    kinds.update(dict.fromkeys(texts, str))
    if any(not isinstance(found.get(key, kind()), kind) for key, kind in kinds.items()):
        return {}
    return found if all(isinstance(port, int) for port in found.get("ports", {}).values()) else {}


def deployment_names(base: str) -> list[str]:
    return [n for n in names_in(base) if service_names(base, n)]


class Service:
    """Reads the records when made; what lives is looked up on every call."""

    def __init__(self, base: str, deployment: str, name: str) -> None:
        self.deployment, self.name = checked(deployment), checked(name)
        self.dir = os.path.join(base, self.deployment, self.name)
        record = read_json(self.path("spec.json"))
        self.spec = _spec(record.get("spec"))
        self.hash = found if isinstance(found := record.get("hash"), str) else ""
        self.intent: dict[str, Any] = (
            found if isinstance(found := record.get("intent"), dict) else {}
        )

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
        """`boot_id`, and of `shim` and `service` what was recorded."""
        known = read_json(self.path("identity.json"))
        parts = {part: known[part] for part in _PARTS if is_identity(known.get(part))}
        return {"boot_id": str(known.get("boot_id", "")), **parts} if known else {}

    def exit_record(self) -> dict[str, Any] | None:
        """How it ended; None where that is not recorded, or not in a way that we understand."""
        found = read_json(self.path("exit.json"))
        kinds: dict[str, Any] = {"error": str, "asked": bool}
        kinds.update(dict.fromkeys(("code", "signal"), (int, type(None))))
        kinds.update(dict.fromkeys(("at", "ran_s"), (int, float)))
        is_whole = found.keys() == kinds.keys()
        return found if is_whole and all(isinstance(found[k], kinds[k]) for k in kinds) else None

    def live(self) -> dict[str, Proc]:
        """`shim` and `service`, each only when verified alive."""
        known = self.identity()
        boot = known.get("boot_id", "")
        return {
            part: Proc(known[part]["pid"], 0, known[part]["start_ticks"])
            for part in _PARTS
            if is_alive(known.get(part), boot)
        }

    def kin(self, marks: dict[str, list[Proc]]) -> dict[int, Proc]:
        """Every live process of this service: recorded, in `marks`, or below one of those."""
        boot = self.identity().get("boot_id", "")
        found = {p.pid: p for p in self.live().values()}
        found.update((p.pid, p) for p in marks.get(self.dir, ()))
        for member in self._family():
            if is_alive(member, boot):
                found[member["pid"]] = Proc(member["pid"], 0, member["start_ticks"])
        found.update((p.pid, p) for p in descendants(found.values()))
        return found

    def _family(self) -> list[dict[str, Any]]:
        members = read_json(self.path("family.json")).get("members")
        pairs = [m for m in members if isinstance(m, list)] if isinstance(members, list) else []
        return [dict(zip(("pid", "start_ticks"), pair)) for pair in pairs]  # noqa: B905 - of 3.10

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
            "exit": self.exit_record(),
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

"""What `up` remembers of a deployment as a whole, and the cache of that on this machine.

Only a cache: every host of the deployment has the same record, and local ones are found without
it. A missing or broken entry is no error. Of what is down, the last word is kept in a folder
beside: where it was, for whoever asks for its audit.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class KnownDeployment:
    name: str
    topology: str
    """Path of the file it was last brought up from."""
    hosts: dict[str, str | None] = field(default_factory=dict)
    """Topology's key -> address; None: this machine."""
    drain_timeout_s: float = 30.0
    """How long `down` lets requests finish when it is not told."""
    machine: str = ""
    """Who ran `up`, and where: the machine that an address of None means."""
    services: tuple[tuple[str, str], ...] = ()
    """(host, name) of all that the topology wanted."""
    at: float = 0.0
    """Unix time of that `up`, on the machine it ran on."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """The topology of the last `up`, see `scaling`."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Role -> instances, where `scale` set another number than the topology has."""

    @staticmethod
    def parse(entry: dict[str, Any]) -> KnownDeployment | None:
        """None for what another version of pdctl wrote in another form."""
        names = {f.name for f in fields(KnownDeployment)}
        try:
            known = KnownDeployment(**{key: entry[key] for key in names & entry.keys()})
            hosts = {str(k): None if a is None else str(a) for k, a in known.hosts.items()}
            pairs = tuple((str(host), str(name)) for host, name in known.services)
            replicas = {str(role): int(n) for role, n in known.replicas.items()}
            at = float(known.at)
            return replace(known, at=at, hosts=hosts, services=pairs, replicas=replicas)
        except (TypeError, ValueError, AttributeError):
            return None


def state_dir() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "pdctl"


def remember(known: KnownDeployment) -> str:
    """Write the entry. Returns why it could not be, or an empty string: nothing depends on it."""
    path = state_dir() / f"{known.name}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps({"schema": SCHEMA, **asdict(known)}, indent=1) + "\n")
        temporary.replace(path)
    except OSError as e:
        return f"{e.filename}: {e.strerror}"
    return ""


def recall(name: str) -> KnownDeployment | None:
    return _read(state_dir() / f"{name}.json")


def recall_gone(name: str) -> KnownDeployment | None:
    """What was known of a deployment that this machine took down."""
    return _read(_gone_dir() / f"{name}.json")


def _read(path: Path) -> KnownDeployment | None:
    try:
        entry = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
        return None
    return KnownDeployment.parse(entry)


def names() -> tuple[str, ...]:
    try:
        return tuple(sorted(p.stem for p in state_dir().glob("*.json")))
    except OSError:
        return ()


def forget(name: str) -> None:
    """It is down."""
    path = state_dir() / f"{name}.json"
    with contextlib.suppress(OSError):  # mostly: it is not there any more
        _gone_dir().mkdir(mode=0o700, exist_ok=True)
        os.utime(path)  # for `last_gone`
        path.replace(_gone_dir() / path.name)
    with contextlib.suppress(OSError):
        path.unlink()


def last_gone() -> str | None:
    """The name of the deployment that was taken down last."""
    try:
        entries = [(p.stat().st_mtime, p.stem) for p in _gone_dir().glob("*.json")]
    except OSError:
        return None
    return max(entries, default=(0.0, None))[1]


def _gone_dir() -> Path:
    return state_dir() / "gone"

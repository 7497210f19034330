"""The local cache of deployments: which hosts each one touched, and where its topology was.

Only a cache: the truth lies on the hosts, and local ones are found without it. So that `down`
works after the file was edited. A missing or broken entry is no error.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

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
    try:
        entry = json.loads((state_dir() / f"{name}.json").read_text())
        if entry.pop("schema") != SCHEMA:
            return None
        return KnownDeployment(**entry)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def names() -> tuple[str, ...]:
    try:
        return tuple(sorted(p.stem for p in state_dir().glob("*.json")))
    except OSError:
        return ()


def forget(name: str) -> None:
    with contextlib.suppress(OSError):
        (state_dir() / f"{name}.json").unlink()

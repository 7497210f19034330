"""Files on their way to a host: offered, sent in pieces, checked there by hash, then named.

What a host has already is not sent; what was cut off is continued. Knows nothing of wheels or
models.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl.agent import Session
from pdctl.errors import StateError
from pdctl.hosts import Host
from pdctl.sizes import format_size

CHECK_TIMEOUT_S = 600.0
"""A host may have to hash many GB."""
STEP_PERCENT = 10
ROOM = "make room there, or set PDCTL_HOME (XDG_CACHE_HOME for models) on that host"
_APPEND = """
import shutil, sys
try:
    with open(sys.argv[1], "ab") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 1 << 18)
except OSError as e:
    sys.exit(e.strerror)
"""

Say = Callable[[str], None]
"""What is being done, for people."""


@dataclass(frozen=True, slots=True)
class Parcel:
    source: Path
    path: str
    """Where it goes; may start with `{code}/` or `{models}/`."""
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Sent:
    paths: tuple[str, ...]
    """Absolute, in the order of the parcels."""
    nbytes: int
    """What was really sent."""


def parcel(source: Path, path: str, sha256: str = "") -> Parcel:
    """`sha256` when it is known already; else the file is read once."""
    return Parcel(source, path, sha256 or file_hash(source), source.stat().st_size)


def send(session: Session, parcels: Sequence[Parcel], say: Say) -> Sent:
    """Bring all parcels to the host, in order. Raises StateError when there is no room."""
    wanted = [{"path": p.path, "sha256": p.sha256, "size": p.size} for p in parcels]
    answer = session.call("offer", {"files": wanted}, timeout=CHECK_TIMEOUT_S)
    offers = answer["files"]
    missing = [(p, o) for p, o in zip(parcels, offers, strict=True) if not o["have"]]
    need = sum(p.size - o["begun"] for p, o in missing)
    if need > answer["free"]:
        where = os.path.dirname(missing[0][1]["path"])
        raise StateError(
            f"{session.host.name}: {where}: {format_size(need)} are to be sent, "
            f"there is room for {format_size(answer['free'])}",
            hint=ROOM,
        )
    progress = _Progress(need, say)
    for item, offer in missing:
        progress.file = item.source.name
        _append(session.host, item.source, offer, progress)
        request = {"path": offer["path"], "sha256": item.sha256}
        session.call("accept", request, timeout=CHECK_TIMEOUT_S)
    return Sent(tuple(o["path"] for o in offers), need)


def _append(
    host: Host, source: Path, offer: Mapping[str, Any], sent: Callable[[int], None]
) -> None:
    argv = [host.python, "-I", "-S", "-c", _APPEND, offer["part"]]
    with source.open("rb") as f:
        f.seek(offer["begun"])
        result = host.feed(argv, f, sent)
    if result.rc:
        reason = (result.err.strip().splitlines() or ["it failed without a word"])[-1]
        raise StateError(
            f"{host.name}: {offer['part']}: {reason}", hint=f"{ROOM}; then it continues"
        )


class _Progress:
    """Says how far it is, from the first second on, in steps."""

    def __init__(self, total: int, say: Say) -> None:
        self.file = ""
        self._total = total
        self._say = say
        self._done = 0
        self._shown = 0
        self._quiet_until = time.monotonic() + 1.0

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        percent = 100 * self._done // self._total
        if percent < self._shown + STEP_PERCENT or time.monotonic() < self._quiet_until:
            return
        self._shown = percent
        self._say(f"sending {self.file}: {percent}% of {format_size(self._total)} in all")


# ---- hashes of local files -----------------------------------------------------------------------


def file_hash(path: Path) -> str:
    """sha256, remembered for as long as the file is not touched: weights are many GB."""
    found = path.stat()
    key, stamp = str(path.resolve()), [found.st_size, found.st_mtime_ns]
    known = _known_hashes()
    if known.get(key, [None])[:2] == stamp:
        return str(known[key][2])
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if found.st_size >= 1 << 20:
        _remember_hash(key, [*stamp, digest])
    return digest


def _hashes_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "pdctl" / "hashes.json"


def _known_hashes() -> dict[str, list[int | str]]:
    try:
        known = json.loads(_hashes_file().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _remember_hash(key: str, entry: list[int | str]) -> None:
    path = _hashes_file()
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**_known_hashes(), key: entry}, indent=0))
        temporary.replace(path)
    except OSError:
        return  # only a cache

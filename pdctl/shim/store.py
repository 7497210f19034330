"""Files that pdctl sends in pieces: continued where they stopped, named when their hash is right.

`offer` says what is here, `accept` checks what came. Wheels and models arrive this way. The pieces
themselves are written by the SSH connection, to the `.part` path that `offer` names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any

from .files import Refused, read_json
from .synced import CODE, model_cache

CHUNK = 1 << 20


def expanded(base: str, path: str) -> str:
    """`{code}` is where synced code lies, `{models}` the model cache."""
    roots = {"{code}": os.path.join(base, CODE), "{models}": model_cache()}
    for name, root in roots.items():
        if path.startswith(name + "/"):
            return root + path[len(name) :]
    return path


def offer(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """For each of `files` (path, sha256, size): where it lies, and how much of it is here."""
    found: list[dict[str, Any]] = []
    for file in request["files"]:
        path = expanded(base, file["path"])
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        part = path + ".part"
        have = have_whole(path, file["sha256"], file["size"])
        begun = 0 if have or not os.path.exists(part) else os.path.getsize(part)
        if begun > file["size"]:
            os.unlink(part)
            begun = 0
        found.append({"path": path, "part": part, "have": have, "begun": begun})
    return {"files": found, "free": room(base, [f["path"] for f in found])}


def accept(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Name a file whose pieces are all here. A wrong one is removed: the next try starts anew."""
    path = expanded(base, request["path"])
    part = path + ".part"
    got = sha256_of(part)
    if got != request["sha256"]:
        os.unlink(part)
        raise Refused(
            "store",
            f"{path}: its sha256 is {got[:12]}…, expected {request['sha256'][:12]}…; "
            "nothing was kept",
            "run it again; if this repeats, the disk or the connection damages what it carries",
        )
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(part, path)
    _mark(path, request["sha256"])
    return {}


def have_whole(path: str, sha256: str, size: int) -> bool:
    """It is here and verified. Without its marker it is hashed once, then marked."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    if found.st_size != size:
        return False
    if read_json(path + ".verified") == {"sha256": sha256, "mtime_ns": found.st_mtime_ns}:
        return True
    if sha256_of(path) != sha256:
        return False
    with contextlib.suppress(OSError):
        _mark(path, sha256)
    return True


def _mark(path: str, sha256: str) -> None:
    """The same marker that `pdctl model pull` writes."""
    with open(path + ".verified", "w") as f:
        json.dump({"sha256": sha256, "mtime_ns": os.stat(path).st_mtime_ns}, f)


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for chunk in iter(lambda: f.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def room(base: str, paths: list[str]) -> int:
    """Free bytes where the files are to lie; of the fullest disk when there are several."""
    return min(
        (free_bytes(os.path.dirname(p)) for p in paths),
        default=free_bytes(base),
    )


def free_bytes(path: str) -> int:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize

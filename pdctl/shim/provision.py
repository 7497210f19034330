"""Code and its Python environment on this host, installed by `pdctl sync`.

<base>/.code/env/<id>/     a venv with the locked packages; `complete.json` is written last
<base>/.code/<id>/         a venv with the runtime alone, on top of one of those
<base>/.code/current       link to the one that new services use; previous: the one before
<base>/.code/wheels/       what was sent; empty after an install

A directory without `complete.json` is a remnant of an interrupted install and is built anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

from .files import private_dir, read_json
from .service import Service, deployment_names, service_names
from .store import free_bytes
from .synced import CODE, COMPLETE, current, is_complete, link
from .venvs import LOG, Work

ID = re.compile(r"[0-9a-f]{16}\Z")
NEWEST, OLDEST = 15, 11
"""Minor versions of Python 3 that are looked for."""
_DESCRIBE = (
    "import json,platform,sys;"
    "print(json.dumps([list(sys.version_info[:3]),platform.machine(),platform.libc_ver()[1],"
    "sys.implementation.name]))"
)


# ---- what there is -------------------------------------------------------------------------------


def look(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """What an install has to know. With `log`: only the last line of the one that runs."""
    root = os.path.join(base, CODE)
    if request.get("log"):
        return {"line": _last_line(os.path.join(root, LOG))}
    known = current(base)
    return {
        "pythons": _pythons(),
        "current": known["id"] if known else "",
        "complete": [n for n in _names(root) if is_complete(os.path.join(root, n))],
        "environments": [
            n for n in _names(root, "env") if is_complete(os.path.join(root, "env", n))
        ],
        "free": free_bytes(base),
    }


def _pythons() -> list[dict[str, Any]]:
    """Interpreters that could carry a runtime, the shim's own first."""
    found: dict[str, dict[str, Any]] = {}
    names = [f"python3.{minor}" for minor in range(NEWEST, OLDEST - 1, -1)]
    for path in [sys.executable, *filter(None, map(shutil.which, ["python3", *names]))]:
        real = os.path.realpath(path)
        if real in found:
            continue
        try:
            done = subprocess.run(
                [path, "-I", "-S", "-c", _DESCRIBE], capture_output=True, text=True, timeout=20
            )
            version, machine, libc, implementation = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        found[real] = {
            "path": path,
            "version": version,
            "machine": machine,
            "libc": libc,
            "implementation": implementation,
        }
    return list(found.values())


def _names(*parts: str) -> list[str]:
    try:
        return [n for n in os.listdir(os.path.join(*parts)) if ID.match(n)]
    except OSError:
        return []


def _last_line(path: str) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.path.getsize(path) - 4096))
            lines = f.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# ---- install -------------------------------------------------------------------------------------


def install(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Make `id` of the wheels that were sent, and the current one. At once when it is there.

    See `venvs.Work` for the other fields of the request.
    """
    os.makedirs(base, 0o700, exist_ok=True)
    root = os.path.join(base, CODE)
    private_dir(root)
    private_dir(os.path.join(root, "env"))
    environment = os.path.join(root, "env", request["environment"])
    target = os.path.join(root, request["id"])
    work = Work(root, request)
    if not is_complete(target):
        if not is_complete(environment):
            work.environment(environment)
        work.code(target, environment)
    _switch(root, request["id"])
    shutil.rmtree(os.path.join(root, "wheels"), ignore_errors=True)
    return {"id": request["id"], "pruned": prune(base)}


def _switch(root: str, name: str) -> None:
    """Atomically; the one that was current stays as `previous`."""
    before = link(root, "current")
    if before == name:
        return
    if before:
        _point(root, "previous", before)
    _point(root, "current", name)


def _point(root: str, link: str, name: str) -> None:
    temporary = os.path.join(root, f".{link}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(name, temporary)
    os.replace(temporary, os.path.join(root, link))


# ---- prune ---------------------------------------------------------------------------------------


def prune(base: str) -> list[str]:
    """Remove all but the current one, the previous one, and what a recorded service runs from."""
    root = os.path.join(base, CODE)
    keep = {link(root, "current"), link(root, "previous"), *_in_use(base, root)}
    gone = [name for name in _names(root) if name not in keep]
    for name in gone:
        _remove(os.path.join(root, name))
    below = {read_json(os.path.join(root, n, COMPLETE)).get("environment") for n in _names(root)}
    for name in _names(root, "env"):
        if name not in below:
            _remove(os.path.join(root, "env", name))
    return gone


def _in_use(base: str, root: str) -> set[str]:
    used = set()
    for deployment in deployment_names(base):
        for name in service_names(base, deployment):
            for word in Service(base, deployment, name).spec.get("argv", ()):
                if word.startswith(root + "/"):
                    used.add(os.path.relpath(word, root).split("/")[0])
    return used


def _remove(path: str) -> None:
    """First its marker: what is half removed must not look whole."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, COMPLETE))
    shutil.rmtree(path, ignore_errors=True)

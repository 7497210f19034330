"""What was changed on this host, by whom: a JSON line each, in `.audit/<deployment>.log`.

Outside of the deployment's directory, so it outlives `down`. Bounded: two files, the older goes.
Holds names, pids and outcomes; never values of variables, arguments or files.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

from .files import Refused, checked, private_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CAP_BYTES = 256 << 10


def changes(what: str, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """(service, what became of it) for everything that a request really changed."""
    if what in ("start", "again") and answer["started"]:
        pid = answer["service"]["identity"]["service"]["pid"]
        return [(answer["service"]["service"], f"started, pid {pid}")]
    if what == "stop":
        return [(s["service"], _stopped(s)) for s in answer["services"] if s["pids"]]
    if what == "purge":
        return [(name, "records removed") for name in answer["purged"]]
    if what == "install":
        return [("", f"code {answer['id']} is current")]
    if what == "break" and answer["broken"]:
        return [("", f"broke the lock of {answer['holder']['text']}")]
    return []


def _stopped(report: dict[str, Any]) -> str:
    if report["left"]:
        return f"failed: processes {report['left']} do not end"
    killed = f", killed {report['killed']}" if report["killed"] else ""
    return f"stopped, was {report['was']}{killed}"


def failed(request: dict[str, Any], error: Exception) -> list[tuple[str, str]]:
    spec = request.get("spec") or {}
    name = spec.get("name") or request.get("service") or ""
    return [(name, f"failed: {error}")]


def record(base: str, request: dict[str, Any], done: list[tuple[str, str]]) -> None:
    """Append. A full disk must not keep a change from being made."""
    if not done:
        return
    deployment = request.get("deployment") or request["spec"]["deployment"]
    entry = {"at": round(time.time(), 3), "deployment": deployment, "by": request.get("by", {})}
    lines = [
        json.dumps({**entry, "do": request["do"], "service": service, "result": result})
        for service, result in done
    ]
    with contextlib.suppress(OSError, Refused):
        private_dir(os.path.join(base, ".audit"))
        path = _path(base, deployment)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        handle = os.open(path, flags, 0o600)
        try:
            os.write(handle, "".join(line + "\n" for line in lines).encode())
            if os.fstat(handle).st_size > CAP_BYTES:
                os.replace(path, path + ".1")
        finally:
            os.close(handle)


def entries(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """The last `lines` changes, oldest first."""
    path = _path(base, request["deployment"])
    found: list[dict[str, Any]] = []
    for name in (path + ".1", path):
        with contextlib.suppress(FileNotFoundError), open(name) as f:
            for line in f:
                with contextlib.suppress(ValueError):  # cut short by a full disk
                    found.append(json.loads(line))
    return {"audit": found[-int(request["lines"]) :]}


def names(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Deployments that were changed here, the last one first."""
    last: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(os.path.join(base, ".audit")) as files:
        for file in files:
            name = file.name.rpartition(".log")[0]
            last[name] = max(last.get(name, 0.0), file.stat().st_mtime)
    return {"names": sorted(last, key=lambda name: last[name], reverse=True)}


def _path(base: str, deployment: str) -> str:
    return os.path.join(base, ".audit", checked(deployment) + ".log")

"""The commands of the shim. One JSON request, one JSON answer.

serve                 answer one request per line until stdin closes; a `lock` is held as long
follow                the first line names services; then their new log lines, until stdin closes
listen                the first line names ports; then it answers there, until stdin closes
exec                  the first line names a command; then its output and exit code
supervise DIR FD FD [FD...]   internal: become the parent of a service
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable

from . import audit, lock
from .files import Refused, base_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Which function answers what. Its module is imported by the first who asks: most calls need few,
# and a host may run very many.
READING = {
    "status": "look.status",
    "token": "look.token",
    "probe": "probe.probe",
    "code": "provision.look",
    "clock": "facts.clock",
    "facts": "facts.facts",
    "claim": "ports.claim",
    "reach": "measure.reach",
    "copy": "measure.copy",
    "tail": "logs.tails",
    "audit": "audit.entries",
    "audited": "audit.names",
    "collect": "collect.collect",
}
CHANGING = {
    "register": "deployment.register",
    "start": "control.start",
    "again": "control.again",
    "stop": "control.stop",
    "purge": "control.purge",
    "offer": "store.offer",
    "accept": "store.accept",
    "install": "provision.install",
}
STREAMS = {
    "follow": "logs.follow",
    "exec": "execute.execute",
    "listen": "measure.listen",
}


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    loaded = importlib.import_module(f".{module}", __package__)
    found: Callable[..., Any] = getattr(loaded, function)
    return found


class Session:
    """Answers requests. Holds the locks asked for; a change without one takes it for itself."""

    def __init__(self) -> None:
        self.locks: dict[str, lock.DeploymentLock] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": True, **self._do(base_of(request), request)}
        except Refused as e:
            return e.answer
        except OSError as e:
            where = e.filename or request["base"]  # a full disk names no file
            return Refused("state", f"{where}: {e.strerror or e}").answer
        except Exception as e:  # one question that fails costs neither the others nor the lock
            return Refused("request", f"shim {request.get('do')}: {type(e).__name__}: {e}").answer

    def _do(self, base: str, request: dict[str, Any]) -> dict[str, Any]:
        what = request["do"]
        if what in READING:
            answer: dict[str, Any] = _function(READING[what])(base, request)
            return answer
        name = request.get("deployment") or request["spec"]["deployment"]
        if what == "lock":
            self._lock(base, name, request)
            return {}
        if what == "break":  # the lock's holder is in the way: that is the point
            answer = lock.break_lock(base, request)
            audit.record(base, request, audit.changes(what, answer))
            return answer
        if name in self.locks:
            return self._change(base, request)
        self._lock(base, name, request)
        try:
            return self._change(base, request)
        finally:
            self.locks.pop(name).release()

    def _change(self, base: str, request: dict[str, Any]) -> dict[str, Any]:
        """Carry it out and write down what was done, also what failed."""
        what = request["do"]
        try:
            answer: dict[str, Any] = _function(CHANGING[what])(base, request)
        except Exception as e:
            audit.record(base, request, audit.failed(request, e))
            raise
        audit.record(base, request, audit.changes(what, answer))
        return answer

    def _lock(self, base: str, name: str, request: dict[str, Any]) -> None:
        taken = lock.DeploymentLock(base, name)
        taken.take(request.get("by", {}), float(request.get("wait_s", 0.0)))
        self.locks[name] = taken

    def close(self) -> None:
        for held in self.locks.values():
            held.release()


def serve() -> None:
    session = Session()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            answer = {**session.answer(request), "number": request.get("number")}
            print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pdctl is gone; nobody reads the last answer
    finally:
        session.close()


def main(argv: list[str]) -> int:
    os.umask(0o077)
    command = argv[1] if len(argv) > 1 else ""
    if command == "supervise":
        from .supervise import Supervisor  # alone: it stays for as long as its service

        Supervisor(argv[2], *map(int, argv[3:])).run()
    elif command == "serve":
        serve()
    elif command in STREAMS:
        try:
            _function(STREAMS[command])()
        except (BrokenPipeError, KeyboardInterrupt):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        print("usage: serve | follow | listen | exec  (JSON on stdin)", file=sys.stderr)
        return 2
    return 0

"""The commands of the shim. One JSON request, one JSON answer.

call                  answer the request on stdin
serve                 answer one request per line until stdin closes; a `lock` is held as long
follow                the first line names services; then their new log lines, until stdin closes
supervise DIR FD FD   internal: become the parent of a service
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from typing import Any

from . import audit, control, deployment, lock, look, probe
from .files import Refused, base_of
from .service import Service
from .supervise import Supervisor

FOLLOW_S = 0.2
READING: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "status": look.status,
    "token": look.token,
    "probe": probe.probe,
    "tail": look.tails,
    "audit": audit.entries,
}
CHANGING: dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    "register": deployment.register,
    "start": control.start,
    "stop": control.stop,
    "purge": control.purge,
}


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

    def _do(self, base: str, request: dict[str, Any]) -> dict[str, Any]:
        what = request["do"]
        if what in READING:
            return READING[what](base, request)
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
            answer = CHANGING[what](base, request)
        except (Refused, OSError) as e:
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


def follow() -> None:
    """Print {"service", "line"} per new line, also across restarts and rotation of the log."""
    request = json.loads(sys.stdin.readline())
    base = base_of(request)
    services = [Service(base, request["deployment"], n) for n in request["services"]]
    readers = [(s.name, LogReader(s.path("out.log"), int(request["lines"]), s)) for s in services]
    while True:
        for name, reader in readers:
            for line in reader.new_lines():
                print(json.dumps({"service": name, "line": line}))
        sys.stdout.flush()
        if select.select([0], [], [], FOLLOW_S)[0]:
            return  # pdctl closed the channel, or died


class LogReader:
    def __init__(self, path: str, lines: int, service: Service) -> None:
        self.path = path
        self.first = look.tail(service, lines) or []
        self.inode, self.offset = self._look()
        self.rest = b""

    def _look(self) -> tuple[int, int]:
        try:
            found = os.stat(self.path)
            return found.st_ino, found.st_size
        except OSError:
            return 0, 0

    def new_lines(self) -> list[str]:
        lines, self.first = self.first, []
        inode, size = self._look()
        if inode != self.inode or size < self.offset:  # restarted, or rotated
            self.inode, self.offset, self.rest = inode, 0, b""
        if size > self.offset:
            with open(self.path, "rb") as f:
                f.seek(self.offset)
                data = f.read(1 << 20)
            self.offset += len(data)
            *whole, self.rest = (self.rest + data).split(b"\n")
            lines += [w.decode(errors="replace") for w in whole]
        return lines


def main(argv: list[str]) -> int:
    os.umask(0o077)
    command = argv[1] if len(argv) > 1 else ""
    if command == "supervise":
        Supervisor(argv[2], int(argv[3]), int(argv[4])).run()
    elif command == "call":
        print(json.dumps(Session().answer(json.load(sys.stdin))))
    elif command == "serve":
        serve()
    elif command == "follow":
        try:
            follow()
        except (BrokenPipeError, KeyboardInterrupt):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        print("usage: call | serve | follow  (JSON on stdin)", file=sys.stderr)
        return 2
    return 0

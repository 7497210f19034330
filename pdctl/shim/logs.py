"""Logs of this host's services: their last lines, and new ones as they come.

Follows a log through restarts and rotation without losing a line, and from where an earlier
follower was cut off. Writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from .files import base_of, checked
from .service import Service, names_in, service_names

POLL_S = 0.2
ALIVE_S = 5.0
"""How often a follower says that it is still there."""
CHUNK = 1 << 20
SINCE_WINDOW = 16 << 20
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")


def tails(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Last lines by service (None: all). `.last` answers for those that are not here any more."""
    deployment, names = request["deployment"], request.get("services")
    if names is None:
        kept = os.path.join(base, ".last", checked(deployment))
        suffix = ".out.log"
        last = [n[: -len(suffix)] for n in names_in(kept) if n.endswith(suffix)]
        names = service_names(base, deployment) or last
    logs = {n: tail(Service(base, deployment, n), request) for n in names}
    return {"logs": {n: lines for n, lines in logs.items() if lines is not None}}


def tail(service: Service, request: dict[str, Any]) -> list[str] | None:
    """The last `lines`, none older than `since_s` seconds; None: there is no log, or was."""
    path = service.path("out.log")
    for candidate in (path, last_log(service)):
        try:
            size = os.stat(candidate).st_size
            return last_lines(candidate, size, int(request["lines"]), request.get("since_s"))
        except FileNotFoundError:
            continue
    return None


def last_log(service: Service) -> str:
    base, deployment = os.path.split(os.path.dirname(service.dir))
    return os.path.join(base, ".last", deployment, service.name + ".out.log")


def last_lines(path: str, end: int, lines: int, since_s: float | None = None) -> list[str]:
    """Of the log up to `end`."""
    window = SINCE_WINDOW if since_s is not None else max(65536, 256 * lines)
    with open(path, "rb") as f:
        start = max(0, end - window)
        f.seek(start)
        found = f.read(end - start).decode(errors="replace").splitlines()
        changed = os.fstat(f.fileno()).st_mtime
    if start and found:
        del found[0]  # cut somewhere in the middle
    if since_s is not None:
        found = _since(found, time.time() - float(since_s), changed)
    return found[-lines:] if lines else []


def _since(lines: list[str], moment: float, changed: float) -> list[str]:
    """From the first line with a time at or after `moment`. What has no time goes with it."""
    timed = False
    for number, line in enumerate(lines):
        stamp = _STAMP.match(line)
        if stamp is None:
            continue
        timed = True
        try:
            at = time.mktime(time.strptime(" ".join(stamp.groups()), "%Y-%m-%d %H:%M:%S"))
        except (ValueError, OverflowError):
            continue
        if at >= moment:
            return lines[number:]
    return lines if not timed and changed >= moment else []


# ---- following -----------------------------------------------------------------------------------


def follow() -> None:
    """Print {"service", "line", "at"} per new line, until stdin closes; {} when there is none.

    `at` is the place after the line: given back as `after` by service, it goes on from there.
    Without named services, those that come later are followed too.
    """
    request = json.loads(sys.stdin.readline())
    base, deployment = base_of(request), request["deployment"]
    named, after = request.get("services"), request.get("after", {})
    readers: dict[str, LogReader] = {}
    begun, said_at = True, 0.0
    while True:
        for name in named if named is not None else service_names(base, deployment):
            if name not in readers:
                # One that appears while we watch is shown from its beginning.
                place = after.get(name) or (None if begun else [0, 0])
                readers[name] = LogReader(Service(base, deployment, name), request, place)
        begun = said = False
        for name, reader in readers.items():
            for line, at in reader.new_lines():
                print(json.dumps({"service": name, "line": line, "at": at}))
                said = True
        if not said and time.monotonic() - said_at >= ALIVE_S:
            print("{}")
            said = True
        if said:
            sys.stdout.flush()
            said_at = time.monotonic()
        if select.select([0], [], [], POLL_S)[0]:
            return  # pdctl closed the channel, or died


class LogReader:
    """One log, from `after` (inode, offset), or from its last lines."""

    def __init__(self, service: Service, request: dict[str, Any], after: list[int] | None) -> None:
        self.path = service.path("out.log")
        # Where the rest of a log may be that was renamed or copied away.
        self.older = (self.path + ".1", last_log(service))
        self.rest = b""
        self.first: list[str] = []
        self.inode, self.offset = after if after else self._look()
        if after is None and self.inode:
            lines, since_s = int(request["lines"]), request.get("since_s")
            self.first = last_lines(self.path, self.offset, lines, since_s)

    def _look(self) -> tuple[int, int]:
        try:
            found = os.stat(self.path)
            return found.st_ino, found.st_size
        except OSError:
            return 0, 0

    def new_lines(self) -> Iterator[tuple[str, list[int]]]:
        first, self.first = self.first, []
        for line in first:
            yield line, [self.inode, self.offset]
        inode, size = self._look()
        if not inode:
            return  # between two lives
        if inode != self.inode or size < self.offset:
            yield from self._remains(inode)
            self.inode, self.offset = inode, 0
        yield from self._read(self.path, size)

    def _remains(self, inode: int) -> Iterator[tuple[str, list[int]]]:
        """What was written to the old log after our last look: at a restart, or a rotation."""
        for path in self.older if self.inode else ():
            try:
                found = os.stat(path)
            except OSError:
                continue
            copied = inode == self.inode and path == self.older[0]
            if found.st_ino == self.inode or copied:
                yield from self._read(path, found.st_size)
                break
        if self.rest and inode != self.inode:  # its writer is gone: nobody ends this line
            yield self.rest.decode(errors="replace"), [inode, 0]
            self.rest = b""

    def _read(self, path: str, size: int) -> Iterator[tuple[str, list[int]]]:
        """From where we are up to `size`: at the next look the file may be another."""
        with contextlib.suppress(OSError), open(path, "rb") as f:
            f.seek(self.offset)
            while data := f.read(min(CHUNK, max(0, size - self.offset))):
                end = self.offset - len(self.rest)
                self.offset += len(data)
                *whole, self.rest = (self.rest + data).split(b"\n")
                for line in whole:
                    end += len(line) + 1
                    yield line.decode(errors="replace"), [self.inode, end]

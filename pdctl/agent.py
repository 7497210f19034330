"""Speaks with the shim of a host: copies it there, asks, turns refusals into PdctlError.

`shim_call` asks once; `Session` keeps one shim running that holds the deployment's lock.
Requests go over stdin, so that no secret is ever on a command line. Knows no plans or records.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import socket
import threading
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from pdctl import __version__
from pdctl.errors import HostCommandError, HostUnreachable, Locked, PdctlError, StateError
from pdctl.hosts import Channel, Host
from pdctl.shim.unpack import MAIN

CALL_TIMEOUT_S = 30.0
_ENTRY = """# Run as a file: for a folder, python first loads a good part of importlib.
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from shim.main import main

sys.exit(main(sys.argv))
"""


@cache
def _sources() -> dict[str, str]:
    """Files of the shim, by path in its folder."""
    folder = Path(__file__).parent / "shim"
    files = {f"shim/{f.name}": f.read_text() for f in sorted(folder.glob("*.py"))}
    return {**files, MAIN: _ENTRY}


@cache
def _version() -> str:
    digest = hashlib.sha256()
    for name, text in _sources().items():
        digest.update(f"{name}\0{text}".encode())
    return digest.hexdigest()[:16]


def open_shim(host: Host, command: str) -> Channel:
    """A running shim, copied to the host first when it is missing there."""
    return host.program(f".shim/{_version()}", _sources(), [command])


def request_text(host: Host, do: str, payload: dict[str, Any], *, command: str = "") -> str:
    return json.dumps({"do": do, "base": host.base, "by": caller(command), **payload})


def caller(command: str) -> dict[str, Any]:
    """Who we are: for the audit, and for others who wait for our lock."""
    return {
        "user": user_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": __version__,
        "command": command,
    }


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def shim_call(
    host: Host, do: str, payload: dict[str, Any], *, timeout: float = CALL_TIMEOUT_S
) -> dict[str, Any]:
    """One request, one answer. A changing request takes the deployment's lock for its duration."""
    with contextlib.closing(open_shim(host, "serve")) as channel:
        channel.send(request_text(host, do, {"number": 1, **payload}))
        return _receive(host, channel, do, 1, timeout)


def _receive(host: Host, channel: Channel, do: str, number: int, timeout: float) -> dict[str, Any]:
    """The answer to the request of this number.

    First comes what the login's shell had to say, and what Ctrl-C or a timeout made us leave.
    """
    line = channel.receive(timeout)
    while line is not None and _parsed(line).get("number") != number:
        line = channel.receive(timeout)
    return answered(host, do, line or "", "" if line else channel.error_text())


class Session:
    """One running shim with the lock on a deployment. Closing it, or dying, gives the lock back.

    What was asked for before our death is finished under the lock: nobody sees it half done.
    """

    def __init__(
        self, host: Host, deployment: str, *, purpose: str, wait_s: float | None = None
    ) -> None:
        """Waits so long for the lock; None: not yet, `lock` takes it."""
        self.host = host
        self.deployment = deployment
        self._purpose = purpose
        self._turn = threading.Lock()
        self._number = 0
        self._lost: HostUnreachable | None = None
        self._channel = open_shim(host, "serve")
        if wait_s is not None:
            try:
                self.lock(wait_s)
            except PdctlError:
                self.close()
                raise

    def lock(self, wait_s: float) -> None:
        self.call("lock", {"wait_s": wait_s}, timeout=wait_s + CALL_TIMEOUT_S)

    def call(
        self, do: str, payload: dict[str, Any], *, timeout: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Thread-safe; requests of several threads take turns. A host that was lost stays so."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            self._number += 1
            payload = {"deployment": self.deployment, "number": self._number, **payload}
            try:
                self._channel.send(request_text(self.host, do, payload, command=self._purpose))
                return _receive(self.host, self._channel, do, self._number, timeout)
            except HostUnreachable as e:
                self._lost = e
                raise

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _parsed(line: str) -> dict[str, Any]:
    """{} for a line that is no answer of a shim."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "ok" in found else {}


def answered(host: Host, do: str, text: str, err: str) -> dict[str, Any]:
    """The shim's answer, or its refusal as the PdctlError it is."""
    answer = _parsed((text.splitlines() or [""])[-1])
    if not answer:
        reason = err.strip().splitlines()[-1:] or ["it ended without an answer"]
        raise HostCommandError(f"{host.name}: shim {do}: {reason[0]}", host=host.name)
    if answer["ok"]:
        return answer
    message, hint = f"{host.name}: {answer['error']}", answer.get("hint", "")
    if answer["kind"] == "locked":
        raise Locked(
            message,
            hint="wait for it to end; if its machine is gone for good: `pdctl lock break`",
        )
    if answer["kind"] == "state":
        default = "make room or make it writable, or set PDCTL_HOME to another directory"
        raise StateError(message, hint=hint or default)
    raise HostCommandError(message, host=host.name, hint=hint)

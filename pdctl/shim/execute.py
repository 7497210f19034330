"""Run one command on this host as a service would: its directory, its environment, no secrets.

Output goes back as it comes. The command is ended when pdctl goes away, and with it whatever it
left running in its session's group.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from .control import inherited
from .files import Refused, base_of, read_json
from .procs import MARKER
from .service import Service

ALIVE_S = 5.0
TERM_S = 2.0
PIPE_BYTES = 1 << 20
"""No pipe holds more, so one read takes all that is in it."""


def execute() -> None:
    """Print {"out": text} and {"err": text} as they come, then {"exit": code}; {} in between.

    Text is UTF-8; bytes that are not come as lone surrogates, so that nothing is lost.
    """
    request = json.loads(sys.stdin.readline())
    try:
        process = _start(request)
    except Refused as e:
        print(json.dumps(e.answer), flush=True)
        return
    try:
        heard = _relay(process)
    finally:
        code = _end_group(process)
    if heard:
        print(json.dumps({"exit": code}), flush=True)


def _start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    where, env = os.path.expanduser("~"), inherited()
    if request.get("service"):
        service = Service(base_of(request), request["deployment"], request["service"])
        if not os.path.exists(service.path("env")):
            raise Refused("request", f"{service.name} was never started here")
        hidden = () if request.get("secrets") else service.spec.get("secrets", ())
        known = read_json(service.path("env"))
        where = service.dir
        # Without the mark: it is not the service, and `down` has no business with it.
        env = {k: v for k, v in known.items() if k not in hidden and k != MARKER}
    argv = request["argv"]
    try:
        return subprocess.Popen(
            argv,
            cwd=where,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise Refused("request", f"cannot run {argv[0]}: {reason}") from e


def _relay(process: subprocess.Popen[bytes]) -> bool:
    """Pass on what it writes until it has ended. False: nobody listens any more."""
    assert process.stdout is not None and process.stderr is not None
    names = {process.stdout.fileno(): "out", process.stderr.fileno(): "err"}
    said_at = time.monotonic()
    while True:
        # First: then all that it wrote is in the pipes. A child of it may write on for ever.
        ended = _ended(process)
        wait = 0.0 if ended else 0.2 if names else 0.02
        readable, _, _ = select.select([0, *names], [], [], wait)
        if 0 in readable and not os.read(0, 1):
            return False
        for stream in [s for s in readable if s != 0]:
            data = os.read(stream, PIPE_BYTES)
            if data:
                text = data.decode("utf-8", "surrogateescape")
                print(json.dumps({names[stream]: text}), flush=True)
                said_at = time.monotonic()
            else:
                del names[stream]
        if ended:
            return True
        if time.monotonic() - said_at >= ALIVE_S:
            print("{}", flush=True)
            said_at = time.monotonic()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: until then its pid, which is its group's too, can mean no other."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_group(process: subprocess.Popen[bytes]) -> int:
    """TERM and a moment for the command, KILL for what is left of its group; its exit code."""
    deadline = time.monotonic() + TERM_S
    if not _ended(process):
        os.killpg(process.pid, signal.SIGTERM)
    while not _ended(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if code >= 0 else 128 - code

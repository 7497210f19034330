"""TCP ports for tests: of this test process alone, and none that an outgoing connection may get."""

from __future__ import annotations

import itertools
import os
import random
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = range(10000 + _WORKER % 4 * 5000, 15000 + _WORKER % 4 * 5000)
# From anywhere on: another run of the tests may be on this machine.
_next = itertools.count(random.randrange(len(_SHARE)))


def free_port() -> int:
    """Free a moment ago, and not given to anybody for long."""
    return next(p for p in map(_share, _next) if _is_free(p))


def free_run(count: int) -> range:
    """So many of them in a row."""
    while True:
        ports = range(first := free_port(), first + count)
        if ports[-1] in _SHARE and all(free_port() == port for port in ports[1:]):
            return ports


def _share(number: int) -> int:
    return _SHARE[number % len(_SHARE)]


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True

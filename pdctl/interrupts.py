"""SIGTERM and SIGHUP end a command as Ctrl-C does: KeyboardInterrupt, clean-up, exit code 130.

So that the time limit of a CI job, or a terminal that is closed, leaves nothing half done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def like_ctrl_c() -> None:
    """For the whole process, from its start. Under `nohup` a SIGHUP is ignored, and stays so."""
    for number in heeded():
        if number != signal.SIGINT:  # Python's own handler: asyncio looks for it
            signal.signal(number, _interrupt)


def heeded() -> tuple[signal.Signals, ...]:
    """Those of our signals that do not pass us by."""
    return tuple(s for s in _SIGNALS if signal.getsignal(s) is not signal.SIG_IGN)


def leave_now(code: int) -> NoReturn:
    """End without those who still wait for a host that may never answer: nothing is theirs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def leave_dead_terminal() -> None:
    """After a hang-up all output fails: what is told of the clean-up must not end it."""
    for handle in (1, 2):
        if stat.S_ISCHR(os.fstat(handle).st_mode) and not os.isatty(handle):
            os.dup2(os.open(os.devnull, os.O_WRONLY), handle)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    leave_dead_terminal()
    raise KeyboardInterrupt

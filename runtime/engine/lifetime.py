"""A child process that must not outlive its parent."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals) -> None:
    """The kernel sends this process the signal when the thread that started it ends.

    A parent that died before this call closed its end of the inherited link, which is read next.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")

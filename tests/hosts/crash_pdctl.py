"""Runs pdctl and kills it with SIGKILL when it has sent its n-th message to a host, for tests of
what a crash leaves. As `crash_pdctl.py N COMMAND...`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from pdctl.__main__ import main
from pdctl.remote.host import SshChannel

LIMIT = int(sys.argv.pop(1))
_sent = itertools.count(1)
_send = SshChannel.send


def send(channel: SshChannel, line: str) -> None:
    _send(channel, line)
    if next(_sent) == LIMIT:
        os.kill(os.getpid(), signal.SIGKILL)


SshChannel.send = send  # type: ignore[method-assign]
main()

"""Runs the shim and kills it with SIGKILL at its n-th step, for tests of what a crash leaves.

A step is something the outside can see: a file renamed or opened for writing, a fork, a program
started. As `crash_shim.py FOLDER HOME WHO N COMMAND...`; WHO, `start` or `supervise`, is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

FOLDER, HOME, WHO, LIMIT = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
_count = 0


def step(event: str, args: tuple[Any, ...]) -> None:
    global _count
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if not writes and event not in ("os.rename", "os.mkdir", "os.fork", "os.exec"):
        return
    if event == "open" and not str(args[0]).startswith(HOME):
        return
    _count += 1
    if _count == LIMIT:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    sys.path.insert(0, FOLDER)
    from shim import control, main

    me = "supervise" if sys.argv[5] == "supervise" else "start"
    # The supervisor is started with our own command line in front.
    popen = control.subprocess.Popen

    def instead(argv: list[str], **more: Any) -> Any:
        at = argv.index("supervise")
        return popen([sys.executable, __file__, *sys.argv[1:5], *argv[at:]], **more)

    control.subprocess.Popen = instead
    if me == WHO:
        sys.addaudithook(step)
    sys.exit(main.main(["shim", *sys.argv[5:]]))


main()

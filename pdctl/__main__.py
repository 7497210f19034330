"""`python -m pdctl` is the same as `pdctl`."""

from __future__ import annotations

import os
import sys

from pdctl.errors import EXIT_INTERRUPTED
from pdctl.interrupts import leave_now, like_ctrl_c


def main() -> None:
    """Entry point: an interrupt while the modules load ends like one that comes later."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    try:
        like_ctrl_c()
        from pdctl.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    try:
        run()
    except SystemExit as e:
        if e.code != EXIT_INTERRUPTED:
            raise
        leave_now(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()

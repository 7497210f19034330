"""`python -m pdctl` is the same as `pdctl`."""

from __future__ import annotations

import sys

from pdctl.errors import EXIT_INTERRUPTED
from pdctl.interrupts import leave_now, like_ctrl_c


def main() -> None:
    """Entry point: an interrupt while the modules load ends like one that comes later."""
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

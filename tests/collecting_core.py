"""A core that runs the full cycle collector every second, for soak.py: its memory then shows what
is kept, not what Python keeps for reuse. CPython has a list of up to 2,000 freed tuples for each
length below 20, 4.6 MB when all are full, which takes a few hundred thousand requests; only the
full collector empties them, and a core with little garbage in cycles all but never runs it.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

from runtime.__main__ import main


def collect() -> None:
    while True:
        time.sleep(1.0)
        gc.collect()


if __name__ == "__main__":
    threading.Thread(target=collect, daemon=True).start()
    sys.exit(main())

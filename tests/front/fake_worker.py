"""A whole worker front process, as `python -m runtime worker` runs it, over the scripted core."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from runtime import config as configs
from runtime.config import WorkerConfig
from runtime.front.server import serve_worker

CORE = Path(__file__).parent / "fake_core.py"

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = configs.load(Path(sys.argv[1]), WorkerConfig)
    sys.exit(serve_worker(config, lambda fd: [sys.executable, str(CORE), str(fd), config.name]))

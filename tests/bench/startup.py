"""How long a user waits: `pdctl --help`, and `pdctl up` of one prefill and one decode to ready.

Prints each beside a limit of the same machine in the same run: an empty Python process, and
importing torch alone.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from lab import DECODE, PREFILL, Deployment, Lab

CACHED = Path.home() / ".cache/pdctl/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"


def timed(argv: list[str], repeats: int) -> float:
    """Median seconds of a command; it must succeed."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(argv, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    empty = timed([sys.executable, "-c", "pass"], 9)
    help_s = timed([str(Path(sys.executable).parent / "pdctl"), "--help"], 9)
    print(
        f"pdctl --help    {help_s:6.2f} s   {help_s / empty:5.1f} x an empty Python ({empty:.3f} s)"
    )
    torch_s = timed([sys.executable, "-c", "import torch"], 3)
    ups = []
    with tempfile.TemporaryDirectory() as root:
        lab = Lab(Path(root), CACHED)
        deployment = Deployment(
            lab, "startup", lab.topology("startup", prefill=[PREFILL], decode=[DECODE])
        )
        for _ in range(3):
            start = time.perf_counter()
            result = deployment.up()
            ups.append(time.perf_counter() - start)
            if result.returncode:
                sys.exit(result.stderr)
            deployment.down()
    up_s = statistics.median(ups)
    print(
        f"pdctl up, ready {up_s:6.2f} s   {up_s / torch_s:5.1f} x importing torch ({torch_s:.2f} s)"
    )


if __name__ == "__main__":
    main()

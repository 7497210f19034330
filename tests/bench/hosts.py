"""How long `up`, `status` and `down` take on 8, 16, 32 and 64 machines, each a namespace here with
its own sshd, and how that grows. The services do nothing: what is measured is pdctl and SSH.

    sudo .venv/bin/python tests/bench/hosts.py [COUNT]...

All machines share this one's CPUs: on real ones their side of the work is done by theirs. `own CPU`
is what pdctl itself used. Growth is the time of a row by that of the row before, over the growth
in machines: 1.0 is linear.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster import why_not
from many_hosts import many_hosts

COUNTS = (8, 16, 32, 64)
COMMANDS = ("up", "up again", "status", "down")


def measure(count: int) -> dict[str, tuple[float, float]]:
    """Seconds, and seconds of pdctl's own CPU, of each command."""
    with tempfile.TemporaryDirectory(prefix="pdctl-hosts-") as root:
        cluster, path = many_hosts(Path(root), count)
        try:
            lines = {"up": ["up", path], "up again": ["up", path], "status": ["status"]}
            lines["down"] = ["down", "demo"]
            found = {}
            for name in COMMANDS:
                cpu = own_cpu()
                begun = time.monotonic()
                done = cluster.pdctl(*lines[name], timeout=300)
                found[name] = (time.monotonic() - begun, own_cpu() - cpu)
                if done.rc:
                    sys.exit(f"pdctl {name} on {count} machines: {done.err or done.out}")
            left = [m.name for m in cluster.machines.values() if not m.clean()]
            if left:
                sys.exit(f"something is left on {', '.join(left)}")
            return found
        finally:
            cluster.close()


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    counts = [int(a) for a in sys.argv[1:]] or list(COUNTS)
    print("machines" + "".join(f"{c:>10}  own CPU  growth" for c in COMMANDS))
    before: tuple[int, dict[str, tuple[float, float]]] | None = None
    for count in counts:
        found = measure(count)
        row = f"{count:8}"
        for name in COMMANDS:
            seconds, cpu = found[name]
            growth = ""
            if before:
                growth = f"{seconds / before[1][name][0] / (count / before[0]):.2f}"
            row += f"{seconds:8.2f} s  {cpu:5.2f} s  {growth:>6}"
        print(row, flush=True)
        before = (count, found)


if __name__ == "__main__":
    main()

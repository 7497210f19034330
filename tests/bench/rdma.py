"""Puts over the rdma transport beside perftest's ib_write_bw, in turn, on the guest's Soft-RoCE.

`make bench-rdma`. Both write 1 MiB at a time over one reliable connection. ib_write_bw writes the
same megabyte again and again, and polls, which on the guest's one core takes time from the work: it
cannot wait for events. Ours moves scattered blocks of a larger buffer, waits for events, and tells
the receiver after each put. Puts of 4 MiB are what the hand-over makes; one of all shows what
waiting for each of them costs.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rdma_lab import BINDINGS, DECODE_DEVICE, PREFILL_DEVICE
from transport_rig import Rig, block_runs, eventually, use_bindings

from runtime.transfer import verbs

SIZE = 1 << 20
BLOCKS = 32
PER_PUT = (4, BLOCKS)
ROUNDS = 5
WRITES = 128
GOAL = 0.9
LIMIT = "ib_write_bw"


def give_cpu_a_clock() -> None:
    """perftest computes with the `cpu MHz` of /proc/cpuinfo, which the guest's has not."""
    real = Path("/proc/cpuinfo").read_text()
    if "cpu MHz" in real:
        return
    copy = Path("/run/cpuinfo")
    copy.write_text(real.rstrip("\n") + "\ncpu MHz\t\t: 2300.000\n\n")
    subprocess.run(["mount", "--bind", copy, "/proc/cpuinfo"], check=True)


def perftest() -> float:
    """MB/s of ib_write_bw, as it reports them."""
    argv = ["ib_write_bw", "-x", "1", "-s", str(SIZE), "-n", str(WRITES), "-F", "--report_gbits"]
    server = subprocess.Popen([*argv, "-d", DECODE_DEVICE], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    client = [*argv, "-d", PREFILL_DEVICE, "127.0.0.1"]
    out = subprocess.run(client, check=True, capture_output=True, text=True).stdout
    server.wait(10)
    row = re.search(rf"^\s*{SIZE}\s+\d+\s+\S+\s+(\S+)", out, re.MULTILINE)
    assert row is not None, out
    return float(row.group(1)) * 1e3 / 8


class Ours:
    def __init__(self, binding: str) -> None:
        use_bindings([binding])
        self.rig = Rig.make("rdma", BLOCKS, SIZE)
        self.rig.connect()
        self.nonce = 0

    def run(self, per_put: int) -> float:
        """MB/s until the receiver knows that all has landed."""
        rng = random.Random(self.nonce)
        began = time.perf_counter()
        for _ in range(WRITES // BLOCKS):
            self.nonce += 1
            blocks = rng.sample(range(BLOCKS), BLOCKS)
            self.rig.receiver.expect(self.nonce, tuple(blocks))
            for at in range(0, BLOCKS, per_put):
                part = blocks[at : at + per_put]
                runs, whole = block_runs(part, part, SIZE), at + len(part)
                self.rig.sender.put(self.nonce, self.rig.source, runs, whole)
            nonce = self.nonce
            eventually(lambda: self.rig.receiver.landed(nonce, 0) == BLOCKS)  # noqa: B023
            self.rig.receiver.revoke(nonce)
        return WRITES * SIZE / (time.perf_counter() - began) / 1e6


def main() -> None:
    give_cpu_a_clock()
    known = dict(verbs.BINDINGS)
    ours: dict[str, Ours] = {}
    for name in BINDINGS:
        verbs.BINDINGS = dict(known)
        ours[name] = Ours(name)
        ours[name].run(BLOCKS)
    runs: dict[str, Callable[[], float]] = {LIMIT: perftest}
    for name, one in ours.items():
        runs |= {f"{name}, {n} MiB a put": partial(one.run, n) for n in PER_PUT}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            found[name].append(run())
    median = {name: statistics.median(each) for name, each in found.items()}
    for name, each in found.items():
        ratio = median[name] / median[LIMIT]
        print(f"{name:24} {median[name]:7.1f} MB/s {ratio:5.2f} {[round(v) for v in each]}")
    print(f"goal: {GOAL} of {LIMIT}")
    for one in ours.values():
        one.rig.close()


if __name__ == "__main__":
    main()

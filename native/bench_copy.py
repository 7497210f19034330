"""How fast copy_runs is beside plain single-thread memcpy of the same scattered blocks, in one run.

Run as `python native/bench_copy.py [--total-mib N] [--rounds N]`. Prints one line per block size:
the medians of both and the median of the rounds' ratios (1.00: copy_runs costs nothing extra).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np

from runtime import _native

MIB = 1 << 20
BLOCK_SIZES = (64 << 10, 256 << 10, MIB)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(block: int, total: int, rounds: int) -> tuple[float, float, float]:
    """Median seconds of copy_runs and of memcpy for `total` bytes, and the median ratio."""
    count = total // block
    order = np.random.default_rng(0)
    runs = np.empty((count, 3), dtype=np.int64)
    runs[:, 0] = order.permutation(count) * block
    runs[:, 1] = order.permutation(count) * block
    runs[:, 2] = block
    src = np.full(total, 1, dtype=np.uint8)
    dst = np.zeros(total, dtype=np.uint8)
    s, d = src.ctypes.data, dst.ctypes.data
    pairs = [(d + int(to), s + int(at)) for at, to, _ in runs]
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = None

    def plain() -> None:
        for to, at in pairs:
            memcpy(to, at, block)

    def ours() -> None:
        _native.copy_runs(d, total, s, total, runs)

    for warm_up in (ours, plain):
        warm_up()
    times = [(seconds(ours), seconds(plain)) for _ in range(rounds)]
    mine = statistics.median(a for a, _ in times)
    base = statistics.median(b for _, b in times)
    return mine, base, statistics.median(b / a for a, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-mib", type=int, default=512, help="bytes copied per round")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for block in BLOCK_SIZES:
        total = args.total_mib * MIB
        mine, base, ratio = compare(block, total, args.rounds)
        print(
            f"{block >> 10:5d} KiB blocks: copy_runs {total / mine / 1e9:6.2f} GB/s, "
            f"memcpy {total / base / 1e9:6.2f} GB/s, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()

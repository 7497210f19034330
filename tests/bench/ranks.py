"""What tensor parallelism costs a hand-over: copies to and from several ranks' pools, as a ratio to
copies of whole blocks in the same run.

    python tests/bench/ranks.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.kv.layout import KvLayout, PoolMap
from runtime.kv.region import Region
from runtime.kv.swap import copy_region

MODELS = {
    "SmolLM2-135M float32": KvLayout(30, 3, 64, 16, "float32"),
    "8 KV heads of 128, 32 layers, bfloat16": KvLayout(32, 8, 128, 16, "bfloat16"),
}
TOKENS = 1024
REPEATS = 15


def main() -> None:
    for name, layout in MODELS.items():
        blocks = layout.blocks_for(TOKENS)
        print(f"{name}: {blocks * layout.block_bytes / 1e6:.1f} MB for {TOKENS} tokens")
        rows = {
            (what, size): copier(PoolMap(layout, blocks, size), what)
            for size in (1, 2, 3, 4, 8)
            if layout.num_kv_heads % size == 0
            for what in ("out", "in")
        }
        times = measure(rows)
        for (what, size), seconds in times.items():
            speed = blocks * layout.block_bytes / seconds / 1e9
            ratio = times[what, 1] / seconds
            print(f"  {what:3} tp {size}: {speed:5.1f} GB/s, {ratio:.2f} of tp 1")


def copier(pools: PoolMap, what: str) -> Callable[[], None]:
    """One hand-over's worth of copies, the computation of the runs included."""
    order = np.random.default_rng(0).permutation(pools.num_blocks).tolist()
    whole = list(range(pools.num_blocks))
    pool, buffer = (
        np.ones(pools.nbytes, np.uint8),
        np.ones(pools.num_blocks * pools.model.block_bytes, np.uint8),
    )

    def copy() -> None:
        # In pieces of some 4 MiB, as the copy lanes do.
        step = max(1, (4 << 20) // pools.model.block_bytes)
        for at in range(0, pools.num_blocks, step):
            ours, theirs = order[at : at + step], whole[at : at + step]
            if what == "out":
                copy_region(region(buffer), region(pool), pools.gather(ours, theirs))
            else:
                copy_region(region(pool), region(buffer), pools.scatter(theirs, ours))

    return copy


def region(memory: NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


def measure(rows: dict[tuple[str, int], Callable[[], None]]) -> dict[tuple[str, int], float]:
    """Median seconds of each, taking turns."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in rows}
    for _ in range(REPEATS):
        for key, copy in rows.items():
            start = time.perf_counter()
            copy()
            times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


if __name__ == "__main__":
    main()

"""What a copy less would save: KV put into the CPU buffer and swapped in from there, as it is done,
beside KV put straight into a device pool that lies in shared memory. CPU devices only.

Both in one run, turn and turn about, with the native copy that the transports use, for the last
chunk of a prompt of the default model. Also decodes from either pool: does it matter where it lies?
"""

from __future__ import annotations

import argparse
import queue
import random
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from runtime._native import create_pinned_shm, free_pinned_shm, paged_attention
from runtime.kv.layout import KvLayout
from runtime.kv.region import Region
from runtime.kv.swap import copy_region, split_blocks

LAYOUT = KvLayout(30, 3, 64, 16, "float32")
"""SmolLM2-135M."""
HEADS = 9
POOL_BLOCKS = 640


@contextmanager
def segment(blocks: int) -> Iterator[Region]:
    made = create_pinned_shm(f"pdctl-bench-{secrets.token_hex(6)}", blocks * LAYOUT.block_bytes)
    try:
        yield Region(made.address, made.nbytes)
    finally:
        free_pinned_shm(made, unlink=True)


def region_of(tensor: torch.Tensor) -> Region:
    return Region(tensor.data_ptr(), tensor.nbytes)


def staged(source: Region, buffer: Region, pool: Region, blocks: list[int]) -> tuple[float, float]:
    """Seconds until the last block is in the pool, and of CPU, with both copies pipelined."""
    cuts = split_blocks(0, len(blocks), LAYOUT.block_bytes)
    landed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    cpu: list[float] = []

    def swap_in() -> None:
        began = time.thread_time()
        for _ in cuts:
            at, end = landed.get()
            copy_region(pool, buffer, LAYOUT.block_runs(range(at, end), blocks[at:end]))
        cpu.append(time.thread_time() - began)

    thread = threading.Thread(target=swap_in)
    thread.start()
    began, cpu_began = time.perf_counter(), time.thread_time()
    for at, end in cuts:
        copy_region(buffer, source, LAYOUT.block_runs(range(at, end), range(at, end)))
        landed.put((at, end))
    cpu.append(time.thread_time() - cpu_began)
    thread.join()
    return time.perf_counter() - began, sum(cpu)


def straight(source: Region, pool: Region, blocks: list[int]) -> tuple[float, float]:
    began, cpu_began = time.perf_counter(), time.thread_time()
    for at, end in split_blocks(0, len(blocks), LAYOUT.block_bytes):
        copy_region(pool, source, LAYOUT.block_runs(range(at, end), blocks[at:end]))
    return time.perf_counter() - began, time.thread_time() - cpu_began


def attention(pool: torch.Tensor, context: int, tables: NDArray[np.int32]) -> float:
    """CPU seconds of one decode step's attention."""
    layers, batch = pool.unbind(1), len(tables)
    q = torch.randn(batch, HEADS, LAYOUT.head_dim)
    out = torch.empty_like(q)
    rows = torch.arange(batch, dtype=torch.int32)
    positions = torch.full((batch,), context - 1, dtype=torch.int32)
    began = time.thread_time()
    for layer in layers:
        paged_attention(
            q, layer, torch.from_numpy(tables), rows, positions, out, LAYOUT.head_dim**-0.5, 1
        )
    return time.thread_time() - began


def shown(name: str, values: list[float]) -> str:
    low, middle = min(values) * 1e3, statistics.median(values) * 1e3
    return f"{name:<44} least {low:6.2f} ms, median {middle:6.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt's last chunk")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    count = LAYOUT.blocks_for(args.tokens)
    own = torch.zeros(POOL_BLOCKS * LAYOUT.block_bytes // 4).normal_()
    source = torch.randn(count * LAYOUT.block_bytes // 4)
    with segment(POOL_BLOCKS) as shared, segment(count) as buffer:
        mapped = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_float * (shared.nbytes // 4)).from_address(shared.address)
        )
        pools = {"own": own, "shared": torch.from_numpy(mapped).copy_(own)}
        times: dict[str, list[float]] = {}
        views = {k: p.view(POOL_BLOCKS, *LAYOUT.block_shape) for k, p in pools.items()}
        tables = np.arange(8 * 64, dtype=np.int32).reshape(8, 64)
        runs: list[Callable[[], None]] = []

        def note(name: str, value: float) -> None:
            times.setdefault(name, []).append(value)

        def both_copies() -> None:
            blocks = random.sample(range(POOL_BLOCKS), count)
            wall, cpu = staged(region_of(source), buffer, region_of(own), blocks)
            note("buffer, then pool: until the last block", wall)
            note("buffer, then pool: CPU", cpu)

        def one_copy() -> None:
            blocks = random.sample(range(POOL_BLOCKS), count)
            wall, cpu = straight(region_of(source), shared, blocks)
            note("straight into the pool: until the last block", wall)
            note("straight into the pool: CPU", cpu)

        def attend(name: str) -> Callable[[], None]:
            return lambda: note(f"attention, 8 x 1024, {name} pool: CPU", _attend(views[name]))

        def _attend(pool: torch.Tensor) -> float:
            return attention(pool, 1024, tables)

        runs = [both_copies, one_copy, attend("own"), attend("shared")]
        for _ in range(args.rounds):
            random.shuffle(runs)
            for run in runs:
                run()
        print(f"{count * LAYOUT.block_bytes / 1e6:.1f} MB, {args.rounds} rounds")
        for name in sorted(times):
            print(shown(name, times[name]))


if __name__ == "__main__":
    main()

"""Copies to and from a GPU's memory, as batches on a stream of their own.

The stream first waits for what the model has enqueued, so blocks that were just computed are final
and blocks that were just freed are read no more; the engine goes on meanwhile. Knows nothing of
blocks. cupy_engine.py is CUDA's side of it.
"""

from __future__ import annotations

import threading

from runtime.errors import TransferError
from runtime.kv.copies import CopyEngine, Runs
from runtime.kv.region import Region

# Enqueuing a copy takes the CPU a few microseconds, in which the bus moves about this much: so many
# runs, shorter than that, should be faster as one kernel. A guess: tests/gpu/check.py times both.
MANY = 16
SHORT = 128 << 10


class GpuCopies:
    """PoolCopies of a pool in GPU memory."""

    def __init__(self, pool: Region, engine: CopyEngine) -> None:
        self.pool = pool
        self.engine = engine
        self._mine = threading.local()

    def into(self, source: Region, runs: Runs) -> int:
        return move(self.engine, self.pool, source, runs)

    def out(self, to: Region, runs: Runs) -> int:
        return move(self.engine, to, self.pool, runs)

    def staging(self, nbytes: int) -> Region:
        found: Region | None = getattr(self._mine, "staging", None)
        if found is None or found.nbytes < nbytes:
            found = self._mine.staging = self.engine.pinned(nbytes)
        return Region(found.address, nbytes)


def move(engine: CopyEngine, to: Region, source: Region, runs: Runs) -> int:
    """Copy the runs; returns the bytes once they are in place. Raises TransferError."""
    check_runs(runs, source, to)
    engine.begin()
    nbytes = int(runs[:, 2].sum())
    try:
        many = len(runs) >= MANY and nbytes < len(runs) * SHORT
        if not (many and engine.copy_runs(to.address, source.address, runs)):
            for at, into, length in runs.tolist():
                engine.copy(to.address + into, source.address + at, length)
    finally:
        # Also after an error: what was enqueued must not write later.
        engine.finish()
    return nbytes


def check_runs(runs: Runs, source: Region, to: Region) -> None:
    """Raises TransferError for a run outside of either."""
    starts, lengths = runs[:, :2], runs[:, 2:]
    if (runs < 0).any() or (starts + lengths > (source.nbytes, to.nbytes)).any():
        raise TransferError("a run lies outside of the pool or of the other memory")

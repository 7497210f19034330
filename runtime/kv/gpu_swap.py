"""Copies to and from a GPU's memory, as batches on a stream of their own.

The stream first waits for what the model has enqueued, so blocks that were just computed are final
and blocks that were just freed are read no more; the engine goes on meanwhile. Knows nothing of
blocks. cupy_engine.py is CUDA's side of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from runtime.errors import TransferError
from runtime.kv.copies import CopyEngine, Runs
from runtime.kv.region import Region
from runtime.kv.swap import PIECE_BYTES

# Enqueuing a copy takes the CPU a few microseconds, in which the bus moves about this much: so many
# runs, shorter than that, should be faster as one kernel. A guess: tests/gpu/check.py times both.
MANY = 16
SHORT = 128 << 10


class GpuCopies:
    """PoolCopies of a pool in GPU memory."""

    def __init__(self, pool: Region, engine: CopyEngine) -> None:
        self.pool = pool
        self.engine = engine
        self._lock = threading.Lock()
        self._staging: dict[int, Region] = {}
        """By its address,"""
        self._spare: list[Region] = []
        """and what of it is not lent now."""

    def into(self, source: Region, runs: Runs) -> int:
        return move(self.engine, self.pool, source, runs)

    def out(self, to: Region, runs: Runs) -> int:
        return move(self.engine, to, self.pool, runs)

    @contextlib.contextmanager
    def staging(self, nbytes: int) -> Iterator[Region]:
        with self._lock:
            fits = [region for region in self._spare if region.nbytes >= nbytes]
            if fits:
                self._spare.remove(fits[0])
        # As much as a piece of a copy has, so that nearly all are alike.
        whole = fits[0] if fits else self.engine.pinned(max(nbytes, PIECE_BYTES))
        self._staging[whole.address] = whole
        try:
            yield Region(whole.address, nbytes)
        finally:
            with self._lock:
                self._spare.append(whole)

    def staging_of(self, region: Region) -> Region | None:
        return self._staging.get(region.address)


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

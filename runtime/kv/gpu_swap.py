"""Copies between a GPU's pool and pinned host memory, as batches on a stream of their own.

The stream first waits for what the model has enqueued, so blocks that were just computed are final
and blocks that were just freed are read no more; the engine goes on meanwhile. Knows nothing of
blocks. On a GPU an instance that transfers has one rank, so that runs are whole blocks: plain
copies by the GPU's copy engine, no kernels.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from runtime.errors import ConfigError, TransferError
from runtime.kv.copies import Runs
from runtime.kv.region import Region

_ANY_DIRECTION = 4  # cudaMemcpyDefault: the driver knows which address is where


class CopyEngine(Protocol):
    """What is needed of CUDA. Raises TransferError."""

    def begin(self) -> None:
        """Later copies of this thread start after all that the model has enqueued by now."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue one copy."""

    def finish(self) -> None:
        """Wait until all are done."""

    def pinned(self, nbytes: int) -> Region:
        """Page-locked host memory, kept as long as this object."""


class CupyEngine:
    """CUDA through cupy. Each thread has a stream of its own."""

    def __init__(self, device: int) -> None:
        try:
            import cupy
        except ImportError as e:
            raise ConfigError(
                f"device cuda:{device}: KV transfers need cupy, which is missing here",
                hint="pip install 'pdctl[cuda12]'",
            ) from e
        self._cupy: Any = cupy
        self._device = device
        self._mine = threading.local()
        self._pinned: list[Any] = []

    def begin(self) -> None:
        cuda = self._cupy.cuda
        try:
            cuda.Device(self._device).use()
            if not hasattr(self._mine, "stream"):
                self._mine.stream = cuda.Stream(non_blocking=True)
            enqueued = cuda.Event(disable_timing=True)
            enqueued.record(cuda.Stream.null)  # torch computes on the default stream
            self._mine.stream.wait_event(enqueued)
        except cuda.runtime.CUDARuntimeError as e:
            raise TransferError(f"cuda:{self._device}: {e}") from e

    def copy(self, to: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        try:
            runtime.memcpyAsync(to, source, nbytes, _ANY_DIRECTION, self._mine.stream.ptr)
        except runtime.CUDARuntimeError as e:
            raise TransferError(f"cuda:{self._device}: {e}") from e

    def finish(self) -> None:
        try:
            self._mine.stream.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError as e:
            raise TransferError(f"cuda:{self._device}: {e}") from e

    def pinned(self, nbytes: int) -> Region:
        memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        self._pinned.append(memory)
        return Region(memory.ptr, nbytes)


class GpuCopies:
    """PoolCopies of a pool in GPU memory."""

    def __init__(self, pool: Region, engine: CopyEngine) -> None:
        self._pool = pool
        self._engine = engine
        self._mine = threading.local()

    @property
    def host(self) -> Region | None:
        return None

    def into(self, source: Region, runs: Runs) -> int:
        return self._move(self._pool, source, runs)

    def out(self, to: Region, runs: Runs) -> int:
        return self._move(to, self._pool, runs)

    def staging(self, nbytes: int) -> Region:
        found: Region | None = getattr(self._mine, "staging", None)
        if found is None or found.nbytes < nbytes:
            found = self._mine.staging = self._engine.pinned(nbytes)
        return Region(found.address, nbytes)

    def _move(self, to: Region, source: Region, runs: Runs) -> int:
        _check(runs, source.nbytes, to.nbytes)
        self._engine.begin()
        try:
            for at, into, nbytes in runs.tolist():
                self._engine.copy(to.address + into, source.address + at, nbytes)
        finally:
            # Also after an error: what was enqueued must not write later.
            self._engine.finish()
        return int(runs[:, 2].sum())


def _check(runs: Runs, source_bytes: int, to_bytes: int) -> None:
    starts, lengths = runs[:, :2], runs[:, 2:]
    if (runs < 0).any() or (starts + lengths > (source_bytes, to_bytes)).any():
        raise TransferError("a run lies outside of the pool or of the host memory")

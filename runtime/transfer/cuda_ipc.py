"""Transport between GPUs of one host: prefill maps decode's device pool and copies into it; into
the CPU buffer too, for a request that has no device blocks yet.

One numbering for both: the buffer's blocks, as over the other transports, then the pool's. The
buffer opens as over shm, which proves that it is the same host, and the fence is that of shm: a
process that is dead has no GPU work under way any more.
"""

from __future__ import annotations

from runtime.errors import TransferError
from runtime.kv.copies import CopyEngine, PoolCopies
from runtime.kv.gpu_swap import check_runs, move
from runtime.kv.layout import PoolMap
from runtime.kv.region import Region
from runtime.protocol import GpuPool
from runtime.transfer.base import Runs, Sender
from runtime.transfer.pool_put import by_target
from runtime.transfer.shm import ShmReceiver, ShmSender


def offer_pool(copies: PoolCopies, pool_map: PoolMap) -> GpuPool | None:
    """Decode's pool, for prefill to map; None: it is not a GPU's. Raises TransferError."""
    if copies.engine is None:
        return None
    if pool_map.tp_size > 1:
        raise TransferError("its KV cache is on several GPUs")
    handle, offset = copies.engine.share(copies.pool.address)
    return GpuPool(handle=handle, offset=offset, nbytes=copies.pool.nbytes)


class CudaIpcSender(Sender):
    path = "cuda_ipc"
    put_lands = True
    # A GPU that failed may not say what it still does.
    put_fences = False
    reads_gpu = True

    def __init__(self, buffer: ShmSender, engine: CopyEngine, pool: GpuPool) -> None:
        self._buffer = buffer
        self._engine = engine
        self._mapped: int | None = engine.map(pool.handle)
        self._pool = Region(self._mapped + pool.offset, pool.nbytes)
        self.pool_bytes = pool.nbytes

    @classmethod
    def open(cls, name: str, nbytes: int, engine: CopyEngine, pool: GpuPool) -> CudaIpcSender:
        """Raises TransferError saying why the two cannot be used from here."""
        buffer = ShmSender.open(name, nbytes)
        try:
            return cls(buffer, engine, pool)
        except TransferError:
            buffer.close()
            raise

    def put(self, nonce: int, source: Region, runs: Runs, whole: int) -> int:
        buffer = self._buffer.target()
        into_buffer, into_pool = by_target(runs, buffer.nbytes)
        parts = ((buffer, into_buffer), (self._pool, into_pool))
        for to, part in parts:
            check_runs(part, source, to)
        return sum(move(self._engine, to, source, part) if len(part) else 0 for to, part in parts)

    def abort(self) -> None:
        self._buffer.abort()

    def close(self) -> None:
        self._buffer.close()
        if self._mapped is not None:
            self._engine.unmap(self._mapped)
            self._mapped = None


class CudaIpcReceiver(ShmReceiver):
    path = "cuda_ipc"
    reaches_pool = True

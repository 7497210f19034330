"""Stands in for CUDA where there is no GPU: "device memory" is shared memory, and bytes move only
when the batch is waited for, so that whatever looks too early sees old bytes. So does what the
model has enqueued. The real one is tests/gpu/check.py's.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime._native import PinnedShm, create_pinned_shm, free_pinned_shm, open_pinned_shm
from runtime.errors import TransferError
from runtime.kv.copies import Runs
from runtime.kv.region import Region
from runtime.transfer import gpu_memory

ALLOCATION = 4096
"""What one gets begins so far into an allocation, as torch gives out parts of larger ones."""


class StandIn:
    """A CopyEngine of host memory."""

    def __init__(self, *, fail_at: int = -1, kernels: bool = True) -> None:
        self._mine = threading.local()
        self._kept: list[NDArray[np.uint8]] = []
        self._fail_at = fail_at
        self._kernels = kernels
        self._mapped: dict[int, PinnedShm] = {}
        self.enqueued: list[Callable[[], object]] = []
        """What the model has enqueued and the GPU has not done."""
        self.exported: Callable[[int, int], int] = _no_export
        self.moved = 0
        self.launched = 0
        self.seen = 0
        """How often it was made to see what other devices have written."""

    def begin(self) -> None:
        assert not getattr(self._mine, "enqueued", None), "the batch before was not waited for"
        self.await_model()
        self._mine.enqueued = []

    def copy(self, to: int, source: int, nbytes: int) -> None:
        if len(self._mine.enqueued) == self._fail_at:
            raise TransferError("cuda:0: stand-in failure")
        self._mine.enqueued.append((to, source, nbytes))

    def copy_runs(self, to: int, source: int, runs: Runs) -> bool:
        if not self._kernels:
            return False
        self.launched += 1
        for at, into, nbytes in runs.tolist():
            self.copy(to + into, source + at, nbytes)
        return True

    def finish(self) -> None:
        for to, source, nbytes in self._mine.enqueued:
            ctypes.memmove(to, source, nbytes)
            self.moved += nbytes
        self._mine.enqueued = []

    def pinned(self, nbytes: int) -> Region:
        memory = np.zeros(nbytes, dtype=np.uint8)
        self._kept.append(memory)
        return Region(memory.ctypes.data, nbytes)

    def share(self, address: int) -> tuple[bytes, int]:
        segment = _DEVICE.get(address - ALLOCATION)
        if segment is None:
            raise TransferError("cuda:0: stand-in failure: not device memory")
        return f"{segment.name} {segment.nbytes}".encode(), ALLOCATION

    def map(self, handle: bytes) -> int:
        name, nbytes = handle.decode().split()
        try:
            segment = open_pinned_shm(name, int(nbytes))
        except OSError as e:
            raise TransferError(f"cuda:0: stand-in failure: {e}") from e
        self._mapped[segment.address] = segment
        return segment.address

    def unmap(self, address: int) -> None:
        free_pinned_shm(self._mapped.pop(address), unlink=False)

    def await_model(self) -> None:
        while self.enqueued:
            self.enqueued.pop(0)()

    def export(self, address: int, nbytes: int) -> int:
        return self.exported(address, nbytes)

    def see_remote_writes(self) -> None:
        self.seen += 1


def _no_export(address: int, nbytes: int) -> int:
    raise TransferError("cuda:0: stand-in failure: no dmabuf")


@contextlib.contextmanager
def peermem() -> Iterator[None]:
    """As if nvidia-peermem were loaded. What stands in for device memory is registered by its
    address without it.
    """
    before = gpu_memory.MODULES
    with tempfile.TemporaryDirectory() as folder:
        gpu_memory.MODULES = Path(folder)
        (gpu_memory.MODULES / "nvidia_peermem").mkdir()
        try:
            yield
        finally:
            gpu_memory.MODULES = before


_DEVICE: dict[int, PinnedShm] = {}


def device_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeros that `StandIn.share` can share, until `free_device_memory`."""
    segment = create_pinned_shm(f"pdctl-test-gpu-{secrets.token_hex(6)}", nbytes + ALLOCATION)
    _DEVICE[segment.address] = segment
    address = segment.address + ALLOCATION
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def free_device_memory(memory: NDArray[np.uint8]) -> None:
    """Nothing may look at it any more."""
    free_pinned_shm(_DEVICE.pop(memory.ctypes.data - ALLOCATION), unlink=True)

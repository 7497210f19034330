"""Copies between the device pool and other memory: the interfaces, and the pool that the CPU
reaches itself; gpu_swap.py has the one on a GPU.

Calls block, so they belong on the threads of kv.swap.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.kv.region import Region
from runtime.kv.swap import copy_region

Runs = NDArray[np.int64]


class CopyEngine(Protocol):
    """What is needed of CUDA. Addresses may be of this GPU, of one that it reaches, or of the host.
    Raises TransferError.
    """

    def begin(self) -> None:
        """Later copies of this thread start after all that the model has enqueued by now."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueue one copy."""

    def copy_runs(self, to: int, source: int, runs: Runs) -> bool:
        """Enqueue them all as one kernel, or say that kernels do not reach this memory."""

    def finish(self) -> None:
        """Wait until all are done."""

    def pinned(self, nbytes: int) -> Region:
        """Page-locked host memory, kept as long as this object."""

    def share(self, address: int) -> tuple[bytes, int]:
        """A handle with which other processes of this host may map the GPU's allocation that the
        address lies in, and how far into it.
        """

    def map(self, handle: bytes) -> int:
        """Where the allocation of another process begins here."""

    def unmap(self, address: int) -> None:
        """Nothing of this process writes there any more."""

    def await_model(self) -> None:
        """Wait until the GPU has done all that the model has enqueued by now."""

    def export(self, address: int, nbytes: int) -> int:
        """A dmabuf descriptor of GPU memory, for another device to reach: whole pages of the host.
        The caller closes it.
        """

    def see_remote_writes(self) -> None:
        """Kernels launched after this see all that other devices have written into the GPU's memory
        by now. It fails where CUDA cannot promise that.
        """


class PoolCopies(Protocol):
    """The copies return only when the bytes are in place, and raise TransferError."""

    @property
    def pool(self) -> Region:
        """On the device."""

    @property
    def engine(self) -> CopyEngine | None:
        """What reaches the pool where the CPU does not; None: the CPU does."""

    def into(self, source: Region, runs: Runs) -> int:
        """From host memory into the pool; returns the bytes."""

    def out(self, to: Region, runs: Runs) -> int:
        """From the pool into host memory; returns the bytes."""

    def staging(self, nbytes: int) -> AbstractContextManager[Region]:
        """Pinned host memory, for what has to leave the pool on its way to elsewhere. It is lent
        again and again, and stays for good.
        """

    def staging_of(self, region: Region) -> Region | None:
        """The whole of the staging memory that was lent as this region; None: it was not."""


class HostCopies:
    engine = None

    def __init__(self, pool: Region) -> None:
        self.pool = pool

    def into(self, source: Region, runs: Runs) -> int:
        return copy_region(self.pool, source, runs)

    def out(self, to: Region, runs: Runs) -> int:
        return copy_region(to, self.pool, runs)

    def staging(self, nbytes: int) -> AbstractContextManager[Region]:
        raise AssertionError("a pool in host memory needs no staging")

    def staging_of(self, region: Region) -> Region | None:
        return None

"""Copies between the device pool and host memory: one interface, chosen by the device.

`HostCopies` is for a pool that the CPU reaches itself; gpu_swap.py has the one for a GPU. Calls
block, so they belong on the threads of kv.swap.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.kv.region import Region
from runtime.kv.swap import copy_region

Runs = NDArray[np.int64]


class PoolCopies(Protocol):
    """All methods return only when the bytes are in place, and raise TransferError."""

    @property
    def host(self) -> Region | None:
        """The pool, where the CPU can read it; None on a GPU."""

    def into(self, source: Region, runs: Runs) -> int:
        """From host memory into the pool; returns the bytes."""

    def out(self, to: Region, runs: Runs) -> int:
        """From the pool into host memory; returns the bytes."""

    def staging(self, nbytes: int) -> Region:
        """Pinned host memory of the calling thread, reused by its next call: for what has to leave
        the pool on its way to elsewhere.
        """


class HostCopies:
    def __init__(self, pool: Region) -> None:
        self._pool = pool

    @property
    def host(self) -> Region | None:
        return self._pool

    def into(self, source: Region, runs: Runs) -> int:
        return copy_region(self._pool, source, runs)

    def out(self, to: Region, runs: Runs) -> int:
        return copy_region(to, self._pool, runs)

    def staging(self, nbytes: int) -> Region:
        raise AssertionError("a pool in host memory needs no staging")

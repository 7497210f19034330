"""The KV pools of all ranks of an instance on a CPU, in one anonymous memory file.

Rank 0 maps all of it, so that one hand-over moves the KV of every rank; each other rank maps its
own pool. The file has no name and is gone with the last process that has it.
"""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from runtime.errors import ConfigError
from runtime.kv.layout import PoolMap


def reserve_pools(fd: int, pools: PoolMap) -> None:
    """Really take the memory: too little is an error here, not a SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, pools.nbytes)
    except OSError as e:
        raise ConfigError(
            f"kv_cache: {pools.nbytes:,} bytes for {pools.tp_size} ranks: {e.strerror or e}",
            hint="give kv_cache fewer bytes",
        ) from e


def map_pool(fd: int, pools: PoolMap, rank: int) -> Tensor:
    """One rank's pool, as bytes."""
    view = mmap.mmap(fd, pools.rank_stride, offset=rank * pools.rank_stride)
    return torch.frombuffer(view, dtype=torch.uint8)


def map_all(fd: int, pools: PoolMap) -> Tensor:
    """All ranks' pools, as bytes."""
    return torch.frombuffer(mmap.mmap(fd, pools.nbytes), dtype=torch.uint8)

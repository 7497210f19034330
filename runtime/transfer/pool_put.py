"""Puts out of the device pool, wherever that is, and into decode's."""

from __future__ import annotations

import numpy as np

from runtime.kv.copies import PoolCopies
from runtime.transfer.base import Runs, Sender


def pool_put(sender: Sender, copies: PoolCopies, nonce: int, runs: Runs, whole: int) -> int:
    """As `Sender.put` from the pool: by itself where the sender reaches the pool; else straight
    from the GPU to where the sender writes, or by way of pinned memory.
    """
    if copies.engine is None or sender.reads_gpu:
        return sender.put(nonce, copies.pool, runs, whole)
    if (target := sender.target()) is not None:
        return copies.out(target, runs)
    lengths = runs[:, 2]
    at = np.cumsum(lengths) - lengths
    with copies.staging(int(lengths.sum())) as staging:
        copies.out(staging, np.stack([runs[:, 0], at, lengths], axis=1))
        staged = np.stack([at, runs[:, 1], lengths], axis=1)
        return sender.put(nonce, staging, staged, whole)


def by_target(runs: Runs, buffer_bytes: int) -> tuple[Runs, Runs]:
    """The runs into decode's buffer, and those into the device pool that is numbered after it,
    counted from its beginning.
    """
    in_pool = runs[:, 1] >= buffer_bytes
    pooled: Runs = runs[in_pool] - np.array([0, buffer_bytes, 0], dtype=np.int64)
    return runs[~in_pool], pooled

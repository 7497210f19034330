"""A put out of the device pool, wherever that is."""

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
    staging = copies.staging(int(lengths.sum()))
    copies.out(staging, np.stack([runs[:, 0], at, lengths], axis=1))
    staged = np.stack([at, runs[:, 1], lengths], axis=1)
    return sender.put(nonce, staging, staged, whole)

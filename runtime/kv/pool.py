"""The device pool: one tensor of KV blocks, and who holds which block.

Owns the memory and the reference counts. A free block may still hold a reusable prefix; such blocks
are given out last, oldest first. Knows no requests and no hashes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from runtime.errors import ConfigError
from runtime.kv.layout import KvLayout
from runtime.kv.region import Region


class KvPool:
    """`layers[i]` is layer i's strided view [blocks, 2, kv_heads, tokens, head_dim]."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, memory: Tensor | None = None
    ) -> None:
        """`memory`: shared bytes that begin with this pool; its own when left out.

        Raises ConfigError.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        nbytes = num_blocks * layout.block_bytes
        self._memory = _allocate(nbytes, device) if memory is None else memory
        pool = self._memory[:nbytes].view(getattr(torch, layout.dtype))
        shape = (num_blocks, *layout.block_shape)
        self.layers: tuple[Tensor, ...] = pool.view(shape).unbind(1)

    @property
    def region(self) -> Region:
        """All the memory, with what follows this pool in it."""
        return Region(self._memory.data_ptr(), self._memory.nbytes)


def pool_blocks(layout: KvLayout, nbytes: int, ranks: int = 1) -> int:
    """Blocks of a pool, when all ranks' pools together have `nbytes`. Raises ConfigError."""
    size = layout.block_bytes * ranks
    if (count := nbytes // size) < 2:
        raise ConfigError(
            f"kv_cache of {nbytes:,} bytes holds {count} blocks of "
            f"{size:,} bytes, and at least 2 are needed",
            hint=f"give kv_cache {2 * size:,} bytes or more",
        )
    return count


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as e:
        raise ConfigError(
            f"kv_cache: {nbytes:,} bytes cannot be allocated on {device}",
            hint="give kv_cache fewer bytes",
        ) from e


class BlockAllocator:
    """Reference counts of blocks. Not for two threads at once: BlockCache has the lock."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        """`on_evict` is told each block whose reusable content is about to be overwritten."""
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, reusable; oldest first
        self._reusable = [False] * num_blocks
        self._on_evict = on_evict

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that have reusable content."""
        return len(self._cached)

    @property
    def held(self) -> int:
        return len(self._references) - self.available

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None when there are not so many."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def retain(self, block: int) -> None:
        """One more reference to a block that is held, or free with reusable content."""
        if self._references[block] == 0:
            assert block in self._cached, f"block {block} is free and holds nothing"
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less for each. Of blocks that become free, the first is reused last."""
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} is released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._reusable[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def mark_reusable(self, block: int) -> None:
        """The content of this held block is worth keeping after its release."""
        assert self._references[block] > 0, f"block {block} is not held"
        self._reusable[block] = True

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._reusable[block] = False
        self._on_evict(block)
        return block

    def _take(self) -> int:
        block = self._free.popleft() if self._free else self._evict()
        assert self._references[block] == 0, f"block {block} is free and held"
        self._references[block] = 1
        return block

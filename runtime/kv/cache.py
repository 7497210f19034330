"""The device pool's blocks and the prefixes they hold, as one thing that two threads may use.

The engine thread claims, grows and indexes; on a decode instance the asyncio thread claims blocks
for a request before it asks for its KV. One lock makes a match and its references one step: no
block is evicted between them. Knows no sequences and no memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.kv.pool import BlockAllocator
from runtime.kv.prefix import PrefixIndex


@dataclass(frozen=True, slots=True)
class Claim:
    """Blocks with one reference each, in prompt order; the first `cached` hold their KV already."""

    blocks: tuple[int, ...]
    cached: int


class BlockCache:
    """Every method takes the lock for microseconds and may be called from any thread."""

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        self._index = PrefixIndex()
        self._blocks = BlockAllocator(num_blocks, self._index.remove)
        self.num_blocks = num_blocks

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        with self._lock:
            return self._blocks.available

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and that hold a prefix."""
        with self._lock:
            return self._blocks.cached

    @property
    def held(self) -> int:
        with self._lock:
            return self._blocks.held

    def claim(
        self, hashes: Sequence[bytes], count: int, *, spare: int = 0, most_new: int | None = None
    ) -> Claim | None:
        """`count` blocks, leading ones from the cache as far as `hashes` match.

        None, and nothing changes, when fewer than `spare` would be left, or when more than
        `most_new` of them would not hold their KV yet.
        """
        with self._lock:
            shared = self._index.match(hashes[:count])
            new = count - len(shared)
            if most_new is not None and new > most_new:
                return None
            for block in shared:
                self._blocks.retain(block)
            own = None
            if new + spare <= self._blocks.available:
                own = self._blocks.allocate(new)
            if own is None:
                self._blocks.release(shared)
                return None
            return Claim((*shared, *own), len(shared))

    def allocate(self) -> int | None:
        """One more block for who has some already."""
        with self._lock:
            got = self._blocks.allocate(1)
            return got[0] if got else None

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less for each. Of blocks that become free, the first is reused last."""
        with self._lock:
            self._blocks.release(blocks)

    def index(self, full: Iterable[tuple[bytes, int]]) -> None:
        """These held blocks hold the prefixes of these hashes, for others to find."""
        with self._lock:
            for digest, block in full:
                if self._index.insert(digest, block):
                    self._blocks.mark_reusable(block)

"""Decode's CPU buffer: one segment of pinned shared memory, handed out in blocks.

Owns which block is free, reserved or quarantined. A block is never free while a remote writer may
still write to it or a copy reads it. A reservation may also be of device blocks: who lends them
gets them back under the same rule. On a CPU the segment begins with the device pool. Knows nothing
of peers, queues or requests: nonces name reservations. For the asyncio thread only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from runtime._native import PinnedShm, create_pinned_shm, free_pinned_shm
from runtime.errors import ConfigError
from runtime.kv.region import Region


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks for one nonce. Changed by CpuBuffer only."""

    nonce: int
    blocks: tuple[int, ...]
    freed: int = 0
    """The first `freed` blocks hold their final bytes, were copied out, and are free again."""
    writer_open: bool = True
    """A remote process may still write into the blocks that are not freed."""
    wanted: bool = True
    reading: bool = False
    """A copy out of the blocks is queued or running."""
    give_back: Callable[[], None] | None = None
    """The blocks are lent: called once when nobody wants them and nobody writes them any more."""

    @property
    def held(self) -> int:
        return len(self.blocks) - self.freed

    @property
    def quarantined(self) -> int:
        """Blocks that nobody wants and that may still be written. Lent ones go back all at once."""
        if self.wanted or not self.writer_open:
            return 0
        return len(self.blocks) if self.give_back else self.held


class CpuBuffer:
    """`on_free` is called after blocks became free."""

    def __init__(self, segment: PinnedShm, block_bytes: int, pool_blocks: int = 0) -> None:
        """The first `pool_blocks` of the segment are the device pool's."""
        self._segment = segment
        self.block_bytes = block_bytes
        self.pool_blocks = pool_blocks
        self.num_blocks = segment.nbytes // block_bytes - pool_blocks
        # A heap: the lowest blocks first keeps reservations in long runs and the memory in use
        # small.
        self._free = list(range(pool_blocks, pool_blocks + self.num_blocks))
        self._open: dict[int, Reservation] = {}
        self.on_free: Callable[[], None] = _nothing

    @classmethod
    def create(cls, name: str, nbytes: int, block_bytes: int, pool_blocks: int = 0) -> CpuBuffer:
        """Raises ConfigError when the memory cannot be had; nothing is left then."""
        if nbytes < block_bytes:
            raise ConfigError(
                f"cpu_buffer of {nbytes} bytes holds no block of {block_bytes} bytes",
                hint="make cpu_buffer larger",
            )
        try:
            blocks = pool_blocks + nbytes // block_bytes
            segment = create_pinned_shm(name, blocks * block_bytes)
        except OSError as e:
            raise ConfigError(
                f"cpu_buffer: {e.strerror or e}",
                hint="make cpu_buffer smaller or /dev/shm larger",
            ) from e
        return cls(segment, block_bytes, pool_blocks)

    @property
    def name(self) -> str:
        return self._segment.name

    @property
    def nbytes(self) -> int:
        return self._segment.nbytes

    @property
    def region(self) -> Region:
        """All of the segment: block b, of the pool or the buffer, is at b * block_bytes."""
        return Region(self._segment.address, self._segment.nbytes)

    @property
    def pool_region(self) -> Region:
        """The device pool's part, at the beginning."""
        return Region(self._segment.address, self.pool_blocks * self.block_bytes)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def reservations(self) -> int:
        return len(self._open)

    @property
    def quarantined_blocks(self) -> int:
        return sum(r.quarantined for r in self._open.values())

    def reserve(self, nonce: int, count: int) -> Reservation | None:
        """`count` blocks, or None when there are not so many now. None at all may be needed."""
        assert nonce not in self._open and count >= 0
        if count > len(self._free):
            return None
        blocks = tuple(heapq.heappop(self._free) for _ in range(count))
        reservation = Reservation(nonce, blocks)
        self._open[nonce] = reservation
        return reservation

    def lend(
        self, reservation: Reservation, blocks: tuple[int, ...], give_back: Callable[[], None]
    ) -> None:
        """A reservation of nothing becomes one of these, which are not the buffer's."""
        own = range(self.pool_blocks, self.pool_blocks + self.num_blocks)
        assert not reservation.blocks and not any(block in own for block in blocks)
        reservation.blocks = blocks
        reservation.give_back = give_back

    def copied(self, reservation: Reservation, count: int) -> None:
        """The first `count` blocks hold final bytes and were copied out: they are free."""
        self._free_up_to(reservation, count)
        self._settle(reservation)

    def set_reading(self, reservation: Reservation, reading: bool) -> None:
        """Whether a copy out of the blocks is queued or running."""
        reservation.reading = reading
        self._settle(reservation)

    def close_writer(self, reservation: Reservation) -> None:
        """Proven: nothing remote writes into these blocks any more (terminal message or fence)."""
        reservation.writer_open = False
        self._settle(reservation)

    def abandon(self, reservation: Reservation) -> None:
        """Nobody wants the bytes. Free now, or quarantined until the writer is closed."""
        reservation.wanted = False
        self._settle(reservation)

    def close(self) -> None:
        """Unmap and unlink. Nothing may be copying, or computing in the pool, any more."""
        free_pinned_shm(self._segment, unlink=True)

    def _settle(self, reservation: Reservation) -> None:
        if reservation.writer_open or reservation.reading:
            return
        if not reservation.wanted:
            self._free_up_to(reservation, len(reservation.blocks))
            if give_back := reservation.give_back:
                reservation.give_back = None
                give_back()
        if reservation.held == 0:
            self._open.pop(reservation.nonce, None)

    def _free_up_to(self, reservation: Reservation, count: int) -> None:
        freed = reservation.blocks[reservation.freed : count]
        if not freed:
            return
        reservation.freed = count
        if reservation.give_back:
            return
        for block in freed:
            heapq.heappush(self._free, block)
        self.on_free()


def _nothing() -> None:
    pass

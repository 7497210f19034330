"""Who gets room in decode's CPU buffer, and when a lost writer's blocks may be used again.

Owns the first-come-first-served queue for blocks and the quarantine of sessions that ended with
blocks still open to their writer. Knows sessions only by their receiver. For the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.kv.buffer import CpuBuffer, Reservation
from runtime.transfer.base import Receiver

_log = logging.getLogger(__name__)

# A killed process takes a moment to vanish after its connections closed; then every look is one
# read of /proc.
_FENCE_POLL_S = 0.05


@dataclass(slots=True, eq=False)
class Waiter:
    """`needs(free)` is asked, each time it is first in the queue and things changed, for how many
    blocks it wants when `free` are free; what it claims elsewhere for a number up to `free` is its
    own, for `granted` follows at once. `granted` is called once, unless the waiter left before.
    """

    needs: Callable[[int], int]
    granted: Callable[[Reservation], None]


@dataclass(slots=True, eq=False)
class Writer:
    """One session's write access: the reservations that its prefill instance may write into."""

    peer: str
    incarnation: str
    receiver: Receiver
    open: dict[int, Reservation] = field(default_factory=dict)
    unwanted: dict[int, float] = field(default_factory=dict)
    """Of the open ones, those that nobody wants any more, oldest first, and since when."""
    lost: bool = False

    def overdue(self, since: float) -> bool:
        """Blocks are unwanted since then or longer, and still open to it."""
        return bool(self.unwanted) and next(iter(self.unwanted.values())) <= since


class Reservations:
    def __init__(self, buffer: CpuBuffer, loop: asyncio.AbstractEventLoop) -> None:
        self._buffer = buffer
        self._loop = loop
        self._queue: deque[Waiter] = deque()
        self._lost: list[Writer] = []
        self._poll: asyncio.TimerHandle | None = None
        self._next_nonce = 0
        buffer.on_free = self.pump

    @property
    def buffer(self) -> CpuBuffer:
        return self._buffer

    @property
    def waiting(self) -> int:
        return len(self._queue)

    # ---- room -----------------------------------------------------------------------------------

    def join(self, waiter: Waiter, *, first: bool = False) -> None:
        """Queue for blocks; granted at once when it is this waiter's turn and there is room.

        Only the head of the queue is ever served, so that small requests cannot starve a large one.
        """
        if first:
            self._queue.appendleft(waiter)
        else:
            self._queue.append(waiter)
        self.pump()

    def leave(self, *waiters: Waiter) -> None:
        """Stop waiting. A waiter that is not queued any more is ignored."""
        self._queue = deque(waiter for waiter in self._queue if waiter not in waiters)
        self.pump()

    def take_spare(self, count: int) -> Reservation | None:
        """Free blocks that nobody waits for, to be written by this process alone."""
        if self._queue:
            return None
        reservation = self._buffer.reserve(self._next_nonce + 1, count)
        if reservation:
            self._next_nonce += 1
        return reservation

    def give_back(self, reservation: Reservation) -> None:
        """Blocks that no peer was told of."""
        self._buffer.close_writer(reservation)
        self._buffer.abandon(reservation)

    def pump(self) -> None:
        """Serve who can be served; called whenever what `needs` looks at may have changed for the
        better.
        """
        while self._queue:
            count = self._queue[0].needs(self._buffer.free_blocks)
            reservation = self._buffer.reserve(self._next_nonce + 1, count)
            if reservation is None:
                return
            self._next_nonce += 1
            self._queue.popleft().granted(reservation)

    # ---- writers --------------------------------------------------------------------------------

    def open_for(self, writer: Writer, reservation: Reservation) -> None:
        """The peer is about to be told of these blocks."""
        writer.open[reservation.nonce] = reservation
        writer.receiver.expect(reservation.nonce, reservation.blocks)

    def terminal(self, writer: Writer, nonce: int) -> None:
        """The peer said that it will not write for this nonce again."""
        writer.unwanted.pop(nonce, None)
        if reservation := writer.open.pop(nonce, None):
            self._buffer.close_writer(reservation)

    def abandon(self, writer: Writer, reservation: Reservation) -> None:
        """Nobody wants the bytes: free what can be proven safe, quarantine the rest."""
        # Fence first, then free: what is free may be granted to another writer before this returns.
        if writer.receiver.revoke(reservation.nonce):
            self.terminal(writer, reservation.nonce)
        elif reservation.nonce in writer.open:
            writer.unwanted.setdefault(reservation.nonce, self._loop.time())
        self._buffer.abandon(reservation)

    def lose(self, writer: Writer) -> None:
        """The session ended; `abandon` was called for what it had under way."""
        writer.lost = True
        writer.receiver.close()
        if self._fence_if_gone(writer):
            return
        _log.warning(
            "%s: %d blocks quarantined until their writer is proven gone",
            writer.peer,
            sum(r.quarantined for r in writer.open.values()),
        )
        self._lost.append(writer)
        self._watch()

    def welcomed(self, peer: str, incarnation: str) -> None:
        """A new session of this incarnation is open: all writes of its older ones have ended."""
        for writer in list(self._lost):
            if writer.peer == peer and writer.incarnation == incarnation:
                self._fence(writer)

    def close(self) -> None:
        if self._poll:
            self._poll.cancel()

    def _watch(self) -> None:
        if self._poll is None and self._lost:
            self._poll = self._loop.call_later(_FENCE_POLL_S, self._look)

    def _look(self) -> None:
        self._poll = None
        for writer in list(self._lost):
            self._fence_if_gone(writer)
        self._watch()

    def _fence_if_gone(self, writer: Writer) -> bool:
        if writer.open and not writer.receiver.writer_gone():
            return False
        self._fence(writer)
        return True

    def _fence(self, writer: Writer) -> None:
        if writer in self._lost:
            self._lost.remove(writer)
        for nonce in list(writer.open):
            self.terminal(writer, nonce)

"""Copy threads. A lane runs copies one after another, off the asyncio and the engine thread.

Owns the order, cancelling between pieces and the count of what is under way. Does not know what a
piece moves or where: a piece is a call that blocks and gives up the interpreter lock while it
copies.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime._native import copy_runs
from runtime.errors import TransferError
from runtime.kv.region import Region

_log = logging.getLogger(__name__)

Piece = Callable[[], object]
Post = Callable[[Callable[[], None]], None]
"""Runs a call on the asyncio thread, soon and in order (Mailbox.post)."""

PIECE_BYTES = 4 << 20
"""About this much is copied between two looks at `cancel`, and before the next stage may start on
it.
"""


def split_blocks(start: int, stop: int, block_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) cut into ranges of about PIECE_BYTES, at least one block each."""
    step = max(1, PIECE_BYTES // block_bytes)
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def copy_region(to: Region, source: Region, runs: NDArray[np.int64]) -> int:
    """Copy the runs on this thread. Raises TransferError for a run outside of either region."""
    try:
        return copy_runs(to.address, to.nbytes, source.address, source.nbytes, runs)
    except ValueError as e:
        raise TransferError(str(e)) from e


class Copy:
    """Pieces in order. Made, cancelled and reported to on the asyncio thread.

    `on_piece(n)` after n pieces are done; `on_end(error)` exactly once, last, also when cancelled:
    from then on nothing of this copy runs. Cancelled copies end with error None.
    """

    __slots__ = ("_cancelled", "_on_end", "_on_piece", "_pieces")

    def __init__(
        self,
        pieces: Sequence[Piece],
        on_piece: Callable[[int], None],
        on_end: Callable[[TransferError | None], None],
    ) -> None:
        self._pieces = pieces
        self._on_piece = on_piece
        self._on_end = on_end
        self._cancelled = False

    def cancel(self) -> None:
        """Do not start the next piece. One that runs is finished."""
        self._cancelled = True

    def run(self, post: Post, done: Callable[[Copy], None]) -> None:
        """On the lane's thread."""
        error: TransferError | None = None
        try:
            for number, piece in enumerate(self._pieces, start=1):
                if self._cancelled:
                    break
                piece()
                if number < len(self._pieces):
                    post(lambda n=number: self._on_piece(n))  # type: ignore[misc]
        except TransferError as e:
            error = e
        except Exception as e:
            # Boundary of one copy: whatever went wrong fails this request, not the lane.
            _log.exception("a copy failed")
            error = TransferError(f"copy failed: {e}")
        finished = error is None and not self._cancelled
        post(lambda: self._end(finished, error, done))

    def _end(
        self, finished: bool, error: TransferError | None, done: Callable[[Copy], None]
    ) -> None:
        done(self)
        pieces, on_piece, on_end = self._pieces, self._on_piece, self._on_end
        # Who made this copy keeps it, and these keep who made it: were they not let go of here, all
        # that belongs to a request would wait for a full run of the cycle collector, which is rare.
        self._pieces, self._on_piece, self._on_end = (), _nothing, _nothing
        if finished:
            # With the end, not before it: one turn of the loop less on the path to the first decode
            # step.
            on_piece(len(pieces))
        on_end(error)


def _nothing(_: object) -> None:
    pass


class CopyLane:
    """One thread and its queue. All methods are for the asyncio thread."""

    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._queue: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._open: set[Copy] = set()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Copies queued or running."""
        return len(self._open)

    def submit(self, copy: Copy) -> None:
        self._open.add(copy)
        self._queue.put(copy)

    def close(self) -> None:
        """Cancel all; the thread ends after the piece that runs. Every copy gets its on_end."""
        for copy in self._open:
            copy.cancel()
        self._queue.put(None)

    async def wait_closed(self, timeout_s: float) -> bool:
        """After `close`: whether the thread has ended, so that nothing is copied any more."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            copy.run(self._post, self._open.discard)
        self._post(self._stopped.set)


@dataclass(frozen=True, slots=True)
class SwapLanes:
    """A lane for each direction between buffer and pool: a request that has to make room does not
    queue behind those that come in.
    """

    swap_in: CopyLane
    swap_out: CopyLane

    @classmethod
    def start(cls, post: Post) -> SwapLanes:
        return cls(CopyLane("kv-swap-in", post), CopyLane("kv-swap-out", post))

    async def close(self, timeout_s: float) -> None:
        """Cancel all; wait for the pieces that run."""
        for lane in (self.swap_in, self.swap_out):
            lane.close()
        for lane in (self.swap_in, self.swap_out):
            await lane.wait_closed(timeout_s)

"""Stage swap_in: blocks that have landed in the CPU buffer go to the device pool, beside the
decoding of others.

Owns the copies of a request and when its buffer blocks are free. For the asyncio thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from runtime.engine.contract import Adopted, EngineControl
from runtime.errors import TransferError
from runtime.kv.buffer import CpuBuffer
from runtime.kv.swap import Copy, CopyLane, split_blocks
from runtime.transfer.decode_request import DecodeRequest, Landing


class SwapIn:
    """`on_copied(request)` after more blocks are in the pool; `on_end(request, error)` after each
    copy.
    """

    def __init__(
        self,
        engine: EngineControl,
        buffer: CpuBuffer,
        lane: CopyLane,
        on_copied: Callable[[DecodeRequest], None],
        on_end: Callable[[DecodeRequest, TransferError | None], None],
    ) -> None:
        self._engine = engine
        self._buffer = buffer
        self._lane = lane
        self._on_copied = on_copied
        self._on_end = on_end

    @property
    def pending(self) -> int:
        return self._lane.pending

    def place(self, request: DecodeRequest, adopted: Adopted) -> None:
        """It has device blocks for all that lands; the first `cached` need no copy."""
        landing = request.landing
        assert landing is not None
        landing.device = adopted.blocks
        if adopted.cached:
            landing.queued = adopted.cached
            self._copied(request, landing, adopted.cached)
        self.advance(request)

    def advance(self, request: DecodeRequest) -> None:
        """See to what has landed and has a place to go."""
        landing = request.landing
        if landing is None or landing.device is None or landing.queued == landing.landed:
            return
        if landing.direct:
            self._landed_in_place(request, landing)
        else:
            self._copy(request, landing, landing.device)

    def _landed_in_place(self, request: DecodeRequest, landing: Landing) -> None:
        landing.queued = landing.copied = landing.landed
        if landing.done:
            self._buffer.copied(landing.reservation, landing.blocks)
        self._on_copied(request)

    def _copy(self, request: DecodeRequest, landing: Landing, device: tuple[int, ...]) -> None:
        """Copies of one request follow each other."""
        reservation = landing.reservation
        cuts = split_blocks(landing.queued, landing.landed, self._buffer.block_bytes)
        landing.queued = landing.landed
        source, copies, pool_map = self._buffer.region, self._engine.copies, self._engine.pool_map

        def piece(at: int, end: int) -> None:
            runs = pool_map.scatter(reservation.blocks[at:end], device[at:end])
            copies.into(source, runs)

        copy = Copy(
            [partial(piece, at, end) for at, end in cuts],
            lambda done: self._copied(request, landing, cuts[done - 1][1]),
            lambda error: self._ended(request, landing, copy, error),
        )
        request.copies.add(copy)
        self._buffer.set_reading(reservation, True)
        self._lane.submit(copy)

    def cancel(self, request: DecodeRequest) -> None:
        """Start no further piece; `on_end` still comes for what is under way."""
        for copy in request.copies:
            copy.cancel()

    def _copied(self, request: DecodeRequest, landing: Landing, blocks: int) -> None:
        landing.copied = blocks
        self._buffer.copied(landing.reservation, blocks)
        self._on_copied(request)

    def _ended(
        self, request: DecodeRequest, landing: Landing, copy: Copy, error: TransferError | None
    ) -> None:
        request.copies.discard(copy)
        if not request.copies:
            self._buffer.set_reading(landing.reservation, False)
        self._on_end(request, error)

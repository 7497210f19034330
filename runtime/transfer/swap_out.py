"""A decoding request makes room: its KV goes from the device pool into free blocks of the CPU
buffer, and comes back the way that KV from prefill does.

Only blocks that nobody waits for are taken, so that swapping never holds up a hand-over for good,
nor a hand-over swapping: without such blocks the engine computes the KV again. For the asyncio
thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from runtime.engine.contract import EngineControl, SwapOut
from runtime.errors import TransferError
from runtime.kv.buffer import Reservation
from runtime.kv.swap import Copy, CopyLane, split_blocks
from runtime.transfer.accounts import Accounts
from runtime.transfer.decode_request import DecodeRequest, Landing
from runtime.transfer.reservations import Reservations


class SwapOuts:
    """`on_end(request)` after the copies of a request that is over."""

    def __init__(
        self,
        engine: EngineControl,
        reservations: Reservations,
        lane: CopyLane,
        accounts: Accounts,
        on_end: Callable[[DecodeRequest], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._reservations = reservations
        self._buffer = reservations.buffer
        self._lane = lane
        self._accounts = accounts
        self._on_end = on_end

    @property
    def pending(self) -> int:
        return self._lane.pending

    def start(self, request: DecodeRequest, event: SwapOut) -> None:
        """Save what the blocks hold, or tell the engine that there is no place for it."""
        reservation = self._reservations.take_spare(len(event.blocks))
        if reservation is None:
            self._accounts.no_room_to_swap()
            self._engine.swapped_out(event.id, kept=False)
            return
        began = self._loop.time()
        cuts = split_blocks(0, len(event.blocks), self._buffer.block_bytes)
        to, copies, pool_map = self._buffer.region, self._engine.copies, self._engine.pool_map

        def piece(at: int, end: int) -> None:
            copies.out(to, pool_map.gather(event.blocks[at:end], reservation.blocks[at:end]))

        copy = Copy(
            [partial(piece, at, end) for at, end in cuts],
            lambda _: None,
            lambda error: self._ended(request, reservation, copy, error, began),
        )
        request.copies.add(copy)
        self._lane.submit(copy)

    def back(self, request: DecodeRequest) -> None:
        """All that was kept is in device blocks again."""
        self._accounts.swapped_back(self._loop.time() - request.away_since)
        request.away_since = 0.0
        self._engine.swapped_in(request.engine_id)

    def _ended(
        self,
        request: DecodeRequest,
        reservation: Reservation,
        copy: Copy,
        error: TransferError | None,
        began: float,
    ) -> None:
        request.copies.discard(copy)
        self._buffer.close_writer(reservation)
        if request.over or error is not None:
            self._buffer.abandon(reservation)
            if request.over:
                self._on_end(request)
            else:
                self._engine.swapped_out(request.engine_id, kept=False)
            return
        request.landing = Landing(reservation, None, landed=len(reservation.blocks))
        request.away_since = began
        nbytes = len(reservation.blocks) * self._buffer.block_bytes
        self._accounts.swapped_out(nbytes, self._loop.time() - began)
        self._engine.swapped_out(request.engine_id, kept=True)

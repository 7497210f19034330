"""Measures the ways of KV into this decode instance, and the limits beside them.

Uses only blocks of the CPU buffer that are free and that nobody waits for, and gives them back. One
measurement at a time. For the asyncio thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections.abc import Callable
from functools import partial

from runtime.errors import CapacityError, LegError, RequestError, RuntimeFailure, TransferError
from runtime.kv.buffer import Reservation
from runtime.kv.swap import Copy, CopyLane, split_blocks
from runtime.link import Link, LinkClosed
from runtime.protocol import HelloPlain, Measure, Measured, PeerReply, Pong
from runtime.transfer.handoff_decode import DecodeHandoff
from runtime.transfer.path_test import scattered
from runtime.transfer.paths import Dial
from runtime.transfer.plain_stream import MOST_BYTES, receive_plain
from runtime.transfer.tcp import detach
from runtime.transfer.trial import trial_put

DEADLINE_S = 30.0


class Measurer:
    """`dial(peer)` gives what opens one more connection to the peer, None for an unknown one."""

    def __init__(
        self, handoff: DecodeHandoff, lane: CopyLane, dial: Callable[[str], Dial | None]
    ) -> None:
        self._peers = handoff.peers
        self._reservations = handoff.reservations
        self._buffer = handoff.reservations.buffer
        self._lane = lane
        self._dial = dial
        self._one = asyncio.Lock()

    async def measure(self, ask: Measure) -> Measured:
        """Never raises for what can go wrong: the answer says it."""
        kinds = {"path": self._path, "socket": self._socket, "memcpy": self._memcpy}
        try:
            if ask.blocks < 1 or ask.run < 1:
                raise RequestError("blocks and run must be at least 1")
            async with asyncio.timeout(DEADLINE_S), self._one:
                path, seconds = await kinds[ask.what](ask)
        except TimeoutError:
            return Measured(seq=ask.seq, error=f"not done within {DEADLINE_S:g} s", status=504)
        except (RequestError, CapacityError) as e:
            status = 400 if isinstance(e, RequestError) else 503
            return Measured(seq=ask.seq, error=str(e), status=status)
        except (RuntimeFailure, OSError) as e:
            return Measured(seq=ask.seq, error=str(e), status=502)
        nbytes = ask.blocks * self._buffer.block_bytes
        return Measured(seq=ask.seq, path=path, nbytes=nbytes, seconds=seconds)

    def _take(self, count: int) -> Reservation:
        if reservation := self._reservations.take_spare(count):
            return reservation
        room, wanted = self._buffer.free_blocks, f"{count} blocks of the CPU buffer"
        raise CapacityError(f"{wanted} are not to be had now: {room} are free, requests come first")

    async def _path(self, ask: Measure) -> tuple[str, float]:
        session = self._peers.choose(ask.peer, lambda _: 0)
        reservation = self._take(ask.blocks)
        try:
            seconds = await trial_put(session, self._reservations, reservation, run=ask.run)
        finally:
            self._reservations.abandon(session.writer, reservation)
        return session.path, seconds

    async def _memcpy(self, ask: Measure) -> tuple[str, float]:
        """One thread's memcpy, in the lane that all copies out of the buffer take."""
        reservation = self._take(ask.blocks)
        self._buffer.close_writer(reservation)
        self._buffer.set_reading(reservation, True)
        size, base = self._buffer.block_bytes, self._buffer.region.address
        source = ctypes.create_string_buffer(b"\1", ask.blocks * size)
        ctypes.memset(source, 1, ask.blocks * size)
        order = scattered(ask.blocks, ask.run, ask.blocks)
        ended: asyncio.Future[TransferError | None] = asyncio.get_running_loop().create_future()
        seconds = 0.0

        def piece(start: int, stop: int) -> None:
            nonlocal seconds
            began = time.perf_counter()
            for at, block in zip(order[start:stop], reservation.blocks[start:stop], strict=True):
                ctypes.memmove(base + block * size, ctypes.addressof(source) + at * size, size)
            seconds += time.perf_counter() - began

        def end(error: TransferError | None) -> None:
            self._buffer.set_reading(reservation, False)
            self._buffer.abandon(reservation)
            if not ended.done():
                ended.set_result(error)

        cuts = split_blocks(0, ask.blocks, size)
        copy = Copy([partial(piece, start, stop) for start, stop in cuts], lambda _: None, end)
        self._lane.submit(copy)
        if error := await ended:
            raise error
        return "", seconds

    async def _socket(self, ask: Measure) -> tuple[str, float]:
        dial = self._dial(ask.peer)
        if dial is None:
            raise RequestError(f"{ask.peer} is no prefill peer of this instance")
        size = self._buffer.block_bytes
        nbytes = ask.blocks * size
        if nbytes > MOST_BYTES:
            raise RequestError(f"{nbytes:,} bytes are more than {MOST_BYTES:,}")
        piece = ask.run * size
        async with contextlib.AsyncExitStack() as stack:
            link, stream = await dial(stack)
            link.send(HelloPlain(nbytes=nbytes, piece=piece))
            await _pong(link, ask.peer)
            sock = detach(stream.get_extra_info("socket").fileno())
        return "", await asyncio.to_thread(receive_plain, sock, nbytes, piece)


async def _pong(link: Link[PeerReply], peer: str) -> None:
    try:
        answer = await link.receive()
    except LinkClosed as e:
        raise LegError(f"{peer}: {e}", leg="prefill", instance=peer) from e
    if not isinstance(answer, Pong):
        raise LegError(f"{peer}: unexpected {type(answer).__name__}", leg="prefill", instance=peer)

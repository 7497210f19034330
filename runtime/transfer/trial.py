"""Decode's half of a path test: have the peer put bytes into reserved blocks, and see them arrive.

Owns the waiting for the answer. What the bytes are is the peer's path_test.py; whose blocks they
are is reservations'. For the asyncio thread.
"""

from __future__ import annotations

import asyncio
import secrets

from runtime.engine.contract import EngineControl
from runtime.errors import TransferError
from runtime.kv.buffer import CpuBuffer, Reservation
from runtime.link import LinkClosed
from runtime.protocol import (
    KvReady,
    PathTest,
    PeerReply,
    PrefillFailed,
    Released,
)
from runtime.transfer.decode_request import DecodeSession
from runtime.transfer.reservations import Reservations, Waiter
from runtime.transfer.spare_block import take_block
from runtime.transfer.tcp import memory

_PATTERN_BYTES = 64
# tcp: the answer may overtake the bytes.
_LOOK_S = 0.0002


def took_answer(session: DecodeSession, message: PeerReply) -> bool:
    """Whether the message ends a path test that is waited for; then whoever waits has it."""
    if not isinstance(message, KvReady | PrefillFailed | Released):
        return False
    answer = session.answers.pop(message.nonce, None)
    if answer is None or answer.done():
        return False
    answer.set_result(message)
    return True


def fail_answers(session: DecodeSession, error: LinkClosed | TransferError) -> None:
    """The session, or its path, is lost: nobody will answer."""
    for answer in session.answers.values():
        if not answer.done():
            answer.set_exception(error)
            answer.exception()  # whoever waited may be gone: no warning about it
    session.answers.clear()


async def trial_put(
    session: DecodeSession,
    reservations: Reservations,
    reservation: Reservation,
    *,
    pattern: bytes = b"",
    run: int = 1,
) -> float:
    """Seconds from asking until every byte is in the buffer. Raises TransferError, and LinkClosed
    when the session is lost.

    The deadline is the caller's, and so is `abandon` in every case.
    """
    loop = asyncio.get_running_loop()
    nonce, blocks = reservation.nonce, reservation.blocks
    if session.writer.lost:
        # In the turn in which the blocks were granted: nobody was told of them, and nobody will
        # give them back.
        reservations.buffer.close_writer(reservation)
        raise LinkClosed(f"{session.peer} was lost")
    reservations.open_for(session.writer, reservation)
    answer = session.answers[nonce] = loop.create_future()
    began = loop.time()
    session.link.send(PathTest(nonce=nonce, blocks=blocks, pattern=pattern, run=run))
    message = await answer
    if isinstance(message, PrefillFailed):
        if message.fenced:
            reservations.terminal(session.writer, nonce)
        raise TransferError(message.message)
    if not isinstance(message, KvReady):
        raise TransferError("the peer gave it back unasked")
    while session.receiver.landed(nonce, len(blocks)) < len(blocks):
        if session.writer.lost:
            raise LinkClosed(f"{session.peer} was lost")
        await asyncio.sleep(_LOOK_S)
    seconds = loop.time() - began
    reservations.terminal(session.writer, nonce)
    return seconds


async def prove_path(session: DecodeSession, reservations: Reservations) -> None:
    """Have one block of random bytes put into the buffer, and look for them there."""
    reservation = await _one_block(reservations)
    pattern = secrets.token_bytes(_PATTERN_BYTES)
    try:
        await trial_put(session, reservations, reservation, pattern=pattern)
        _check_block(reservations.buffer, reservation.blocks[0], pattern)
    finally:
        reservations.abandon(session.writer, reservation)


async def prove_pool(
    session: DecodeSession, reservations: Reservations, engine: EngineControl, first: int
) -> None:
    """As `prove_path`, with a block of the device pool, whose blocks are numbered from `first`; if
    there is one to be had now, for requests come first.
    """
    taken = take_block(engine)
    if taken is None:
        return
    id_, block = taken
    reservation = reservations.take_spare(0)
    if reservation is None:
        engine.drop(id_)
        return
    reservations.buffer.lend(reservation, (first + block,), lambda: engine.drop(id_))
    pattern = secrets.token_bytes(_PATTERN_BYTES)
    try:
        await trial_put(session, reservations, reservation, pattern=pattern)
        found = await asyncio.to_thread(_device_block, engine, block)
        if found != _repeated(pattern, len(found)):
            raise TransferError("other bytes than those sent are in the device pool")
    finally:
        reservations.abandon(session.writer, reservation)


def _device_block(engine: EngineControl, block: int) -> bytes:
    with engine.copies.staging(engine.layout.block_bytes) as staging:
        engine.copies.out(staging, engine.pool_map.gather([block], [0]))
        return bytes(memory(staging))


async def _one_block(reservations: Reservations) -> Reservation:
    """The next block that is free: ahead of all requests, which may be waiting for this very
    peer.
    """
    granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()

    def take(reservation: Reservation) -> None:
        if granted.cancelled():
            reservations.give_back(reservation)
        else:
            granted.set_result(reservation)

    waiter = Waiter(lambda _: 1, take)
    reservations.join(waiter, first=True)
    try:
        return await granted
    except asyncio.CancelledError:
        reservations.leave(waiter)
        if granted.done() and not granted.cancelled():
            reservations.give_back(granted.result())
        raise


def _check_block(buffer: CpuBuffer, block: int, pattern: bytes) -> None:
    size = buffer.block_bytes
    found = memory(buffer.region)[block * size : (block + 1) * size]
    if found != _repeated(pattern, size):
        raise TransferError("other bytes than those sent are in the buffer")


def _repeated(pattern: bytes, size: int) -> bytes:
    return (pattern * (size // len(pattern) + 1))[:size]

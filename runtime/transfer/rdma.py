"""Transport over RDMA: prefill writes into decode's buffer, with neither CPU on the way; and from
GPU to GPU where the adapters of both have registered their device pools.

One reliable connection per session. A put is one-sided writes, then a message {nonce, whole blocks}
that the receiver gets after them; the put ends when the peer's port has acknowledged all of it.
Decode's fence is its own queue pair: once that is destroyed, nothing of the session is written any
more. A single nonce has no fence but its terminal message.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import struct
import threading
from typing import ClassVar

from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.protocol import RdmaEnd, RdmaMemory
from runtime.transfer.base import PathKind, Receiver, ReceiverEvents, Runs, Sender
from runtime.transfer.pool_put import by_target
from runtime.transfer.rdma_adapter import RdmaAdapter
from runtime.transfer.verbs import MAX_PIECES, RECEIVE_BYTES, Completion, Queue, Write

_log = logging.getLogger(__name__)

STALL_S = 10.0
"""A put none of whose writes completes for this long fails."""
_SENDS = 256
_LONGEST = 1 << 20
"""No write is longer, so that many are under way, and each is soon complete."""
_BATCH = 16
"""Writes in one call; the last one's completion stands for all."""
_RECEIVES = 64
_POLL = 32
_LANDED = struct.Struct("<QQ")
assert _LANDED.size == RECEIVE_BYTES


class RdmaSender(Sender):
    path = "rdma"
    put_lands = False
    put_fences = False

    def __init__(self, adapter: RdmaAdapter, peer: RdmaEnd, peer_bytes: int) -> None:
        """`peer_bytes`: of the peer's buffer; its device pool, if open to us, is numbered after it.
        Raises TransferError when the peer cannot be reached.
        """
        self._adapter = adapter
        self.reads_gpu = adapter.gpu is not None
        self._peer = peer
        self._peer_bytes = peer_bytes
        self.pool_bytes = peer.pool.nbytes if peer.pool else 0
        self._lock = threading.Lock()
        """Of the queue pair's state: posting, failing, destroying."""
        self._broken = ""
        self._posted = 0
        self._completed = 0
        self._queue = adapter.device.queue(sends=_SENDS, receives=0)
        self.end = adapter.end(self._queue)
        self._words = ctypes.create_string_buffer(RECEIVE_BYTES)
        words = Region(ctypes.addressof(self._words), RECEIVE_BYTES)
        try:
            adapter.connect(self._queue, self.end, peer)
            self._words_memory = adapter.device.register(words, remote_write=False)
        except TransferError:
            _destroy(self._queue)
            raise
        self._poll = select.poll()
        self._poll.register(self._queue.fd, select.POLLIN)

    def put(self, nonce: int, source: Region, runs: Runs, whole: int) -> int:
        targets = self._targets(runs)
        for memory, part in targets:
            _check(part, source.nbytes, memory.nbytes)
        nbytes = int(runs[:, 2].sum())
        try:
            with self._adapter.readable(source) as key:
                for memory, part in targets:
                    writes = self._writes(memory.address, source, part)
                    self._write(writes, (key, memory.key))
                self._announce(nonce, whole)
                self._wait(self._posted)
        except TransferError as e:
            self._break(str(e))
            where = f"rdma from {self.end.device} to {self._peer.device}"
            raise TransferError(f"{where}: {self._broken}") from e
        return nbytes

    def abort(self) -> None:
        with self._lock:
            if self._broken:
                return
            self._broken = "the session is closed"
            try:
                # What is posted completes with an error, which wakes the put that waits for it.
                self._queue.fail()
            except TransferError as e:
                _log.error("rdma: %s", e)
                self._queue.close()

    def close(self) -> None:
        self.abort()
        _destroy(self._queue)
        self._words_memory.close()

    def _targets(self, runs: Runs) -> list[tuple[RdmaMemory, Runs]]:
        """The peer's buffer and pool, each with the runs that go there, counted from its start."""
        peer, nbytes = self._peer, self._peer_bytes
        buffer = RdmaMemory(address=peer.address, nbytes=nbytes, key=peer.key)
        if peer.pool is None:
            return [(buffer, runs)]
        parts = zip((buffer, peer.pool), by_target(runs, nbytes), strict=True)
        return [(memory, part) for memory, part in parts if len(part)]

    def _writes(self, base: int, source: Region, runs: Runs) -> list[Write]:
        """To the peer's memory at `base`: one for runs that follow each other there, such as those
        of a block's parts.
        """
        most = min(self._adapter.facts.max_message, _LONGEST)
        writes: list[Write] = []
        pieces: list[tuple[int, int]] = []
        end = room = -1
        for at, to, size in runs.tolist():
            for done in range(0, size, most):
                length = min(size - done, most)
                if to + done != end or length > room or len(pieces) == MAX_PIECES:
                    pieces, room = [], most
                    writes.append((base + to + done, pieces))
                pieces.append((source.address + at + done, length))
                end, room = to + done + length, room - length
        return writes

    def _write(self, writes: list[Write], keys: tuple[int, int]) -> None:
        for at in range(0, len(writes), _BATCH):
            batch = writes[at : at + _BATCH]
            # One more for the announcement.
            self._wait(self._posted + len(batch) + 1 - _SENDS)
            with self._lock:
                self._check_open()
                self._posted += len(batch)
                self._queue.write(batch, keys, self._posted)

    def _announce(self, nonce: int, whole: int) -> None:
        _LANDED.pack_into(self._words, 0, nonce, whole)
        source = (ctypes.addressof(self._words), RECEIVE_BYTES, self._words_memory.lkey)
        with self._lock:
            self._check_open()
            self._posted += 1
            self._queue.send(source, self._posted)

    def _check_open(self) -> None:
        if self._broken:
            raise TransferError(self._broken)

    def _wait(self, count: int) -> None:
        """Until the first `count` of all posted requests are complete."""
        armed = False
        while self._completed < count:
            if found := self._queue.poll(_POLL):
                self._take(found)
            elif not armed:
                # Only what completes after this makes an event: look once more before waiting.
                self._queue.arm()
                armed = True
            elif self._poll.poll(STALL_S * 1000):
                self._queue.disarm()
                armed = False
            else:
                raise TransferError(f"no write completed for {STALL_S:g} s")

    def _take(self, found: list[Completion]) -> None:
        for completion in found:
            if not completion.ok:
                raise TransferError(completion.error)
            self._completed = completion.tag

    def _break(self, why: str) -> None:
        """Nothing is sent any more, and nothing is read from the source."""
        with self._lock:
            self._broken = self._broken or why
            self._queue.close()


class _Landing:
    __slots__ = ("expected", "whole")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.whole = 0


class RdmaOffer:
    """Decode's queue pair before it is known whether prefill takes it."""

    path: ClassVar[PathKind] = "rdma"

    def __init__(self, adapter: RdmaAdapter, no_pool: str = "") -> None:
        """`no_pool`: why the device pool on a GPU is not offered, though it could be."""
        self.adapter = adapter
        self.no_pool = no_pool or adapter.no_pool
        self.queue = adapter.device.queue(sends=0, receives=_RECEIVES)
        self.end = adapter.end(self.queue, pool=not no_pool)

    def close(self) -> None:
        """Idempotent: whoever took the queue over may have closed it."""
        _destroy(self.queue)


class RdmaReceiver(Receiver):
    """Owns its queue pair and a thread that takes the sender's messages."""

    path = "rdma"

    def __init__(self, offer: RdmaOffer, peer: RdmaEnd, events: ReceiverEvents) -> None:
        """Raises TransferError when the peer cannot be reached; the offer is closed then."""
        self._events = events
        self._lock = threading.Lock()
        """Of the live nonces, and of the queue pair's end."""
        self._live: dict[int, _Landing] = {}
        self._gone = False
        self.reaches_pool = offer.end.pool is not None
        self._gpu = offer.adapter.gpu if self.reaches_pool else None
        self._queue = offer.queue
        self._words = ctypes.create_string_buffer(_RECEIVES * RECEIVE_BYTES)
        words = Region(ctypes.addressof(self._words), len(self._words))
        with contextlib.ExitStack() as undo:
            undo.callback(offer.close)
            self._words_memory = offer.adapter.device.register(words, remote_write=False)
            undo.callback(self._words_memory.close)
            undo.callback(offer.close)  # the queue pair ends before the memory that it uses
            offer.adapter.connect(self._queue, offer.end, peer)
            for slot in range(_RECEIVES):
                self._make_room(slot)
            self._stop = os.eventfd(0)
            undo.callback(os.close, self._stop)
            self._thread = threading.Thread(target=self._run, name="kv-rdma-read", daemon=True)
            self._thread.start()
            undo.pop_all()

    def expect(self, nonce: int, blocks: tuple[int, ...]) -> None:
        with self._lock:
            self._live[nonce] = _Landing(len(blocks))

    def landed(self, nonce: int, reported: int) -> int:
        with self._lock:
            landing = self._live.get(nonce)
            return landing.whole if landing else 0

    def revoke(self, nonce: int) -> bool:
        with self._lock:
            self._live.pop(nonce, None)
        return self._gone

    def writer_gone(self) -> bool:
        return self._gone

    def close(self) -> None:
        if self._stop < 0:
            return
        self._fence()
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1
        _destroy(self._queue)
        self._words_memory.close()

    def _fence(self) -> bool:
        """Destroy the queue pair, unless that was done. Returns whether it is done only now."""
        with self._lock:
            if self._gone:
                return False
            self._queue.close()
            self._gone = True
            self._live.clear()
            return True

    def _make_room(self, slot: int) -> None:
        address = ctypes.addressof(self._words) + slot * RECEIVE_BYTES
        self._queue.receive((address, RECEIVE_BYTES, self._words_memory.lkey), slot)

    # ---- reader thread --------------------------------------------------------------------------

    def _run(self) -> None:
        reason = ""
        try:
            self._read()
        except TransferError as e:
            reason = f"rdma: {e}"
        except Exception as e:
            # Boundary of one connection: without its reader the session must not go on.
            _log.exception("the reader of an rdma connection failed")
            reason = f"rdma: {type(e).__name__}: {e}"
        if self._fence():
            self._events.post(lambda: self._events.on_closed(reason))

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._queue.fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        armed = False
        while not self._gone:
            if found := self._queue.poll(_POLL):
                if self._gpu:
                    # Before anything of it counts as landed, and so may be computed with.
                    self._gpu.see_remote_writes()
                for completion in found:
                    self._take(completion)
            elif not armed:
                # Only what completes after this makes an event: look once more before waiting.
                self._queue.arm()
                armed = True
            elif any(fd == self._queue.fd for fd, _ in poll.poll()):
                self._queue.disarm()
                armed = False

    def _take(self, completion: Completion) -> None:
        if not completion.ok:
            raise TransferError(completion.error)
        if completion.nbytes != RECEIVE_BYTES:
            raise TransferError(f"a message of {completion.nbytes} bytes")
        nonce, whole = _LANDED.unpack_from(self._words, completion.tag * RECEIVE_BYTES)
        with self._lock:
            if self._gone:
                return
            self._make_room(completion.tag)
            landing = self._live.get(nonce)
            if landing is None:
                return  # revoked, and crossed by its last put
            wrong = not landing.whole <= whole <= landing.expected
            if wrong:
                del self._live[nonce]
            else:
                landing.whole = whole
        if wrong:
            why = f"{whole} whole blocks after {landing.whole}, of {landing.expected}"
            _log.error("put for nonce %d refused: %s", nonce, why)
            self._events.post(lambda: self._events.on_refused(nonce, why))
        else:
            self._events.post(lambda: self._events.on_landed(nonce))


def _check(runs: Runs, source_bytes: int, target_bytes: int) -> None:
    sources, targets, sizes = runs[:, 0], runs[:, 1], runs[:, 2]
    if (sizes <= 0).any() or (sources < 0).any() or (sources + sizes > source_bytes).any():
        raise TransferError("a run lies outside of the source memory")
    if (targets < 0).any() or (targets + sizes > target_bytes).any():
        raise TransferError("a run lies outside of the peer's memory")


def _destroy(queue: Queue) -> None:
    """Idempotent."""
    queue.close()
    queue.close_events()

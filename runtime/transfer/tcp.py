"""Transport over TCP connections: header {nonce, runs}, then the payload, straight between pool and
buffer.

Usually one connection; several where one core cannot fill the wire, and then a large put is split
among them. The receiver trusts no offset: runs must lie in blocks of a live nonce's reservation,
each byte once; anything else is thrown away. Bytes are written by `Landing.receive` only as long as
the landing is open, so `revoke` is a fence the moment it returns and tcp needs no quarantine.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from runtime._native import Landing, PutHeader, discard_put, receive_header, send_put
from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.transfer.base import Receiver, ReceiverEvents, Runs, Sender

_log = logging.getLogger(__name__)

STALL_S = 10.0
"""A put that moves no byte for this long fails: the other side is stopped or gone."""
_MOST_STREAMS = 4
_CORES_PER_STREAM = 4
# Less is not worth the wake-up of another thread at either end.
_MIN_PART = 1 << 20


def own_streams() -> int:
    """How many connections this host would use: one keeps a core busy, and the model needs most."""
    return max(1, min(_MOST_STREAMS, len(os.sched_getaffinity(0)) // _CORES_PER_STREAM))


def memory(region: Region) -> memoryview:
    """The region's bytes, writable. Whoever made the region keeps it alive."""
    return memoryview((ctypes.c_char * region.nbytes).from_address(region.address)).cast("B")


def _prepare(sock: socket.socket) -> None:
    # Buffer sizes are left to the kernel: it adapts them to the path, while fixed ones are capped
    # by net.core.{r,w}mem_max, by default far below what a fast network needs.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The session's pings take another connection, so the kernel has to watch this one: an idle one
    # is probed, which also keeps a firewall from forgetting it, and one whose peer acknowledges
    # nothing for STALL_S ends.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(STALL_S / 2)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    sock.setblocking(True)


def _part(runs: Runs, start: int, stop: int) -> Runs:
    """What moves bytes `start` to `stop` of all that the runs move, in their order."""
    ends = runs[:, 2].cumsum()
    begins = ends - runs[:, 2]
    first, last = np.maximum(begins, start), np.minimum(ends, stop)
    part = runs + (first - begins)[:, None]
    part[:, 2] = last - first
    kept: Runs = part[last > first]
    return kept


class TcpSender(Sender):
    """Owns the sockets."""

    path = "tcp"
    put_lands = False
    # The receiver could fence it, but half a put is on the wire: no other can follow.
    put_fences = False

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        stall = struct.pack("@ll", int(STALL_S), int(STALL_S % 1 * 1e6))  # struct timeval
        for sock in socks:
            _prepare(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        self._socks = tuple(socks)
        self._broken = False
        # Starts its threads when they are first needed.
        self._others = concurrent.futures.ThreadPoolExecutor(len(socks), "kv-tcp-send")

    def put(self, nonce: int, source: Region, runs: Runs, whole: int) -> int:
        if self._broken:
            raise TransferError("the data connection is closed")
        parts = self._parts(runs)
        others = [
            self._others.submit(self._send, sock, nonce, source, part)
            for sock, part in zip(self._socks[1:], parts[1:], strict=False)
        ]
        try:
            self._send(self._socks[0], nonce, source, parts[0])
        finally:
            concurrent.futures.wait(others)
        for other in others:
            other.result()
        return int(runs[:, 2].sum())

    def _parts(self, runs: Runs) -> list[Runs]:
        """The runs, cut into as many equal parts as there are streams worth using."""
        nbytes = int(runs[:, 2].sum())
        count = min(len(self._socks), nbytes // _MIN_PART)
        if count < 2:
            return [runs]
        cuts = [nbytes * i // count for i in range(count + 1)]
        return [_part(runs, start, stop) for start, stop in pairwise(cuts)]

    def _send(self, sock: socket.socket, nonce: int, source: Region, runs: Runs) -> None:
        try:
            send_put(sock.fileno(), nonce, source.address, source.nbytes, runs)
        except ValueError as e:
            raise TransferError(f"source memory: {e}") from e  # nothing was sent
        except OSError as e:
            # Half a put may be on the wire: this connection has lost its framing for good, and the
            # session ends.
            self.abort()
            reason = f"no byte moved for {STALL_S:g} s" if isinstance(e, TimeoutError) else str(e)
            raise TransferError(f"data connection: {reason}") from e

    def abort(self) -> None:
        self._broken = True
        _shut(self._socks)

    def close(self) -> None:
        self.abort()
        self._others.shutdown()
        for sock in self._socks:
            sock.close()


def _shut(socks: Sequence[socket.socket]) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):  # not connected any more: what we wanted
            sock.shutdown(socket.SHUT_RDWR)


class TcpReceiver(Receiver):
    """Owns the sockets and a reader thread for each."""

    path = "tcp"

    def __init__(
        self,
        socks: Sequence[socket.socket],
        buffer: Region,
        block_bytes: int,
        events: ReceiverEvents,
    ) -> None:
        for sock in socks:
            _prepare(sock)
        self._socks = tuple(socks)
        self._buffer = buffer
        self._block_bytes = block_bytes
        self._events = events
        self._lock = threading.Lock()
        self._live: dict[int, Landing] = {}
        self._closed = False
        for sock in socks:
            threading.Thread(
                target=self._read, args=(sock,), name="kv-tcp-read", daemon=True
            ).start()

    def expect(self, nonce: int, blocks: tuple[int, ...]) -> None:
        memory = self._buffer
        landing = Landing(memory.address, memory.nbytes, self._block_bytes, blocks)
        with self._lock:
            if not self._closed:
                self._live[nonce] = landing

    def landed(self, nonce: int, reported: int) -> int:
        landing = self._live.get(nonce)
        return landing.complete if landing else 0

    def revoke(self, nonce: int) -> bool:
        with self._lock:
            landing = self._live.pop(nonce, None)
        if landing:
            landing.close()
        return True

    def writer_gone(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._end()

    def _end(self) -> bool:
        """Fence everything and stop the readers. Whether this call was the first."""
        with self._lock:
            first, self._closed = not self._closed, True
            for landing in self._live.values():
                landing.close()
            self._live.clear()
        _shut(self._socks)
        return first

    # ---- reader threads -------------------------------------------------------------------------

    def _read(self, sock: socket.socket) -> None:
        reason = "the data connection was closed"
        try:
            # Waits as long as the connection lives; `close` wakes it.
            while (put := receive_header(sock.fileno())) is not None:
                self._take(sock, put)
        except OSError as e:
            reason = f"data connection: {e.strerror}"
        except Exception as e:
            # Boundary of one connection: without its reader the session must not go on.
            _log.exception("the reader of a data connection failed")
            reason = f"data connection: {type(e).__name__}: {e}"
        first = self._end()
        sock.close()
        if first:
            self._events.post(lambda: self._events.on_closed(reason))

    def _take(self, sock: socket.socket, put: PutHeader) -> None:
        nonce = put.nonce
        with self._lock:
            landing = self._live.get(nonce)
            why = landing.claim(put) if landing else ""
            if why:
                self._live.pop(nonce)
        if landing is None:
            discard_put(sock.fileno(), put)
        elif why:
            landing.close()
            _log.error("put for nonce %d refused: %s", nonce, why)
            self._events.post(lambda: self._events.on_refused(nonce, why))
            discard_put(sock.fileno(), put)
        else:
            landing.receive(sock.fileno(), put)
            self._events.post(lambda: self._events.on_landed(nonce))


def detach(sock_fd: int) -> socket.socket:
    """A socket of our own on the same connection as an asyncio transport's, which may then be
    closed.
    """
    return socket.socket(fileno=os.dup(sock_fd))

"""Transport over one TCP connection: header {nonce, runs}, then the payload, straight between pool
and buffer.

The receiver trusts no offset: runs must continue the reservation of a live nonce, whole blocks in
order; anything else is read into a scratch sink. Every write happens under a lock in which liveness
was just checked, so `revoke` is a fence the moment it returns and tcp needs no quarantine.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.errors import TransferError
from runtime.kv.layout import merge_runs
from runtime.kv.region import Region
from runtime.transfer.base import Receiver, ReceiverEvents, Runs, Sender

_log = logging.getLogger(__name__)

STALL_S = 10.0
"""A put that moves no byte for this long fails: the other side is stopped or gone."""
SOCKET_BUFFER = 4 << 20
_HEADER = struct.Struct("<QI")
_RUN_BYTES = 16
_MAX_RUNS = 1 << 16
# One recv under the lock: 1 MiB is some 100 us, the longest that `revoke` can have to wait.
_STEP = 1 << 20
# One sendmsg; IOV_MAX is 1024 on Linux.
_MAX_VIEWS = 512


def prepare_socket(sock: socket.socket) -> None:
    """Options for a data connection; before or after connecting."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)


def memory(region: Region) -> memoryview:
    """The region's bytes, writable. Whoever made the region keeps it alive."""
    return memoryview((ctypes.c_char * region.nbytes).from_address(region.address)).cast("B")


class TcpSender(Sender):
    """Owns the socket."""

    path = "tcp"
    put_lands = False

    def __init__(self, sock: socket.socket) -> None:
        prepare_socket(sock)
        sock.settimeout(STALL_S)
        self._sock = sock
        self._broken = False

    def put(self, nonce: int, source: Region, runs: Runs) -> int:
        if self._broken:
            raise TransferError("the data connection is closed")
        _check_source(source, runs)
        view = memory(source)
        landings = _landings(runs)
        header = _HEADER.pack(nonce, len(landings)) + landings.tobytes()
        parts = [memoryview(header)]
        parts += [view[at : at + size] for at, _, size in runs.tolist()]
        try:
            self._send_all(parts)
        except OSError as e:
            # Half a put may be on the wire: this connection has lost its framing for good.
            self.abort()
            reason = f"no byte moved for {STALL_S:g} s" if isinstance(e, TimeoutError) else str(e)
            raise TransferError(f"data connection: {reason}") from e
        return int(runs[:, 2].sum())

    def _send_all(self, parts: list[memoryview]) -> None:
        first = 0
        while first < len(parts):
            sent = self._sock.sendmsg(parts[first : first + _MAX_VIEWS])
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]

    def abort(self) -> None:
        self._broken = True
        _shut(self._sock)

    def close(self) -> None:
        self.abort()
        self._sock.close()


def _check_source(source: Region, runs: Runs) -> None:
    starts, sizes = runs[:, 0], runs[:, 2]
    if (starts < 0).any() or (sizes <= 0).any() or (starts + sizes > source.nbytes).any():
        raise TransferError("a run lies outside of the source memory")


def _landings(runs: Runs) -> Runs:
    """(destination, length) of what arrives: pieces gathered into one block are one landing."""
    joined = merge_runs(runs[:, [1, 1, 2]])
    return np.ascontiguousarray(joined[:, 1:])


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more: what we wanted
        sock.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class _Landing:
    blocks: Sequence[int]
    received: int = 0
    told: int = 0
    """Whole blocks that on_landed was called for."""


class TcpReceiver(Receiver):
    """Owns the socket and a reader thread."""

    path = "tcp"

    def __init__(
        self, sock: socket.socket, buffer: Region, block_bytes: int, events: ReceiverEvents
    ) -> None:
        prepare_socket(sock)
        sock.setblocking(False)
        self._sock = sock
        self._memory = memory(buffer)
        self._block_bytes = block_bytes
        self._events = events
        self._lock = threading.Lock()
        self._live: dict[int, _Landing] = {}
        self._closed = False
        self._scratch = memoryview(bytearray(_STEP))
        threading.Thread(target=self._read, name="kv-tcp-read", daemon=True).start()

    def expect(self, nonce: int, blocks: tuple[int, ...]) -> None:
        with self._lock:
            self._live[nonce] = _Landing(blocks)

    def landed(self, nonce: int, reported: int) -> int:
        with self._lock:
            landing = self._live.get(nonce)
            return landing.received // self._block_bytes if landing else 0

    def revoke(self, nonce: int) -> bool:
        with self._lock:
            self._live.pop(nonce, None)
        return True

    def writer_gone(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._live.clear()
        _shut(self._sock)

    # ---- reader thread --------------------------------------------------------------------------

    def _read(self) -> None:
        reason = "the data connection was closed"
        try:
            # No deadline on an idle connection: the session's pings watch over it, and `close`
            # wakes this.
            while (header := self._read_exactly(_HEADER.size)) is not None:
                nonce, count = _HEADER.unpack(header)
                if not 0 < count <= _MAX_RUNS:
                    raise TransferError(f"a header with {count} runs")
                raw = self._read_exactly(count * _RUN_BYTES)
                if raw is None:
                    raise TransferError("the data connection ended inside a header")
                self._take(nonce, np.frombuffer(raw, dtype=np.int64).reshape(-1, 2))
        except (OSError, TransferError) as e:
            reason = f"data connection: {e}"
        finally:
            with self._lock:
                was_closed, self._closed = self._closed, True
                self._live.clear()
            self._sock.close()
        if not was_closed:
            self._events.post(lambda: self._events.on_closed(reason))

    def _take(self, nonce: int, runs: Runs) -> None:
        if (runs[:, 1] <= 0).any():
            raise TransferError("a run of no bytes")
        with self._lock:
            landing = self._live.get(nonce)
            why = self._refusal(landing, runs) if landing else ""
            if why:
                self._live.pop(nonce)
        if why:
            _log.error("put for nonce %d refused: %s", nonce, why)
            self._events.post(lambda: self._events.on_refused(nonce, why))
        for offset, size in runs.tolist():
            self._fill(nonce, offset, size, landing if not why else None)

    def _refusal(self, landing: _Landing, runs: Runs) -> str:
        """Why these runs are not the next blocks of this reservation; empty when they are."""
        if (runs % self._block_bytes).any():
            return "not whole blocks"
        first = landing.received // self._block_bytes
        firsts, counts = (runs // self._block_bytes).T.tolist()
        wanted = landing.blocks[first : first + sum(counts)]
        if len(wanted) != sum(counts):
            return "more than its reservation has room for"
        given = [b for at, n in zip(firsts, counts, strict=True) for b in range(at, at + n)]
        return "" if given == list(wanted) else "not the next blocks of its reservation"

    def _fill(self, nonce: int, offset: int, size: int, landing: _Landing | None) -> None:
        """Receive one run, into the buffer as long as the nonce is live, else into the scratch
        sink.
        """
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        end = offset + size
        while offset < end:
            poll.poll()
            step = min(end - offset, _STEP)
            complete = 0
            with self._lock:
                live = landing is not None and self._live.get(nonce) is landing
                into = self._memory[offset : offset + step] if live else self._scratch[:step]
                try:
                    got = self._sock.recv_into(into)
                except BlockingIOError:
                    continue
                if got == 0:
                    raise TransferError("ended inside a put")
                offset += got
                if live and landing is not None:
                    landing.received += got
                    complete = landing.received // self._block_bytes
            if landing is not None and complete > landing.told:
                landing.told = complete
                self._events.post(lambda: self._events.on_landed(nonce))

    def _read_exactly(self, size: int) -> bytes | None:
        """None at the end of the stream before the first byte."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        data = bytearray()
        while len(data) < size:
            poll.poll()
            try:
                got = self._sock.recv(size - len(data))
            except BlockingIOError:
                continue
            if not got:
                if data:
                    raise TransferError("ended inside a header")
                return None
            data += got
        return bytes(data)


def detach(sock_fd: int) -> socket.socket:
    """A socket of our own on the same connection as an asyncio transport's, which may then be
    closed.
    """
    return socket.socket(fileno=os.dup(sock_fd))

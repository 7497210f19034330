"""A plain socket loop, as anybody would write it in Python: what the network gives without us.

Both ends block, so they belong in threads; a side that moves no byte for STALL_S gives up.
"""

from __future__ import annotations

import socket
import time

from runtime.errors import TransferError
from runtime.transfer.tcp import STALL_S

MOST_BYTES = 1 << 30
_GO = b"g"


def send_plain(sock: socket.socket, nbytes: int, piece: int) -> None:
    """Once the other end asks, send so many bytes, a piece at a time."""
    with sock:
        sock.settimeout(STALL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytes(piece))
        try:
            if sock.recv(1) == _GO:
                for at in range(0, nbytes, piece):
                    sock.sendall(data[: min(piece, nbytes - at)])
        except OSError as e:
            raise TransferError(f"plain stream: {e}") from e


def receive_plain(sock: socket.socket, nbytes: int, piece: int) -> float:
    """Ask for them, and receive them into memory that is there already; seconds for all."""
    with sock:
        sock.settimeout(STALL_S)
        into = memoryview(bytearray(b"\1" * nbytes))
        began = time.perf_counter()
        try:
            sock.sendall(_GO)
            got = 0
            while got < nbytes:
                more = sock.recv_into(into[got : got + piece])
                if not more:
                    raise TransferError("plain stream: the peer hung up")
                got += more
        except OSError as e:
            raise TransferError(f"plain stream: {e}") from e
        return time.perf_counter() - began

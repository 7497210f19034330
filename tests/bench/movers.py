"""One end of a transfer for the benchmark: `movers.py KIND receiver|sender JSON`.

Speaks JSON lines: first {"ready": ...} with what the sender must know; then, for every line on
standard input, moves (or receives) all blocks once and answers {"moved": n}. A receiver whose kind
has nothing to do but hold memory stays silent.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from runtime.kv.buffer import CpuBuffer
from runtime.kv.layout import merge_runs
from runtime.kv.region import Region
from runtime.kv.swap import split_blocks
from runtime.transfer.base import ReceiverEvents, Runs, Sender
from runtime.transfer.shm import ShmSender
from runtime.transfer.tcp import TcpReceiver, TcpSender, memory

MAX_VIEWS = 512


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def places(count: int) -> tuple[list[int], list[int]]:
    """Which source block goes to which destination block: scattered, and the same at both ends."""
    rng = np.random.default_rng(7)
    return rng.permutation(count).tolist(), rng.permutation(count).tolist()


def filled(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)


def serve(move: Callable[[], int]) -> None:
    for _ in sys.stdin:
        say(moved=move())


# ---- ours ----------------------------------------------------------------------------------------


def piece_runs(blocks: int, size: int) -> list[tuple[Runs, int]]:
    """As the hand-over puts them: pieces of about 4 MiB, neighbours joined; with each, how many
    blocks are whole after it.
    """
    source, target = places(blocks)
    rows = np.array([source, target, [1] * blocks], dtype=np.int64).T * size
    return [(merge_runs(rows[a:b]), b) for a, b in split_blocks(0, blocks, size)]


def send_ours(sender: Sender, blocks: int, size: int) -> None:
    data = filled(blocks * size)
    source, pieces = Region(data.ctypes.data, data.nbytes), piece_runs(blocks, size)
    say(ready=True)
    for nonce, _ in enumerate(sys.stdin, start=1):
        say(moved=sum(sender.put(nonce, source, runs, whole) for runs, whole in pieces))


def shm_receiver(blocks: int, size: int, **_: Any) -> None:
    buffer = CpuBuffer.create(f"pdctl-bench-{secrets.token_hex(6)}", blocks * size, size)
    say(ready={"segment": buffer.name})
    sys.stdin.read()
    buffer.close()


def shm_sender(blocks: int, size: int, segment: str, **_: Any) -> None:
    send_ours(ShmSender.open(segment, blocks * size), blocks, size)


def tcp_receiver(blocks: int, size: int, streams: int = 1, **_: Any) -> None:
    buffer = CpuBuffer.create(f"pdctl-bench-{secrets.token_hex(6)}", blocks * size, size)
    _, target = places(blocks)
    more = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        say(ready={"port": server.getsockname()[1]})
        socks = [server.accept()[0] for _ in range(streams)]
    events = ReceiverEvents(
        lambda call: call(), lambda _: more.set(), lambda _, why: sys.exit(why), lambda _: None
    )
    receiver = TcpReceiver(socks, buffer.region, size, events)
    receiver.expect(1, tuple(target))
    for nonce, _line in enumerate(sys.stdin, start=1):
        while receiver.landed(nonce, 0) < blocks:
            more.wait()
            more.clear()
        receiver.revoke(nonce)
        receiver.expect(nonce + 1, tuple(target))  # before the next round can begin
        say(moved=blocks * size)
    receiver.close()
    buffer.close()


def tcp_sender(blocks: int, size: int, port: int, streams: int = 1, **_: Any) -> None:
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    send_ours(TcpSender(socks), blocks, size)


# ---- limits --------------------------------------------------------------------------------------


def memcpy_sender(blocks: int, size: int, segment: str, **_: Any) -> None:
    """One thread's memcpy of the same blocks into the same kind of memory."""
    shm = ShmSender.open(segment, blocks * size)._segment
    data = filled(blocks * size)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcpy.restype = None
    source, target = places(blocks)
    pairs = [
        (shm.address + to * size, data.ctypes.data + at * size)
        for at, to in zip(source, target, strict=True)
    ]

    def move() -> int:
        for to, at in pairs:
            memcpy(to, at, size)
        return blocks * size

    say(ready=True)
    serve(move)


def plain_receiver(blocks: int, size: int, **_: Any) -> None:
    """What anybody would write in Python: recv_into, block by block."""
    buffer = CpuBuffer.create(f"pdctl-bench-{secrets.token_hex(6)}", blocks * size, size)
    view = memory(buffer.region)
    parts = [view[to * size : (to + 1) * size] for to in places(blocks)[1]]
    with socket.create_server(("127.0.0.1", 0)) as server:
        say(ready={"port": server.getsockname()[1]})
        sock = server.accept()[0]

    def move() -> int:
        for part in parts:
            got = 0
            while got < size:
                got += sock.recv_into(part[got:])
        return blocks * size

    serve(move)
    buffer.close()


def plain_sender(blocks: int, size: int, port: int, **_: Any) -> None:
    """And sendmsg of many blocks at a time."""
    data = filled(blocks * size)
    view = memory(Region(data.ctypes.data, data.nbytes))
    blocks_of = [view[at * size : (at + 1) * size] for at in places(blocks)[0]]
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def move() -> int:
        parts, first = list(blocks_of), 0
        while first < len(parts):
            sent = sock.sendmsg(parts[first : first + MAX_VIEWS])
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]
        return blocks * size

    say(ready=True)
    serve(move)


ENDS: dict[tuple[str, str], Callable[..., None]] = {
    ("shm", "receiver"): shm_receiver,
    ("shm", "sender"): shm_sender,
    ("memcpy", "receiver"): shm_receiver,
    ("memcpy", "sender"): memcpy_sender,
    ("tcp", "receiver"): tcp_receiver,
    ("tcp", "sender"): tcp_sender,
    ("socket", "receiver"): plain_receiver,
    ("socket", "sender"): plain_sender,
}


if __name__ == "__main__":
    ENDS[sys.argv[1], sys.argv[2]](**json.loads(sys.argv[3]))

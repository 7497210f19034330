"""What the tcp receiver refuses: it trusts no offset, and a bad put costs its own request only."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from transport_rig import Rig, block_runs, eventually

from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.transfer import tcp
from runtime.transfer.base import ReceiverEvents
from runtime.transfer.tcp import TcpReceiver, TcpSender, memory

TCP_REPAIR = 19
"""linux/tcp.h: a socket that is closed in this mode says nothing to its peer."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig.make("tcp", blocks=8, size=4096)
    made.connect()
    yield made
    made.close()


def put(rig: Rig, nonce: int, source: list[int], target: list[int]) -> None:
    rig.sender.put(nonce, rig.source, block_runs(source, target, rig.size), len(source))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([5], "reservation"),  # another one's
        ([0, 0], "reservation"),  # twice
        ([0, 1, 2, 3], "reservation"),  # more than it has
        ([1 << 50], "reservation"),  # outside of the buffer
    ],
)
def test_only_blocks_of_the_reservation_are_written(rig: Rig, bad: list[int], why: str) -> None:
    rig.receiver.expect(1, (0, 1, 2))
    rig.receiver.expect(2, (5, 6))
    before = rig.bytes_of()
    put(rig, 1, list(range(len(bad))), bad)
    put(rig, 2, [3, 4], [5, 6])
    eventually(lambda: rig.receiver.landed(2, 0) == 2)
    assert rig.bytes_of([0, 1, 2, 3, 4, 7]) == before[: 6 * rig.size]
    assert rig.bytes_of([5, 6]) == rig.pool_bytes([3, 4])
    [(nonce, text)] = rig.refused
    assert nonce == 1 and why in text


def test_a_block_is_not_written_twice(rig: Rig) -> None:
    rig.receiver.expect(1, (0, 1))
    put(rig, 1, [0], [0])
    put(rig, 1, [7], [0])
    eventually(lambda: rig.refused)
    assert rig.bytes_of([0]) == rig.pool_bytes([0])


def test_bytes_that_reach_beyond_the_reservation_are_refused(rig: Rig) -> None:
    rig.receiver.expect(1, (0, 1))
    before = rig.bytes_of()
    rig.sender.put(1, rig.source, np.array([[0, 4096 + 8, 4096]], dtype=np.int64), 0)
    eventually(lambda: rig.refused)
    assert rig.bytes_of() == before


def test_an_unknown_nonce_goes_nowhere_and_harms_nobody(rig: Rig) -> None:
    before = rig.bytes_of()
    rig.receiver.expect(2, (3,))
    put(rig, 9, [0, 1], [0, 1])
    put(rig, 2, [5], [3])
    eventually(lambda: rig.receiver.landed(2, 0) == 1)
    assert rig.bytes_of([0, 1, 2]) == before[: 3 * rig.size]
    assert rig.refused == []  # revoked ones look the same, and are nobody's fault


def test_progress_is_told_as_blocks_complete(rig: Rig) -> None:
    rig.receiver.expect(1, tuple(range(8)))
    put(rig, 1, list(range(8)), list(range(8)))
    eventually(lambda: rig.receiver.landed(1, 0) == 8)
    eventually(lambda: rig.landed)  # told a moment after it can be asked
    assert set(rig.landed) == {1}
    rig.receiver.revoke(1)
    assert rig.receiver.landed(1, 0) == 0


def test_a_connection_that_breaks_inside_a_put_is_reported_once(rig: Rig) -> None:
    rig.receiver.expect(1, (0, 1))
    sender = rig.sender
    assert isinstance(sender, TcpSender)
    header = np.array([4096 * 2], dtype=np.int64)
    sender._socks[0].sendall(
        (1).to_bytes(8, "little")
        + (1).to_bytes(4, "little")
        + np.concatenate([np.zeros(1, dtype=np.int64), header]).tobytes()
        + b"\x22" * 5000
    )
    eventually(lambda: rig.bytes_of([0]) == b"\x22" * 4096)
    sender.abort()
    eventually(lambda: rig.closed)
    assert len(rig.closed) == 1 and rig.receiver.writer_gone()
    with pytest.raises(TransferError):
        put(rig, 1, [1], [1])


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_a_senseless_header_ends_the_connection(rig: Rig, count: int) -> None:
    sender = rig.sender
    assert isinstance(sender, TcpSender)
    sender._socks[0].sendall((1).to_bytes(8, "little") + count.to_bytes(4, "little"))
    eventually(lambda: rig.closed)


def test_only_the_first_blocks_count_as_landed(rig: Rig) -> None:
    rig.receiver.expect(1, (4, 2, 6))
    put(rig, 1, [1], [2])
    put(rig, 1, [2], [6])
    eventually(lambda: rig.bytes_of([6]) == rig.pool_bytes([2]))
    assert rig.receiver.landed(1, 0) == 0
    put(rig, 1, [0], [4])
    eventually(lambda: rig.receiver.landed(1, 0) == 3)
    assert rig.bytes_of([4, 2, 6]) == rig.pool_bytes([0, 1, 2])


def test_the_kernel_watches_each_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    sender = TcpSender([theirs])
    receiver = TcpReceiver(
        [ours], Region(0, 0), 1, ReceiverEvents(lambda _: None, print, print, print)
    )
    for sock in (theirs, ours):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < tcp.STALL_S
        timeout = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert timeout == tcp.STALL_S * 1000
    receiver.close()
    sender.close()


def test_a_connection_that_vanished_unsaid_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STALL_S", 2.0)
    rig = Rig.make("tcp", blocks=8, size=4096)
    rig.connect()
    assert isinstance(rig.sender, TcpSender)
    [sock] = rig.sender._socks
    try:
        # Without a packet, as where a host lost its power.
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except PermissionError:
        pytest.skip("needs CAP_NET_ADMIN")
    else:
        sock.close()
        eventually(lambda: rig.closed)
        assert rig.receiver.writer_gone()
    finally:
        rig.close()


# ---- several streams -----------------------------------------------------------------------------

STREAMS = 3


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig that splits everything from two blocks on."""
    monkeypatch.setattr(tcp, "_MIN_PART", 1)
    made = Rig.make("tcp", blocks=64, size=3 * 4096, streams=STREAMS)
    made.connect()
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_a_put_meet_again(wide: Rig, seed: int) -> None:
    rng = random.Random(seed)
    source, target = rng.sample(range(64), 50), rng.sample(range(64), 50)
    wide.receiver.expect(1, tuple(target))
    runs = block_runs(source, target, wide.size)
    half = len(runs) // 2
    for some, whole in ((runs[:half], half), (runs[half:], len(runs))):
        assert wide.sender.put(1, wide.source, some, whole) == len(some) * wide.size
    eventually(lambda: wide.receiver.landed(1, 0) == 50)
    assert wide.bytes_of(target) == wide.pool_bytes(source)
    untouched = [b for b in range(64) if b not in target]
    assert wide.bytes_of(untouched) == b"\xee" * len(untouched) * wide.size


def test_a_run_of_many_blocks_is_cut(wide: Rig) -> None:
    wide.receiver.expect(1, tuple(range(20, 50)))
    wide.sender.put(1, wide.source, np.array([[0, 20, 30]], dtype=np.int64) * wide.size, 30)
    eventually(lambda: wide.receiver.landed(1, 0) == 30)
    assert wide.bytes_of(list(range(20, 50))) == wide.pool_bytes(list(range(30)))


def test_pieces_gathered_into_blocks_are_cut(wide: Rig) -> None:
    """As from tensor-parallel ranks: a block arrives from several places."""
    third = wide.size // 3
    runs = np.array(
        [(part * 64 + block, block * 3 + part, 1) for block in range(7) for part in range(3)],
        dtype=np.int64,
    )
    wide.receiver.expect(1, tuple(range(7)))
    wide.sender.put(1, wide.source, runs * third, 7)
    eventually(lambda: wide.receiver.landed(1, 0) == 7)
    pool = wide.pool.tobytes()
    wanted = b"".join(pool[at : at + size] for at, _, size in (runs * third).tolist())
    assert wide.bytes_of(list(range(7))) == wanted


def test_one_broken_stream_ends_all(wide: Rig) -> None:
    sender = wide.sender
    assert isinstance(sender, TcpSender)
    tcp._shut(sender._socks[1:2])
    eventually(lambda: wide.closed)
    assert wide.receiver.writer_gone() and len(wide.closed) == 1
    wide.receiver.expect(1, tuple(range(64)))
    before = wide.bytes_of()
    with pytest.raises(TransferError):
        put(wide, 1, list(range(64)), list(range(64)))
    assert wide.bytes_of() == before


def test_a_revoked_reservation_is_written_by_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig.make("tcp", blocks=64, size=1 << 20, streams=STREAMS)
    rig.connect()
    runs = block_runs(list(range(64)), list(range(64)), rig.size)
    thread = threading.Thread(target=lambda: rig.sender.put(1, rig.source, runs, 64))
    rig.receiver.expect(1, tuple(range(64)))
    thread.start()
    try:
        eventually(lambda: rig.bytes_of([63]) != b"\xee" * rig.size)
        assert rig.receiver.revoke(1)
        memory(rig.buffer.region)[:] = b"\x11" * rig.buffer.nbytes
        thread.join()
        time.sleep(0.05)
        assert rig.bytes_of() == b"\x11" * rig.buffer.nbytes
    finally:
        rig.close()


def test_a_put_that_moves_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STALL_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with ours:
        sender = TcpSender([theirs])
        data = np.zeros(64 << 20, dtype=np.uint8)
        source = Region(data.ctypes.data, data.nbytes)
        with pytest.raises(TransferError, match="no byte moved for"):
            sender.put(1, source, block_runs([0], [0], data.nbytes), 1)
        sender.close()


@pytest.mark.parametrize("streams", [1, 3])
def test_an_abort_ends_a_put_that_waits(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_MIN_PART", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = [socket.create_connection(server.getsockname()) for _ in range(streams)]
        ours = [server.accept()[0] for _ in range(streams)]
    data = np.zeros(96 << 20, dtype=np.uint8)
    source = Region(data.ctypes.data, data.nbytes)
    sender = TcpSender(theirs)
    ended: list[str] = []

    def put() -> None:
        try:
            sender.put(1, source, block_runs([0], [0], data.nbytes), 1)
        except TransferError as e:
            ended.append(str(e))

    thread = threading.Thread(target=put)
    thread.start()
    time.sleep(0.2)  # nobody receives: the kernel's buffers are full by now
    assert thread.is_alive()
    sender.abort()
    thread.join(tcp.STALL_S / 2)
    assert not thread.is_alive() and len(ended) == 1
    sender.close()
    for sock in ours:
        sock.close()

"""What the tcp receiver refuses: it trusts no offset, and a bad put costs its own request only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from transport_rig import Rig, block_runs, eventually

from runtime.errors import TransferError
from runtime.transfer.tcp import TcpSender


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig.make("tcp", blocks=8, size=4096)
    made.connect()
    yield made
    made.close()


def put(rig: Rig, nonce: int, source: list[int], target: list[int]) -> None:
    rig.sender.put(nonce, rig.source, block_runs(source, target, rig.size))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([1], "next blocks"),  # not the first of its reservation
        ([0, 2], "next blocks"),  # a gap
        ([5], "next blocks"),  # another reservation's
        ([0, 1, 2, 3], "room"),  # more than it has
    ],
)
def test_only_the_next_blocks_of_the_reservation_are_written(
    rig: Rig, bad: list[int], why: str
) -> None:
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


def test_parts_of_blocks_are_refused(rig: Rig) -> None:
    rig.receiver.expect(1, (0, 1))
    before = rig.bytes_of()
    rig.sender.put(1, rig.source, np.array([[0, 8, 4096]], dtype=np.int64))
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
    assert rig.landed and set(rig.landed) == {1}
    rig.receiver.revoke(1)
    assert rig.receiver.landed(1, 0) == 0


def test_a_connection_that_breaks_inside_a_put_is_reported_once(rig: Rig) -> None:
    rig.receiver.expect(1, (0, 1))
    sender = rig.sender
    assert isinstance(sender, TcpSender)
    header = np.array([4096 * 2], dtype=np.int64)
    sender._sock.sendall(
        (1).to_bytes(8, "little")
        + (1).to_bytes(4, "little")
        + np.concatenate([np.zeros(1, dtype=np.int64), header]).tobytes()
        + b"\x22" * 5000
    )
    eventually(lambda: rig.receiver.landed(1, 0) == 1)
    sender.abort()
    eventually(lambda: rig.closed)
    assert len(rig.closed) == 1 and rig.receiver.writer_gone()
    with pytest.raises(TransferError):
        put(rig, 1, [1], [1])


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_a_senseless_header_ends_the_connection(rig: Rig, count: int) -> None:
    sender = rig.sender
    assert isinstance(sender, TcpSender)
    sender._sock.sendall((1).to_bytes(8, "little") + count.to_bytes(4, "little"))
    eventually(lambda: rig.closed)

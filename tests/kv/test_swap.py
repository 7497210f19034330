"""Copy lanes: order, cancelling between pieces, exactly one end for every copy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.kv.swap import PIECE_BYTES, Copy, CopyLane, Piece, copy_region, split_blocks


class Lane:
    """A lane on this loop, and a log of what its copies reported."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.log: list[object] = []
        self.lane = CopyLane("test", lambda call: loop.call_soon_threadsafe(call))

    def submit(self, name: str, pieces: list[Piece]) -> Copy:
        copy = Copy(
            pieces,
            lambda n: self.log.append((name, n)),
            lambda error: self.log.append((name, str(error) if error else "end")),
        )
        self.lane.submit(copy)
        return copy

    async def quiet(self) -> None:
        async with asyncio.timeout(5):
            while self.lane.pending:
                await asyncio.sleep(0.001)


def run(scenario: Callable[[Lane], Awaitable[None]]) -> None:
    async def main() -> None:
        lane = Lane()
        await scenario(lane)
        lane.lane.close()
        assert await lane.lane.wait_closed(5)

    asyncio.run(main())


def test_copies_and_pieces_run_in_order() -> None:
    ran: list[str] = []

    async def scenario(lane: Lane) -> None:
        lane.submit("a", [lambda: ran.append("a1"), lambda: ran.append("a2")])
        lane.submit("b", [lambda: ran.append("b1")])
        assert lane.lane.pending == 2
        await lane.quiet()
        assert ran == ["a1", "a2", "b1"]
        assert lane.log == [("a", 1), ("a", 2), ("a", "end"), ("b", 1), ("b", "end")]

    run(scenario)


def test_cancel_lets_the_running_piece_end_and_starts_no_other() -> None:
    started, go = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        started.set()
        go.wait(5)
        ran.append(1)

    async def scenario(lane: Lane) -> None:
        a = lane.submit("a", [first, lambda: ran.append(2)])
        b = lane.submit("b", [lambda: ran.append(3)])
        await asyncio.to_thread(started.wait, 5)
        a.cancel()
        b.cancel()
        await asyncio.sleep(0.01)
        assert lane.log == []  # not over while the piece runs
        go.set()
        await lane.quiet()
        assert ran == [1]
        assert lane.log == [("a", 1), ("a", "end"), ("b", "end")]

    run(scenario)


@pytest.mark.parametrize("error", [TransferError("no link"), RuntimeError("a bug")])
def test_a_failed_piece_fails_its_copy_and_no_other(error: Exception) -> None:
    def fail() -> None:
        raise error

    ran: list[int] = []

    async def scenario(lane: Lane) -> None:
        lane.submit("a", [lambda: None, fail, lambda: ran.append(1)])
        lane.submit("b", [lambda: ran.append(2)])
        await lane.quiet()
        assert ran == [2]
        assert lane.log[0] == ("a", 1)
        assert str(error) in str(lane.log[1])
        assert lane.log[2:] == [("b", 1), ("b", "end")]

    run(scenario)


def test_close_ends_every_copy() -> None:
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go.wait(5)

    async def main() -> None:
        lane = Lane()
        lane.submit("a", [first, lambda: None])
        lane.submit("b", [lambda: None])
        await asyncio.to_thread(started.wait, 5)
        lane.lane.close()
        assert not await lane.lane.wait_closed(0.01)
        go.set()
        assert await lane.lane.wait_closed(5)
        assert lane.log == [("a", 1), ("a", "end"), ("b", "end")]

    asyncio.run(main())


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 3 * PIECE_BYTES))
def test_cuts_cover_the_range_once_and_are_about_a_piece(
    start: int, count: int, block_bytes: int
) -> None:
    cuts = split_blocks(start, start + count, block_bytes)
    assert [b for at, end in cuts for b in range(at, end)] == list(range(start, start + count))
    assert all(end - at == 1 or (end - at) * block_bytes <= PIECE_BYTES for at, end in cuts)


def test_a_run_outside_of_a_region_is_a_transfer_error() -> None:
    source, to = np.arange(16, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    regions = Region(to.ctypes.data, 16), Region(source.ctypes.data, 16)
    assert copy_region(*regions, np.array([[0, 8, 8]])) == 8
    assert to.tolist() == [0] * 8 + list(range(8))
    with pytest.raises(TransferError):
        copy_region(*regions, np.array([[0, 9, 8]]))

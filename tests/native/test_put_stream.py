"""Puts between a socket and scattered memory: checks come before the first byte, and `close` is a
fence.
"""

from __future__ import annotations

import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transport_rig import eventually

from runtime._native import Landing, discard_put, receive_header, send_put

BLOCK = 4


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    with one, other:
        yield one, other


def runs(*rows: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def landing(memory: NDArray[np.uint8], *blocks: int) -> Landing:
    return Landing(memory.ctypes.data, memory.nbytes, BLOCK, blocks)


def take(sock: socket.socket, into: Landing) -> str:
    put = receive_header(sock.fileno())
    assert put is not None
    if why := into.claim(put):
        discard_put(sock.fileno(), put)
    else:
        into.receive(sock.fileno(), put)
    return why


def test_scattered_bytes_arrive_where_they_belong(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    count = 1500  # more than one call of the system takes
    data = np.arange(count * BLOCK, dtype=np.uint32).astype(np.uint8)
    order = np.random.default_rng(0).permutation(count)
    rows = runs(*((int(b) * BLOCK, at * BLOCK, BLOCK) for at, b in enumerate(order)))
    memory = np.zeros(data.nbytes, dtype=np.uint8)
    into = landing(memory, *range(count))
    send_put(pair[0].fileno(), 5, data.ctypes.data, data.nbytes, rows)
    put = receive_header(pair[1].fileno())
    assert put is not None and (put.nonce, put.nbytes) == (5, data.nbytes)
    assert into.claim(put) == ""
    into.receive(pair[1].fileno(), put)
    assert into.complete == count
    assert (memory.reshape(-1, BLOCK) == data.reshape(-1, BLOCK)[order]).all()


@pytest.mark.parametrize("bad", [(-1, 4), (0, 0), (0, -4), (8, 1), (4, 5), (1 << 62, 1 << 62)])
def test_a_source_outside_of_the_memory_moves_nothing(
    pair: tuple[socket.socket, socket.socket], bad: tuple[int, int]
) -> None:
    data = np.zeros(8, dtype=np.uint8)
    rows = runs((0, 0, 1), (bad[0], 1, bad[1]))
    with pytest.raises(ValueError, match=r"run 1 .* is outside of 8 bytes"):
        send_put(pair[0].fileno(), 1, data.ctypes.data, data.nbytes, rows)
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


@pytest.mark.parametrize("block", [-1, 2, 1 << 60])
def test_a_reservation_outside_of_the_memory_is_none(block: int) -> None:
    with pytest.raises(ValueError, match="outside of the memory's 2 blocks"):
        landing(np.zeros(2 * BLOCK, dtype=np.uint8), 0, block)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        ((0, 0, 4), "came already"),
        ((0, 4, 8), "not blocks of its reservation"),
        ((0, -4, 4), "not blocks of its reservation"),
        ((0, 3, 2), "came already"),
        ((0, 6, 4), "not blocks of its reservation"),
    ],
)
def test_what_may_not_come_is_refused_and_the_stream_goes_on(
    pair: tuple[socket.socket, socket.socket], put: tuple[int, int, int], why: str
) -> None:
    data = np.full(16, 7, dtype=np.uint8)
    memory = np.zeros(16, dtype=np.uint8)
    into = landing(memory, 1, 0)
    address = (data.ctypes.data, data.nbytes)
    send_put(pair[0].fileno(), 1, *address, runs((0, 0, 4)))
    assert take(pair[1], into) == ""
    assert into.complete == 0  # the first block of the reservation is not here
    send_put(pair[0].fileno(), 1, *address, runs(put))
    assert why in take(pair[1], into)
    send_put(pair[0].fileno(), 1, *address, runs((0, 4, 4)))
    again = landing(memory, 1)
    assert take(pair[1], again) == ""
    assert memory.tolist() == [7] * 8 + [0] * 8 and again.complete == 1


def test_a_block_is_complete_with_its_last_byte_in_whatever_order_they_come(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    data = np.arange(1, 13, dtype=np.uint8)
    memory = np.zeros(12, dtype=np.uint8)
    into = landing(memory, 1, 0, 2)
    seen = []
    # The middle of block 1; the ends of blocks 0 and 1; block 2 and what is missing of 1; of 0.
    for rows in ([(5, 5, 2)], [(3, 3, 1), (7, 7, 1)], [(8, 8, 4), (4, 4, 1)], [(0, 0, 3)]):
        send_put(pair[0].fileno(), 1, data.ctypes.data, data.nbytes, runs(*rows))
        assert take(pair[1], into) == ""
        seen.append(into.complete)
    assert seen == [0, 0, 1, 3]
    assert memory.tolist() == data.tolist()


@pytest.mark.parametrize("last", [1, 600 << 10])
def test_a_reader_that_sleeps_until_there_is_much_misses_no_end(
    pair: tuple[socket.socket, socket.socket], last: int
) -> None:
    """What is left of a put, and then the header of a small one, may be less than it sleeps for."""
    size = 2 << 20
    memory = np.zeros(size + BLOCK, dtype=np.uint8)
    into = landing(memory, *range(memory.nbytes // BLOCK))
    taken = []

    def reader() -> None:
        for _ in range(2):
            taken.append(take(pair[1], into))

    receiving = threading.Thread(target=reader, daemon=True)
    receiving.start()
    pair[0].sendall(struct.pack("<QIqq", 1, 1, 0, size) + b"x" * (size - last))
    eventually(lambda: memory[size - last - 1] == ord("x"), 20)
    pair[0].sendall(b"x" * last)
    eventually(lambda: taken == [""], 20)
    pair[0].sendall(struct.pack("<QIqq", 1, 1, size, BLOCK) + b"last")
    receiving.join(20)
    assert taken == ["", ""]
    assert memory.tobytes() == b"x" * size + b"last"


def test_what_comes_after_close_is_thrown_away(pair: tuple[socket.socket, socket.socket]) -> None:
    memory = np.zeros(8, dtype=np.uint8)
    into = landing(memory, 0, 1)
    receiving = threading.Thread(target=take, args=(pair[1], into))
    receiving.start()
    pair[0].sendall(struct.pack("<QIqq", 1, 1, 0, 8) + b"1234")
    eventually(lambda: memory.tobytes() == b"1234" + b"\0" * 4, 20)
    into.close()
    pair[0].sendall(b"5678next")
    receiving.join(20)
    assert pair[1].recv(4) == b"next"
    assert memory.tobytes() == b"1234" + b"\0" * 4


def test_the_end_of_the_stream(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].shutdown(socket.SHUT_WR)
    assert receive_header(pair[1].fileno()) is None


@pytest.mark.parametrize("keep", [1, 11, 12, 20, 28, 30])
def test_an_end_inside_of_a_put_is_an_error(
    pair: tuple[socket.socket, socket.socket], keep: int
) -> None:
    pair[0].sendall((struct.pack("<QIqq", 1, 1, 0, 8) + b"1234")[:keep])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="ended inside a put"):
        take(pair[1], landing(np.zeros(8, dtype=np.uint8), 0, 1))


@pytest.mark.parametrize("header", [(1, 0, 0, 0), (1, 1 << 20, 0, 0), (1, 1, 0, 0), (1, 1, 0, -4)])
def test_what_is_no_header_is_an_error(
    pair: tuple[socket.socket, socket.socket], header: tuple[int, int, int, int]
) -> None:
    pair[0].sendall(struct.pack("<QIqq", *header))
    with pytest.raises(OSError, match=r"a header with|a run of no bytes"):
        receive_header(pair[1].fileno())


def test_a_send_that_moves_nothing_times_out(pair: tuple[socket.socket, socket.socket]) -> None:
    data = np.zeros(64 << 20, dtype=np.uint8)
    timeout = struct.pack("@ll", 0, 50_000)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    with pytest.raises(TimeoutError):
        send_put(pair[0].fileno(), 1, data.ctypes.data, data.nbytes, runs((0, 0, data.nbytes)))


def extents(sock: socket.socket, *rows: tuple[int, int]) -> None:
    """The header of a put, without its bytes."""
    flat = [number for row in rows for number in row]
    sock.sendall(struct.pack(f"<QI{len(flat)}q", 1, len(rows), *flat))


@settings(max_examples=300)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 47), st.integers(1, 12)), min_size=1, max_size=4),
        max_size=12,
    )
)
def test_each_byte_is_taken_once(puts: list[list[tuple[int, int]]]) -> None:
    ours, peer = socket.socketpair()
    memory = np.zeros(12 * BLOCK, dtype=np.uint8)
    into = landing(memory, *range(12))
    taken: set[int] = set()
    with ours, peer:
        for rows in puts:
            extents(peer, *rows)
            put = receive_header(ours.fileno())
            assert put is not None
            wanted = [at for start, length in rows for at in range(start, start + length)]
            fits = max(wanted) < memory.nbytes
            once = len(set(wanted)) == len(wanted) and not taken & set(wanted)
            assert (into.claim(put) == "") == (fits and once)
            if not (fits and once):
                break
            taken |= set(wanted)


def test_very_many_runs_are_soon_taken() -> None:
    """As many as a header has, one byte each with gaps between, again and again."""
    count, rounds = 1 << 16, 8
    memory = np.zeros(2 * count * rounds, dtype=np.uint8)
    into = Landing(memory.ctypes.data, memory.nbytes, memory.nbytes, [0])
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.settimeout(30)
        until = time.monotonic() + 60
        for number in range(rounds):
            rows = [(2 * (number * count + i), 1) for i in range(count)]
            sending = threading.Thread(target=extents, args=(peer, *rows))
            sending.start()
            put = receive_header(ours.fileno())
            sending.join()
            assert put is not None
            assert into.claim(put) == ""
            assert time.monotonic() < until, f"{number + 1} of {rounds} took a minute"


def test_overlapping_runs_are_refused_before_they_add_up() -> None:
    """Each names every block: as many as a header has would not fit into memory."""
    count, blocks = 1 << 9, 1 << 16
    memory = np.zeros(blocks * BLOCK, dtype=np.uint8)
    into = landing(memory, *range(blocks))
    ours, peer = socket.socketpair()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ours, peer:
        rows = [(0, memory.nbytes)] * count
        sending = threading.Thread(target=extents, args=(peer, *rows))
        sending.start()
        put = receive_header(ours.fileno())
        sending.join()
        assert put is not None and "came already" in into.claim(put)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB

"""What every transport promises (runtime/transfer/base.py): bytes, fences, refusals, and no
fallback.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from rdma_lab import BINDINGS, GPU_KINDS, path_of
from transport_rig import Rig, block_runs, eventually

from runtime.errors import TransferError
from runtime.transfer import verbs

RDMA = [
    pytest.param(f"{kind}-{name}", marks=pytest.mark.rdma)
    for kind in ("rdma", "rdma_gpu")
    for name in BINDINGS
]


@pytest.fixture(params=["cuda_ipc", "shm", "tcp", *RDMA])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind, _, binding = request.param.partition("-")
    if binding:
        monkeypatch.setattr(verbs, "BINDINGS", {binding: verbs.BINDINGS[binding]})
    return str(kind)


@pytest.fixture
def rig(kind: str) -> Iterator[Rig]:
    made = Rig.make(kind, blocks=32, size=3 * 4096)
    made.connect()
    yield made
    made.close()


def all_landed(rig: Rig, nonce: int, count: int) -> None:
    eventually(lambda: rig.receiver.landed(nonce, count) == count)


# ---- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_exactly_and_nowhere_else(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, rig.blocks + 1)
    source, target = rng.sample(range(rig.blocks), count), rng.sample(range(rig.blocks), count)
    others = [b for b in range(rig.blocks) if b not in target]
    rig.receiver.expect(1, tuple(target))
    at = 0
    while at < count:
        end = min(count, at + rng.randrange(1, 9))
        runs = block_runs(source[at:end], target[at:end], rig.size)
        assert rig.sender.put(1, rig.source, runs, end) == (end - at) * rig.size
        at = end
    all_landed(rig, 1, count)
    assert rig.bytes_of(target) == rig.pool_bytes(source)
    assert rig.bytes_of(others) == b"\xee" * len(others) * rig.size


def test_merged_runs(rig: Rig) -> None:
    rig.receiver.expect(1, tuple(range(4, 20)))
    runs = np.array([[0, 4, 10], [20, 14, 6]], dtype=np.int64) * rig.size
    rig.sender.put(1, rig.source, runs, 16)
    all_landed(rig, 1, 16)
    assert rig.bytes_of(list(range(4, 20))) == rig.pool_bytes([*range(10), *range(20, 26)])


def test_blocks_gathered_from_many_places(rig: Rig) -> None:
    """As from the pools of several tensor-parallel ranks: parts of a block lie far apart."""
    part = rig.size // 6
    parts = random.Random(2).sample(range(rig.blocks * 6), 5 * 6)
    target = [9, 10, 3, 31, 0]
    places = [block * rig.size + n * part for block in target for n in range(6)]
    runs = np.array([(s * part, at, part) for s, at in zip(parts, places, strict=True)])
    rig.receiver.expect(1, tuple(target))
    for some, whole in ((runs[:18], 3), (runs[18:], 5)):
        rig.sender.put(1, rig.source, some, whole)
    all_landed(rig, 1, 5)
    wanted = b"".join(rig.pool[s * part : (s + 1) * part].tobytes() for s in parts)
    assert rig.bytes_of(target) == wanted
    assert not rig.refused


def test_some_layers_of_many_blocks_at_a_time(rig: Rig) -> None:
    """Blocks are whole, and so landed, only with the last part of each."""
    target, part = [9, 10, 3, 31, 0, 12], rig.size // 3
    source = random.Random(3).sample(range(rig.blocks), 6)
    rig.receiver.expect(1, tuple(target))
    seen = []
    for blocks, whole in ((slice(0, 4), 4), (slice(4, 6), 6)):
        for n in range(3):
            pairs = zip(source[blocks], target[blocks], strict=True)
            rows = [(s * rig.size + n * part, t * rig.size + n * part, part) for s, t in pairs]
            before = 0 if whole == 4 else 4
            done = whole if n == 2 else before
            rig.sender.put(1, rig.source, np.array(rows, dtype=np.int64), done)
            all_landed(rig, 1, done)
            seen.append(rig.receiver.landed(1, done))
    assert seen == [0, 0, 4, 4, 4, 6]
    assert rig.bytes_of(target) == rig.pool_bytes(source)
    assert not rig.refused


def test_reservations_do_not_mix(rig: Rig) -> None:
    rig.receiver.expect(1, (0, 1, 2))
    rig.receiver.expect(2, (7, 6))
    rig.sender.put(1, rig.source, block_runs([0, 1], [0, 1], rig.size), 2)
    rig.sender.put(2, rig.source, block_runs([5, 4], [7, 6], rig.size), 2)
    rig.sender.put(1, rig.source, block_runs([2], [2], rig.size), 3)
    all_landed(rig, 1, 3)
    all_landed(rig, 2, 2)
    assert rig.bytes_of([0, 1, 2, 7, 6]) == rig.pool_bytes([0, 1, 2, 5, 4])


@pytest.mark.parametrize("kind", GPU_KINDS, indirect=True)
def test_what_leaves_a_gpu_is_what_the_model_has_enqueued(rig: Rig) -> None:
    new = bytes([7]) * rig.size
    rig.gpu.enqueued.append(lambda: rig.pool.__setitem__(slice(0, rig.size), 7))
    rig.receiver.expect(1, (4,))
    rig.sender.put(1, rig.source, block_runs([0], [4], rig.size), 1)
    all_landed(rig, 1, 1)
    assert rig.bytes_of([4]) == new


def test_buffer_and_device_pool_in_one_put(rig: Rig) -> None:
    """Block 0 is decode's buffer, where the others are its device pool."""
    rig.receiver.expect(1, (3, 0, 1))
    rig.sender.put(1, rig.source, block_runs([5, 6, 7], [3, 0, 1], rig.size), 3)
    all_landed(rig, 1, 3)
    assert rig.bytes_of([3, 0, 1]) == rig.pool_bytes([5, 6, 7])
    if rig.on_gpus:
        assert rig.receiver.reaches_pool and rig.sender.pool_bytes == rig.device_region.nbytes
        assert rig.sender.reads_gpu


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run", [(-1, 0, 8), (32 * 3 * 4096, 0, 8), (32 * 3 * 4096 - 4, 0, 8), (0, 0, -8)]
)
def test_a_run_outside_of_the_source_is_refused(rig: Rig, run: tuple[int, int, int]) -> None:
    before = rig.bytes_of()
    rig.receiver.expect(1, (0,))
    with pytest.raises(TransferError):
        rig.sender.put(1, rig.source, np.array([run], dtype=np.int64), 0)
    assert rig.bytes_of() == before


@pytest.mark.parametrize("target", [-1, 32, 1 << 40])
def test_a_run_outside_of_the_buffer_writes_nothing(rig: Rig, target: int) -> None:
    before = rig.bytes_of()
    rig.receiver.expect(1, (0, 1))
    runs = block_runs([0, 1], [0, target], rig.size)
    if rig.kind == "tcp":
        rig.sender.put(1, rig.source, runs, 2)
        eventually(lambda: rig.refused)
    else:
        with pytest.raises(TransferError):
            rig.sender.put(1, rig.source, runs, 2)
    assert rig.bytes_of() == before


def test_an_aborted_sender_puts_nothing(rig: Rig) -> None:
    before = rig.bytes_of()
    rig.receiver.expect(1, (0,))
    rig.sender.abort()
    for _ in range(2):
        with pytest.raises(TransferError):
            rig.sender.put(1, rig.source, block_runs([0], [0], rig.size), 1)
    assert rig.bytes_of() == before


# ---- fences ------------------------------------------------------------------------------------


def test_nothing_changes_behind_a_fence(kind: str) -> None:
    """Revoke in the middle of a stream of puts: once fenced, the blocks may be used for something
    else.
    """
    count = 16 if path_of(kind) == "rdma" else 64  # a page's first touch is slow in the guest
    rig = Rig.make(kind, blocks=count, size=1 << 20)
    rig.connect()
    stop = threading.Event()

    def put() -> None:
        nonce = 1
        while not stop.is_set():
            for b in range(count):
                rig.sender.put(nonce, rig.source, block_runs([b], [b], rig.size), b + 1)

    thread = threading.Thread(target=put)
    rig.receiver.expect(1, tuple(range(count)))
    thread.start()
    try:
        eventually(lambda: rig.bytes_of([3]) == rig.pool_bytes([3]))
        fenced = rig.receiver.revoke(1)
        assert fenced == (kind == "tcp")
        if not fenced:
            # shm has no fence while its writer lives, rdma none but the end of the session: what a
            # session does is stop the writer, and wait.
            assert not rig.receiver.writer_gone()
            stop.set()
            thread.join()
        rig.fill(0x11)
        new = rig.bytes_of()
        time.sleep(0.1)
        assert rig.bytes_of() == new
    finally:
        stop.set()
        thread.join()
        rig.close()


def test_a_closed_receiver_is_written_no_more_or_says_so(rig: Rig) -> None:
    rig.receiver.expect(1, (0,))
    rig.receiver.close()
    if not rig.receiver.writer_gone():
        assert rig.kind in ("shm", "cuda_ipc")
        return
    before = rig.bytes_of()
    with pytest.raises(TransferError):
        for _ in range(1000):
            rig.sender.put(1, rig.source, block_runs([0], [0], rig.size), 1)
    assert rig.bytes_of() == before


def test_a_killed_sender_is_proven_gone(kind: str) -> None:
    rig = Rig.make(kind, blocks=2, size=1 << 20)
    try:
        rig.connect_child()
        for nonce in range(1, 1000):  # the child counts them up with its puts
            rig.receiver.expect(nonce, (0,))
        time.sleep(0.2)
        assert not rig.receiver.writer_gone()
        assert rig.child is not None
        rig.child.kill()
        if rig.kind == "rdma":
            # Nobody tells a queue pair: the control connection does, and then this is the fence.
            assert not rig.receiver.writer_gone()
            rig.receiver.close()
        eventually(rig.receiver.writer_gone)
        before = rig.bytes_of()
        time.sleep(0.05)
        assert rig.bytes_of() == before
        assert rig.receiver.revoke(1)
        if kind == "tcp":
            eventually(lambda: rig.closed)
    finally:
        rig.close()


def test_a_stopped_sender_is_not_gone(kind: str) -> None:
    rig = Rig.make(kind, blocks=2, size=4096)
    try:
        rig.connect_child()
        assert rig.child is not None
        rig.child.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert not rig.receiver.writer_gone()
        rig.child.send_signal(signal.SIGCONT)
    finally:
        rig.close()

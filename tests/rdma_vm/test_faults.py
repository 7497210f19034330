"""Faults of network and peer on real verbs: each ends a put in a named error, and in time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import msgspec
import pytest
from rdma_lab import BINDINGS, DECODE_LINK, PREFILL_LINK, link_down, netem
from transport_rig import Rig, block_runs, eventually

from runtime.errors import TransferError
from runtime.transfer import rdma, verbs
from runtime.transfer.rdma import RdmaOffer, RdmaReceiver, RdmaSender
from runtime.transfer.tcp import memory

pytestmark = pytest.mark.rdma

BLOCKS, SIZE = 8, 256 << 10
DEADLINE_S = 12.0
"""More than the slowest of these takes: a put that moves nothing fails after rdma.STALL_S."""


@pytest.fixture(params=BINDINGS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(verbs, "BINDINGS", {request.param: verbs.BINDINGS[request.param]})
    made = Rig.make("rdma", BLOCKS, SIZE)
    made.connect()
    yield made
    made.close()


def put(rig: Rig, nonce: int = 1) -> int:
    numbers = list(range(BLOCKS))
    rig.receiver.expect(nonce, tuple(numbers))
    return rig.sender.put(nonce, rig.source, block_runs(numbers, numbers, SIZE), len(numbers))


def failed_put(rig: Rig) -> str:
    began = time.monotonic()
    with pytest.raises(TransferError) as error:
        put(rig)
    assert time.monotonic() - began < DEADLINE_S
    text = str(error.value)
    # Both ends are named, and a later put says the same without trying.
    assert "from rxa port 1" in text and "to rxb port 1" in text
    with pytest.raises(TransferError):
        put(rig, 2)
    return text


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (lambda: netem(PREFILL_LINK, "loss", "100%"), "RETRY_EXC_ERR"),
        (lambda: netem(DECODE_LINK, "loss", "100%"), "RETRY_EXC_ERR"),  # acknowledgements
        (lambda: link_down(DECODE_LINK), "RETRY_EXC_ERR"),
        (lambda: link_down(PREFILL_LINK), "_ERR"),  # flushed at once, or given up
    ],
    ids=["data lost", "acks lost", "peer's link down", "own link down"],
)
def test_a_cut_wire(
    rig: Rig, fault: Callable[[], AbstractContextManager[None]], status: str
) -> None:
    with fault():
        assert status in failed_put(rig)


@pytest.mark.parametrize("what", [("loss", "1%"), ("delay", "2ms")], ids=" ".join)
def test_a_bad_wire_costs_time_and_no_byte(rig: Rig, what: tuple[str, ...]) -> None:
    with netem(PREFILL_LINK, *what):
        assert put(rig) == BLOCKS * SIZE
        eventually(lambda: rig.receiver.landed(1, 0) == BLOCKS)
    assert rig.bytes_of() == rig.pool_bytes(list(range(BLOCKS)))


def test_a_wrong_key(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    before = rig.bytes_of()
    peer = rig.sender._peer
    rig.sender._peer = msgspec.structs.replace(peer, key=peer.key ^ 0x5500)
    assert "REM_ACCESS_ERR" in failed_put(rig)
    # The receiver's end is broken by that, and says so.
    eventually(lambda: rig.closed)
    assert rig.receiver.writer_gone()
    assert rig.bytes_of() == before


def test_a_put_is_woken_by_an_abort(rig: Rig) -> None:
    with netem(PREFILL_LINK, "loss", "100%"):
        threading.Timer(0.2, rig.sender.abort).start()
        began = time.monotonic()
        with pytest.raises(TransferError, match="the session is closed"):
            put(rig)
        assert time.monotonic() - began < DEADLINE_S


def test_packets_still_under_way_find_no_queue_pair(rig: Rig) -> None:
    """The fence is the receiver's alone: what was sent before it, and arrives after it, is lost."""
    other = b"\x11" * rig.buffer.nbytes
    with netem(PREFILL_LINK, "delay", "400ms"):
        sending = threading.Thread(target=_quiet_put, args=(rig,))
        sending.start()
        time.sleep(0.1)
        rig.receiver.close()
        assert rig.receiver.writer_gone()
        memory(rig.buffer.region)[:] = other
        sending.join()
        assert rig.bytes_of() == other


def _quiet_put(rig: Rig) -> None:
    with contextlib.suppress(TransferError):
        put(rig)


def test_a_put_that_stalls_has_a_deadline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "STALL_S", 0.3)
    with netem(PREFILL_LINK, "loss", "100%"):
        assert "no write completed for 0.3 s" in failed_put(rig)


@pytest.mark.parametrize("whole", [0, 3])
def test_blocks_that_cannot_be_whole_are_refused(rig: Rig, whole: int) -> None:
    rig.receiver.expect(1, (0, 1))
    rig.sender.put(1, rig.source, block_runs([0], [0], SIZE), 1)
    rig.sender.put(1, rig.source, block_runs([1], [1], SIZE), whole)
    eventually(lambda: rig.refused)
    assert rig.refused == [(1, f"{whole} whole blocks after 1, of 2")]


def test_an_address_that_cannot_be_reached(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    sender_adapter, peer = rig.sender._adapter, rig.sender._peer
    nobody = peer.gid[:-1] + bytes([77])
    offer = RdmaOffer(sender_adapter)
    far = msgspec.structs.replace(peer, gid=nobody, number=offer.end.number)
    offer.close()
    with pytest.raises(TransferError, match="rxa port 1"):
        RdmaSender(sender_adapter, far, rig.buffer.nbytes)


def test_nothing_is_left_of_sessions_that_ended(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    adapter = rig.sender._adapter

    def held() -> tuple[int, str]:
        shown = subprocess.run(["rdma", "resource", "show", "rxa"], capture_output=True, text=True)
        return len(os.listdir("/proc/self/fd")), shown.stdout

    before = held()
    for _ in range(20):
        offer = RdmaOffer(adapter)
        receiver = RdmaReceiver(offer, rig.sender._peer, rig._events())
        RdmaSender(adapter, offer.end, rig.buffer.nbytes).close()
        receiver.close()
        offer.close()
        assert receiver.writer_gone()
    assert held() == before and "qp" in before[1]


def test_ends_of_two_kinds_do_not_meet(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    other = msgspec.structs.replace(rig.sender._peer, fabric="InfiniBand")
    with pytest.raises(TransferError, match=r"RoCE v2 over IPv4.*is InfiniBand"):
        RdmaSender(rig.sender._adapter, other, rig.buffer.nbytes)
    offer = RdmaOffer(rig.sender._adapter)
    with pytest.raises(TransferError, match="InfiniBand"):
        RdmaReceiver(offer, other, rig._events())

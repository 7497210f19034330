"""The CPU buffer: no block is ever free while somebody may still write or read it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import ConfigError
from runtime.kv.buffer import CpuBuffer, Reservation

BLOCK = 4096


def make(blocks: int) -> CpuBuffer:
    return CpuBuffer.create(f"pdctl-test-{secrets.token_hex(6)}", blocks * BLOCK, BLOCK)


@pytest.fixture
def buffer() -> Iterator[CpuBuffer]:
    made = make(8)
    yield made
    made.close()


def reserve(buffer: CpuBuffer, nonce: int, count: int) -> Reservation:
    reservation = buffer.reserve(nonce, count)
    assert reservation is not None
    return reservation


def test_it_is_a_segment_of_whole_blocks_that_close_unlinks() -> None:
    name = f"pdctl-test-{secrets.token_hex(6)}"
    buffer = CpuBuffer.create(name, 3 * BLOCK + 100, BLOCK)
    assert (buffer.num_blocks, buffer.nbytes, buffer.name) == (3, 3 * BLOCK, name)
    assert os.path.exists(f"/dev/shm/{name}")
    buffer.close()
    assert not os.path.exists(f"/dev/shm/{name}")


def test_what_cannot_be_had_is_a_config_error_and_leaves_nothing() -> None:
    name = f"pdctl-test-{secrets.token_hex(6)}"
    with pytest.raises(ConfigError, match="cpu_buffer"):
        CpuBuffer.create(name, 1 << 50, BLOCK)
    with pytest.raises(ConfigError, match="holds no block"):
        CpuBuffer.create(name, BLOCK - 1, BLOCK)
    assert not os.path.exists(f"/dev/shm/{name}")


def test_no_room_takes_nothing(buffer: CpuBuffer) -> None:
    assert reserve(buffer, 1, 5).blocks == (0, 1, 2, 3, 4)
    assert buffer.reserve(2, 4) is None
    assert buffer.used_blocks == 5
    assert reserve(buffer, 3, 3).blocks == (5, 6, 7)


def test_copied_blocks_are_free_before_the_rest_has_landed(buffer: CpuBuffer) -> None:
    r = reserve(buffer, 1, 8)
    freed = []
    buffer.on_free = lambda: freed.append(buffer.used_blocks)
    buffer.copied(r, 3)
    assert freed == [5]
    assert reserve(buffer, 2, 3).blocks == (0, 1, 2)
    buffer.copied(r, 8)
    assert buffer.reservations == 2  # its writer has not said its last word
    buffer.close_writer(r)
    assert buffer.reservations == 1


def test_abandoned_blocks_stay_in_quarantine_until_the_writer_is_closed(buffer: CpuBuffer) -> None:
    r = reserve(buffer, 1, 6)
    buffer.copied(r, 2)
    buffer.abandon(r)
    assert (buffer.used_blocks, buffer.quarantined_blocks) == (4, 4)
    assert buffer.reserve(2, 5) is None
    buffer.close_writer(r)
    assert (buffer.used_blocks, buffer.quarantined_blocks, buffer.reservations) == (0, 0, 0)


def test_lent_blocks_are_in_quarantine_all_at_once(buffer: CpuBuffer) -> None:
    r = reserve(buffer, 1, 0)
    back = []
    buffer.lend(r, tuple(range(100, 104)), lambda: back.append(1))
    buffer.copied(r, 4)  # all have landed, and the writer has not said its last word
    assert buffer.quarantined_blocks == 0
    buffer.abandon(r)
    assert (buffer.quarantined_blocks, buffer.used_blocks, back) == (4, 0, [])
    buffer.close_writer(r)
    assert (buffer.quarantined_blocks, buffer.reservations, back) == (0, 0, [1])


def test_a_copy_that_reads_keeps_abandoned_blocks(buffer: CpuBuffer) -> None:
    r = reserve(buffer, 1, 6)
    buffer.set_reading(r, True)
    buffer.close_writer(r)
    buffer.abandon(r)
    assert (buffer.used_blocks, buffer.quarantined_blocks) == (6, 0)
    buffer.copied(r, 4)
    assert buffer.used_blocks == 2
    buffer.set_reading(r, False)
    assert (buffer.used_blocks, buffer.reservations) == (0, 0)


class Machine(RuleBasedStateMachine):
    """Any order of events. The model: which blocks each reservation may still be written or read
    in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buffer = make(10)
        self.nonce = 0
        self.live: list[Reservation] = []

    def teardown(self) -> None:
        for r in self.live:
            self.buffer.set_reading(r, False)
            self.buffer.close_writer(r)
            self.buffer.abandon(r)
        assert (self.buffer.used_blocks, self.buffer.reservations) == (0, 0)
        self.buffer.close()

    @rule(count=st.integers(1, 10))
    def reserve(self, count: int) -> None:
        self.nonce += 1
        free = 10 - self.buffer.used_blocks
        r = self.buffer.reserve(self.nonce, count)
        assert (r is not None) == (count <= free)
        if r:
            self.live.append(r)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(self.live))
        match data.draw(st.sampled_from(["copied", "reading", "writer", "abandon"])):
            case "copied":
                self.buffer.copied(r, data.draw(st.integers(r.freed, len(r.blocks))))
            case "reading":
                self.buffer.set_reading(r, not r.reading)
            case "writer":
                self.buffer.close_writer(r)
            case "abandon":
                self.buffer.abandon(r)

    @invariant()
    def no_block_has_two_owners_and_none_is_lost(self) -> None:
        held = [b for r in self.live for b in r.blocks[r.freed :]]
        assert len(held) == len(set(held))
        assert self.buffer.used_blocks == len(held)
        self.live = [r for r in self.live if r.held or r.writer_open or r.reading]

    @invariant()
    def what_may_be_written_or_read_is_held(self) -> None:
        for r in self.live:
            if not r.wanted and r.held:
                assert r.writer_open or r.reading
        quarantined = sum(r.held for r in self.live if r.writer_open and not r.wanted)
        assert self.buffer.quarantined_blocks == quarantined


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

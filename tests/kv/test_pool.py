"""The device pool: its geometry is the layout's, and no block is ever lost or given out twice."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.errors import ConfigError
from runtime.kv.layout import K, KvLayout, V
from runtime.kv.pool import BlockAllocator, KvPool, pool_blocks

CPU = torch.device("cpu")


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 16]),
    block=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_views_lie_where_the_layout_says(
    layers: int, heads: int, dim: int, block: int, data: st.DataObject
) -> None:
    layout = KvLayout(layers, heads, dim, block, "float32")
    pool = KvPool(layout, pool_blocks(layout, 3 * layout.block_bytes + 5), CPU)
    assert pool.num_blocks == 3
    assert pool.region.nbytes == 3 * layout.block_bytes
    at = {
        "block": data.draw(st.integers(0, 2)),
        "layer": data.draw(st.integers(0, layers - 1)),
        "kv": data.draw(st.sampled_from([K, V])),
        "head": data.draw(st.integers(0, heads - 1)),
        "token": data.draw(st.integers(0, block - 1)),
    }
    pool.layers[at["layer"]][at["block"], at["kv"], at["head"], at["token"], 1] = 42.0
    address = pool.region.address + layout.offset(**at) + layout.dtype_bytes
    assert ctypes.c_float.from_address(address).value == 42.0


def test_too_few_bytes_say_how_many_are_needed() -> None:
    layout = KvLayout(2, 2, 16, 16, "bfloat16")
    with pytest.raises(ConfigError, match="holds 1 blocks") as caught:
        pool_blocks(layout, 2 * layout.block_bytes - 1)
    assert f"{2 * layout.block_bytes:,}" in caught.value.hint
    with pytest.raises(ConfigError, match="holds 1 blocks") as caught:
        pool_blocks(layout, 6 * layout.block_bytes - 1, ranks=3)
    assert f"{6 * layout.block_bytes:,}" in caught.value.hint


def test_a_pool_in_shared_memory_takes_its_beginning() -> None:
    layout = KvLayout(1, 1, 2, 2, "bfloat16")
    memory = torch.zeros(3 * layout.block_bytes + 100, dtype=torch.uint8)
    pool = KvPool(layout, 3, CPU, memory)
    pool.layers[0].fill_(1)
    assert memory[: 3 * layout.block_bytes].count_nonzero() == 3 * layout.block_bytes // 2 * 2
    assert not memory[3 * layout.block_bytes :].any()
    assert (pool.region.address, pool.region.nbytes) == (memory.data_ptr(), memory.nbytes)


def test_more_bytes_than_there_are_is_a_config_error() -> None:
    layout = KvLayout(2, 2, 16, 16, "float32")
    with pytest.raises(ConfigError, match="cannot be allocated on cpu"):
        KvPool(layout, 1 << 44, CPU)


def test_cached_blocks_are_reused_last_and_oldest_first() -> None:
    evicted: list[int] = []
    blocks = BlockAllocator(4, evicted.append)
    first = blocks.allocate(3)
    assert first == [0, 1, 2]
    for block in first:
        blocks.mark_reusable(block)
    blocks.release(first)
    assert (blocks.available, blocks.cached, blocks.held) == (4, 3, 0)
    assert blocks.allocate(1) == [3]
    assert evicted == []
    # Of one request's blocks the last goes first: the others are a shorter prefix still.
    assert blocks.allocate(2) == [2, 1]
    assert evicted == [2, 1]
    blocks.retain(0)
    assert blocks.allocate(1) is None
    assert blocks.held == 4


def test_misuse_is_our_bug() -> None:
    blocks = BlockAllocator(2, lambda _: None)
    held = blocks.allocate(1)
    assert held is not None
    blocks.release(held)
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(held)
    with pytest.raises(AssertionError, match="free and holds nothing"):
        blocks.retain(held[0])
    with pytest.raises(AssertionError, match="is not held"):
        blocks.mark_reusable(held[0])


class AllocatorMachine(RuleBasedStateMachine):
    """Against a plain model: holders, and which free blocks are still reusable."""

    SIZE = 7

    def __init__(self) -> None:
        super().__init__()
        self.reusable: set[int] = set()
        self.holders: list[list[int]] = []
        self.blocks = BlockAllocator(self.SIZE, self.evicted)

    def evicted(self, block: int) -> None:
        assert block in self.reusable and not self.references(block)
        self.reusable.remove(block)

    def references(self, block: int) -> int:
        return sum(holder.count(block) for holder in self.holders)

    @rule(count=st.integers(0, SIZE + 1))
    def allocate(self, count: int) -> None:
        free = self.SIZE - len({b for holder in self.holders for b in holder})
        got = self.blocks.allocate(count)
        assert (got is None) == (count > free)
        if got is not None:
            assert len(set(got)) == count
            assert not any(self.references(block) for block in got)
            assert not self.reusable & set(got)
            self.holders.append(got)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.holders) - 1))
        self.blocks.release(self.holders.pop(which))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({b for h in self.holders for b in h})))
        self.blocks.mark_reusable(block)
        self.reusable.add(block)

    @precondition(lambda self: self.reusable)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.reusable)))
        self.blocks.retain(block)
        self.holders.append([block])

    @invariant()
    def nothing_is_lost(self) -> None:
        held = {block for holder in self.holders for block in holder}
        assert self.blocks.held == len(held)
        assert self.blocks.available == self.SIZE - len(held)
        assert self.blocks.cached == len(self.reusable - held)


AllocatorMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestAllocator = AllocatorMachine.TestCase

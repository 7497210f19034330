"""KV geometry against numpy: offsets, runs, and whole blocks to and from any number of ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.kv.layout import (
    LAYOUT_VERSION,
    K,
    KvLayout,
    PoolMap,
    Shard,
    V,
    merge_runs,
)

Bytes = NDArray[np.uint8]

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 9),
    block_size=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


def apply(runs: NDArray[np.int64], src: Bytes, dst: Bytes) -> None:
    for source, target, length in runs:
        dst[target : target + length] = src[source : source + length]


def as_blocks(pool: Bytes, layout: KvLayout) -> Bytes:
    """(blocks, layers, 2, heads, tokens, bytes of one row)"""
    return pool.reshape(-1, *layout.block_shape[:-1], layout.row_bytes)


def numbered(layout: KvLayout, blocks: int, seed: int = 0) -> Bytes:
    count = blocks * layout.block_bytes
    return np.random.default_rng(seed).integers(1, 256, count, dtype=np.uint8)


def test_smollm2() -> None:
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
    assert layout.row_bytes == 256
    assert layout.head_stride == 4096
    assert layout.kv_stride == 12288
    assert layout.layer_stride == 24576
    assert layout.block_bytes == 737280
    assert layout.token_bytes == 46080
    assert layout.block_shape == (30, 2, 3, 16, 64)
    assert layout.num_blocks_in(10 * 737280 - 1) == 9
    assert [layout.blocks_for(n) for n in (0, 1, 16, 17, 1024)] == [0, 1, 1, 2, 64]


@given(layouts, st.data())
def test_offset_is_that_of_a_c_ordered_array(layout: KvLayout, data: st.DataObject) -> None:
    blocks = 3
    index = np.arange(blocks * layout.block_bytes, dtype=np.int64)
    array = index.reshape(blocks, *layout.block_shape[:-1], layout.row_bytes)
    block, layer, kv, head, token = (
        data.draw(st.integers(0, size - 1)) for size in array.shape[:-1]
    )
    assert layout.offset(block, layer, kv, head, token) == array[block, layer, kv, head, token, 0]
    assert layout.block_bytes == array[0].size
    assert layout.token_bytes * layout.block_size == layout.block_bytes


def test_keys_come_before_values() -> None:
    layout = KvLayout(2, 3, 4, 5, "bfloat16")
    assert (K, V) == (0, 1)
    assert layout.offset(0, 0, V) - layout.offset(0, 0, K) == layout.kv_stride


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
def test_no_axis_is_empty(field: str) -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        KvLayout(**sizes, dtype="float32")


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16, not 'float16'"):
        KvLayout(1, 1, 1, 1, "float16")  # type: ignore[arg-type]


def test_every_difference_shows_in_the_fingerprint() -> None:
    base = KvLayout(2, 3, 4, 5, "float32")
    others = [
        KvLayout(9, 3, 4, 5, "float32"),
        KvLayout(2, 9, 4, 5, "float32"),
        KvLayout(2, 3, 9, 5, "float32"),
        KvLayout(2, 3, 4, 9, "float32"),
        KvLayout(2, 3, 4, 5, "bfloat16"),
    ]
    for other in others:
        differing = [k for k, v in base.fingerprint().items() if other.fingerprint()[k] != v]
        assert len(differing) == 1
    assert base.fingerprint()["layout_version"] == LAYOUT_VERSION


@given(layouts, st.data())
def test_block_runs_move_blocks(layout: KvLayout, data: st.DataObject) -> None:
    src_blocks = data.draw(st.lists(st.integers(0, 7), max_size=8))
    order = data.draw(st.permutations(range(8)))
    dst_blocks = order[: len(src_blocks)]
    src, dst = numbered(layout, 8), np.zeros(8 * layout.block_bytes, np.uint8)
    runs = layout.block_runs(src_blocks, dst_blocks)
    assert runs.dtype == np.int64 and runs.flags.c_contiguous and runs.shape[1] == 3
    apply(runs, src, dst)
    expected = np.zeros_like(dst)
    if src_blocks:
        as_blocks(expected, layout)[dst_blocks] = as_blocks(src, layout)[src_blocks]
    assert np.array_equal(dst, expected)


def test_consecutive_blocks_become_one_run() -> None:
    layout = KvLayout(1, 1, 1, 1, "float32")
    size = layout.block_bytes
    runs = layout.block_runs([4, 5, 6, 9, 10, 2], [0, 1, 2, 3, 7, 8])
    assert runs.tolist() == [
        [4 * size, 0, 3 * size],
        [9 * size, 3 * size, size],
        [10 * size, 7 * size, size],
        [2 * size, 8 * size, size],
    ]


def test_unequal_block_lists() -> None:
    layout = KvLayout(2, 4, 1, 1, "float32")
    with pytest.raises(ValueError, match="2 source blocks for 1 destination"):
        layout.block_runs([1, 2], [1])
    with pytest.raises(ValueError, match="2 blocks of the pool for 1 whole"):
        PoolMap(layout, 4, 2).gather([1, 2], [1])


def test_merge_joins_only_what_continues_on_both_sides() -> None:
    runs = np.array([[0, 10, 2], [2, 12, 3], [5, 16, 1], [7, 17, 1], [8, 18, 1]], dtype=np.int64)
    assert merge_runs(runs).tolist() == [[0, 10, 5], [5, 16, 1], [7, 17, 2]]
    assert merge_runs(runs[:0]).shape == (0, 3)


# (KV heads, tp_size of prefill, tp_size of decode): all divisors and multiples.
GROUPS = [
    (heads, src, dst)
    for heads in (1, 2, 3, 4, 6, 8)
    for src, dst in product((1, 2, 3, 4, 6, 8, 12, 16), repeat=2)
    if all(heads % size == 0 or size % heads == 0 for size in (src, dst))
]


def pools_of(whole: Bytes, pools: PoolMap) -> Bytes:
    """What each rank holds of the whole model's blocks, as they lie in the region."""
    by_head = as_blocks(whole, pools.model)
    region = np.zeros(pools.nbytes, np.uint8)
    for rank in range(pools.tp_size):
        heads = list(pools.shard(rank).heads(pools.model.num_kv_heads))
        part = by_head[:, :, :, heads].ravel()
        region[rank * pools.rank_stride :][: part.size] = part
    return region


def writes_of(runs: NDArray[np.int64], size: int) -> Bytes:
    """How often each byte is written."""
    writes = np.zeros(size, np.uint8)
    for _, target, length in runs:
        writes[target : target + length] += 1
    return writes


def check_chain(model: KvLayout, sizes: tuple[int, int], lists: tuple[list[int], ...]) -> None:
    """Prefill's pools -> whole blocks of the buffer -> decode's pools: as the whole model's KV."""
    prefill, decode = PoolMap(model, 5, sizes[0]), PoolMap(model, 6, sizes[1])
    src, through, dst = lists
    whole = numbered(model, 5)
    out = prefill.gather(src, through)
    back = decode.scatter(through, dst)
    buffer = np.zeros(7 * model.block_bytes, np.uint8)
    apply(out, pools_of(whole, prefill), buffer)
    assert np.array_equal(as_blocks(buffer, model)[through], as_blocks(whole, model)[src])
    written = as_blocks(writes_of(out, buffer.size), model)
    assert (written[through] == 1).all() and written.sum() == written[through].size

    result = np.zeros(decode.nbytes, np.uint8)
    apply(back, buffer, result)
    wanted = np.zeros((6, model.block_bytes), np.uint8)
    wanted[dst] = whole.reshape(5, -1)[src]
    assert np.array_equal(result, pools_of(wanted.ravel(), decode))
    assert writes_of(back, result.size).max(initial=0) <= 1


@pytest.mark.parametrize(("heads", "src_size", "dst_size"), GROUPS)
def test_kv_survives_any_pair_of_tp_sizes(heads: int, src_size: int, dst_size: int) -> None:
    model = KvLayout(num_layers=2, num_kv_heads=heads, head_dim=3, block_size=2, dtype="bfloat16")
    check_chain(model, (src_size, dst_size), ([3, 0, 1, 4], [6, 2, 3, 0], [1, 4, 5, 0]))


@settings(max_examples=60)
@given(layouts, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.data())
def test_kv_survives_in_any_layout(
    base: KvLayout, src_split: int, dst_split: int, data: st.DataObject
) -> None:
    heads = base.num_kv_heads * src_split * dst_split
    model = KvLayout(base.num_layers, heads, base.head_dim, base.block_size, base.dtype)
    count = data.draw(st.integers(0, 5))
    lists = tuple(data.draw(st.permutations(range(n)))[:count] for n in (5, 7, 6))
    check_chain(model, (src_split, dst_split), lists)


@pytest.mark.parametrize(("heads", "size"), [(4, 1), (4, 2), (4, 4), (2, 8)])
def test_blocks_leave_in_order_of_their_bytes(heads: int, size: int) -> None:
    """Transports may then send a block's parts as one stream."""
    model = KvLayout(3, heads, 4, 2, "float32")
    runs = PoolMap(model, 8, size).gather([7, 2, 3], [1, 5, 0])
    at = [byte for _, start, length in runs.tolist() for byte in range(start, start + length)]
    size = model.block_bytes
    assert at == [byte for block in (1, 5, 0) for byte in range(block * size, (block + 1) * size)]


def test_one_rank_moves_whole_blocks() -> None:
    model = KvLayout(30, 8, 64, 16, "float32")
    size, pools = model.block_bytes, PoolMap(model, 10)
    assert pools.gather([7, 8], [2, 3]).tolist() == [[7 * size, 2 * size, 2 * size]]
    assert pools.scatter([2, 3], [7, 8]).tolist() == [[2 * size, 7 * size, 2 * size]]
    assert pools.nbytes == 10 * size


def test_a_rank_moves_one_run_per_layer_and_kind() -> None:
    model = KvLayout(30, 8, 64, 16, "float32")
    for runs in (PoolMap(model, 9, 4).gather([5], [6]), PoolMap(model, 9, 4).scatter([6], [5])):
        assert len(runs) == 4 * 2 * model.num_layers
        assert set(runs[:, 2]) == {2 * model.head_stride}


def test_each_pool_starts_on_a_page() -> None:
    pools = PoolMap(KvLayout(1, 2, 3, 5, "bfloat16"), 7, 2)
    assert pools.rank_layout.block_bytes * 7 == 420
    assert (pools.rank_stride, pools.nbytes) == (4096, 8192)


def test_heads_leave_from_different_replicas() -> None:
    # 2 heads on 8 ranks: head 0 on ranks 0-3, head 1 on 4-7.
    pools = PoolMap(KvLayout(1, 2, 4, 4, "float32"), 4, 8)
    sources = pools.gather([0], [0])[:, 0] // pools.rank_stride
    assert sources.tolist() == [0, 5, 0, 5]


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (4, 3), (2, 3), (4, 6)])
def test_groups_that_do_not_divide(heads: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"tp_size {size} .* {heads} KV heads"):
        PoolMap(KvLayout(1, heads, 1, 1, "float32"), 1, size)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_is_in_its_group(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a group of {size}"):
        Shard(rank, size)

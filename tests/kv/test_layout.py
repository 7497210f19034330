"""KV geometry against numpy: offsets, runs, and slices between tensor-parallel ranks."""

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
    Shard,
    V,
    merge_runs,
    slice_runs,
    source_ranks,
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
    assert layout.block_offset(block) == array[block].flat[0]
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
    with pytest.raises(ValueError, match="2 source blocks for 1 destination"):
        slice_runs(layout, Shard(0, 1), Shard(0, 2), [1, 2], [1])


def test_merge_joins_only_what_continues_on_both_sides() -> None:
    runs = np.array([[0, 10, 2], [2, 12, 3], [5, 16, 1], [7, 17, 1], [8, 18, 1]], dtype=np.int64)
    assert merge_runs(runs).tolist() == [[0, 10, 5], [5, 16, 1], [7, 17, 2]]
    assert merge_runs(runs[:0]).shape == (0, 3)


GROUPS = [
    (heads, src, dst)
    for heads in (1, 2, 3, 4, 6, 8)
    for src, dst in product((1, 2, 3, 4, 6, 8, 12, 16), repeat=2)
    if all(heads % size == 0 or size % heads == 0 for size in (src, dst))
]


def filled_pools(model: KvLayout, size: int, blocks: int) -> tuple[Bytes, list[Bytes]]:
    """The whole model's pool, and what each rank of a group of `size` holds of it."""
    whole = numbered(model, blocks)
    by_head = as_blocks(whole, model)
    parts = []
    for rank in range(size):
        heads = list(Shard(rank, size).heads(model.num_kv_heads))
        parts.append(np.ascontiguousarray(by_head[:, :, :, heads]).ravel())
    return whole, parts


@pytest.mark.parametrize(("heads", "src_size", "dst_size"), GROUPS)
def test_slices_cover_every_destination_exactly_once(
    heads: int, src_size: int, dst_size: int
) -> None:
    model = KvLayout(num_layers=2, num_kv_heads=heads, head_dim=3, block_size=2, dtype="bfloat16")
    whole, sources = filled_pools(model, src_size, 5)
    src_blocks, dst_blocks = [3, 0, 1, 4], [1, 4, 5, 0]
    for rank in range(dst_size):
        dst = Shard(rank, dst_size)
        layout = dst.layout(model)
        result = np.zeros(6 * layout.block_bytes, np.uint8)
        writes = np.zeros(6 * layout.block_bytes, np.int64)
        givers = []
        for src_rank in range(src_size):
            runs = slice_runs(model, Shard(src_rank, src_size), dst, src_blocks, dst_blocks)
            apply(runs, sources[src_rank], result)
            for _, target, length in runs:
                writes[target : target + length] += 1
            if len(runs):
                givers.append(src_rank)
        wanted = list(dst.heads(heads))
        expected = np.zeros_like(result)
        as_blocks(expected, layout)[dst_blocks] = as_blocks(whole, model)[src_blocks][
            :, :, :, wanted
        ]
        assert np.array_equal(result, expected)
        written = as_blocks(writes.astype(np.uint8), layout)
        assert (written[dst_blocks] == 1).all() and written.sum() == written[dst_blocks].size
        assert givers == source_ranks(heads, src_size, dst)


@settings(max_examples=60)
@given(layouts, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.data())
def test_slices_of_any_layout(
    base: KvLayout, src_split: int, dst_split: int, data: st.DataObject
) -> None:
    heads = base.num_kv_heads * src_split * dst_split
    model = KvLayout(base.num_layers, heads, base.head_dim, base.block_size, base.dtype)
    whole, sources = filled_pools(model, src_split, 4)
    count = data.draw(st.integers(0, 4))
    src_blocks = data.draw(st.permutations(range(4)))[:count]
    dst_blocks = data.draw(st.permutations(range(4)))[:count]
    dst = Shard(data.draw(st.integers(0, dst_split - 1)), dst_split)
    layout = dst.layout(model)
    result = np.zeros(4 * layout.block_bytes, np.uint8)
    for rank in range(src_split):
        runs = slice_runs(model, Shard(rank, src_split), dst, src_blocks, dst_blocks)
        apply(runs, sources[rank], result)
    expected = np.zeros_like(result)
    if count:
        wanted = list(dst.heads(heads))
        as_blocks(expected, layout)[dst_blocks] = as_blocks(whole, model)[src_blocks][
            :, :, :, wanted
        ]
    assert np.array_equal(result, expected)


def test_equal_groups_move_whole_blocks() -> None:
    model = KvLayout(30, 8, 64, 16, "float32")
    rank = Shard(1, 4)
    runs = slice_runs(model, rank, rank, [7, 8], [2, 3])
    size = rank.layout(model).block_bytes
    assert runs.tolist() == [[7 * size, 2 * size, 2 * size]]


def test_a_slice_is_one_run_per_layer_and_kind() -> None:
    model = KvLayout(30, 8, 64, 16, "float32")
    runs = slice_runs(model, Shard(0, 1), Shard(3, 4), [5], [6])
    assert len(runs) == 2 * model.num_layers
    assert set(runs[:, 2]) == {2 * model.head_stride}


def test_replicas_share_the_sending() -> None:
    # 2 heads on 8 source ranks: head 0 on ranks 0-3, head 1 on 4-7.
    assert [source_ranks(2, 8, Shard(rank, 8)) for rank in range(8)] == [[r] for r in range(8)]
    assert [source_ranks(2, 8, Shard(rank, 2)) for rank in range(2)] == [[0], [5]]
    assert source_ranks(2, 8, Shard(0, 1)) == [0, 4]


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (4, 3), (2, 3), (4, 6)])
def test_groups_that_do_not_divide(heads: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"tp_size {size} .* {heads} KV heads"):
        Shard(0, size).heads(heads)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_is_in_its_group(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not in a group of {size}"):
        Shard(rank, size)

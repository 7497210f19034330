"""KV geometry: where every number of the cache lies, as pure offset arithmetic.

Owns the block-major layout `[block][layer][k,v][kv_head][token][head_dim]` and the runs (source
offset, destination offset, length) that move blocks, also between tensor-parallel ranks.
Touches no memory, imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

KvDtype = Literal["float32", "bfloat16"]

LAYOUT_VERSION: Final = 1
"""Raised with every change of what bytes mean; peers of different versions refuse each other."""

K: Final = 0
V: Final = 1

_DTYPE_BYTES: Final[dict[KvDtype, int]] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one pool (one rank's). Strides and offsets are bytes.

    The address of one number is pool + offset(block, layer, k|v, head, token) + dim * dtype_bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: KvDtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KvLayout.{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"KvLayout.dtype must be float32 or bfloat16, not {self.dtype!r}")

    @property
    def dtype_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """One head's K (or V) of one token in one layer: the stride of a token."""
        return self.head_dim * self.dtype_bytes

    @property
    def head_stride(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def kv_stride(self) -> int:
        """From a layer's K to its V."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        return 2 * self.kv_stride

    @property
    def block_bytes(self) -> int:
        """One block, which is also the stride of blocks."""
        return self.num_layers * self.layer_stride

    @property
    def token_bytes(self) -> int:
        """What one token takes over all layers."""
        return self.block_bytes // self.block_size

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """(layers, 2, kv_heads, tokens, head_dim): the shape of one block seen as an array."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def num_blocks_in(self, nbytes: int) -> int:
        """Whole blocks that fit."""
        return nbytes // self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def block_offset(self, block: int) -> int:
        return block * self.block_bytes

    def offset(self, block: int, layer: int, kv: int, head: int = 0, token: int = 0) -> int:
        """Byte offset from the pool. `kv` is K or V, `token` the position within the block."""
        return (
            block * self.block_bytes
            + layer * self.layer_stride
            + kv * self.kv_stride
            + head * self.head_stride
            + token * self.row_bytes
        )

    def fingerprint(self) -> dict[str, str | int]:
        """The layout's part of a peer's fingerprint; unequal means refusal, naming the key."""
        return {
            "layout_version": LAYOUT_VERSION,
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "kv_dtype": self.dtype,
        }

    def block_runs(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> NDArray[np.int64]:
        """Runs that copy src_blocks[i] to dst_blocks[i], as `copy_runs` takes them: int64 (n, 3).

        Neighbours that are consecutive on both sides become one run.
        """
        src = np.asarray(src_blocks, dtype=np.int64)
        dst = np.asarray(dst_blocks, dtype=np.int64)
        if src.shape != dst.shape or src.ndim != 1:
            raise ValueError(f"{src.size} source blocks for {dst.size} destination blocks")
        lengths = np.full(src.shape, self.block_bytes, dtype=np.int64)
        return merge_runs(
            np.stack([src * self.block_bytes, dst * self.block_bytes, lengths], axis=1)
        )


def merge_runs(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join each run to the one before it where it continues it on both sides. Order is kept."""
    if len(runs) < 2:
        return np.ascontiguousarray(runs)
    ends = runs[:-1, :2] + runs[:-1, 2:]
    starts = np.flatnonzero(np.r_[True, (runs[1:, :2] != ends).any(axis=1)])
    merged = runs[starts].copy()
    merged[:, 2] = np.add.reduceat(runs[:, 2], starts)
    return merged


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel group: which of the model's KV heads it holds.

    With size <= kv_heads each rank holds kv_heads/size neighbouring heads. With more ranks than
    heads each rank holds one, and size/kv_heads neighbouring ranks hold the same one.
    """

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.size}")

    def heads(self, kv_heads: int) -> range:
        """The model's KV heads that this rank holds, in its pool's order."""
        if self.size <= kv_heads:
            if kv_heads % self.size:
                raise ValueError(f"tp_size {self.size} does not divide {kv_heads} KV heads")
            share = kv_heads // self.size
            return range(self.rank * share, (self.rank + 1) * share)
        if self.size % kv_heads:
            raise ValueError(f"tp_size {self.size} is not a multiple of {kv_heads} KV heads")
        head = self.rank * kv_heads // self.size
        return range(head, head + 1)

    def layout(self, model: KvLayout) -> KvLayout:
        """This rank's pool geometry, from that of the whole model (all KV heads)."""
        heads = self.heads(model.num_kv_heads)
        return KvLayout(model.num_layers, len(heads), model.head_dim, model.block_size, model.dtype)


def slice_runs(
    model: KvLayout,
    src: Shard,
    dst: Shard,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
) -> NDArray[np.int64]:
    """Runs from rank `src`'s pool into rank `dst`'s pool, for src_blocks[i] -> dst_blocks[i].

    `model` has all KV heads of the model. Over all `src` ranks of a group the runs write every byte
    of the destination blocks exactly once: of ranks that hold the same head, one serves each `dst`.
    """
    heads = _served_heads(model.num_kv_heads, src, dst)
    src_layout, dst_layout = src.layout(model), dst.layout(model)
    if len(heads) == src_layout.num_kv_heads == dst_layout.num_kv_heads:
        return src_layout.block_runs(src_blocks, dst_blocks)
    if len(src_blocks) != len(dst_blocks):
        raise ValueError(
            f"{len(src_blocks)} source blocks for {len(dst_blocks)} destination blocks"
        )
    if not heads:
        return np.empty((0, 3), dtype=np.int64)
    first_src = heads.start - src.heads(model.num_kv_heads).start
    first_dst = heads.start - dst.heads(model.num_kv_heads).start
    src_parts = _part_offsets(src_layout, src_blocks, first_src)
    dst_parts = _part_offsets(dst_layout, dst_blocks, first_dst)
    lengths = np.full(src_parts.shape, len(heads) * model.head_stride, dtype=np.int64)
    return merge_runs(np.stack([src_parts, dst_parts, lengths], axis=1))


def source_ranks(kv_heads: int, src_size: int, dst: Shard) -> list[int]:
    """The source ranks that have something for `dst`, in order."""
    ranks = (Shard(rank, src_size) for rank in range(src_size))
    return [src.rank for src in ranks if _served_heads(kv_heads, src, dst)]


def _served_heads(kv_heads: int, src: Shard, dst: Shard) -> range:
    """The heads that `src` gives to `dst`; none when they share none or another replica serves."""
    have, want = src.heads(kv_heads), dst.heads(kv_heads)
    shared = range(max(have.start, want.start), min(have.stop, want.stop))
    replicas = max(1, src.size // kv_heads)
    # Destinations take turns among replicas, so that no source rank sends everything.
    if src.rank % replicas != dst.rank % replicas:
        return range(0)
    return shared


def _part_offsets(layout: KvLayout, blocks: Iterable[int], head: int) -> NDArray[np.int64]:
    """Offsets of (layer, k|v, head) for each block, block-major, flat."""
    block = np.fromiter(blocks, dtype=np.int64) * layout.block_bytes
    layer = np.arange(layout.num_layers, dtype=np.int64) * layout.layer_stride
    kv = np.arange(2, dtype=np.int64) * layout.kv_stride
    parts = block[:, None, None] + layer[None, :, None] + kv[None, None, :]
    return (parts + head * layout.head_stride).ravel()

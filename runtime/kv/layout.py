"""KV geometry: where every number of the cache lies, as pure offset arithmetic.

Owns the block-major layout `[block][layer][k,v][kv_head][token][head_dim]` and the runs (source
offset, destination offset, length) that move blocks, also to and from tensor-parallel ranks.
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

_PAGE: Final = 4096

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

    def block_runs(
        self, src_blocks: Sequence[int], dst_blocks: Sequence[int], layers: range | None = None
    ) -> NDArray[np.int64]:
        """Runs that copy src_blocks[i] to dst_blocks[i], as `copy_runs` takes them: int64 (n, 3);
        some neighbouring layers only, if they are given.

        Neighbours that are consecutive on both sides become one run.
        """
        layers = layers or range(self.num_layers)
        src = np.asarray(src_blocks, dtype=np.int64)
        dst = np.asarray(dst_blocks, dtype=np.int64)
        if src.shape != dst.shape or src.ndim != 1:
            raise ValueError(f"{src.size} source blocks for {dst.size} destination blocks")
        first = layers.start * self.layer_stride
        lengths = np.full(src.shape, len(layers) * self.layer_stride, dtype=np.int64)
        return merge_runs(
            np.stack(
                [src * self.block_bytes + first, dst * self.block_bytes + first, lengths], axis=1
            )
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


@dataclass(frozen=True, slots=True)
class PoolMap:
    """The device pools of an instance's tensor-parallel ranks, one after another in one region.

    A block has the same number on all ranks, and each rank's pool holds that rank's heads of it. In
    the CPU buffer and between instances a block is whole: every KV head of the model once, in
    order. So neither instance of a pair has to know the other's tp_size.
    """

    model: KvLayout
    """With all KV heads of the model."""
    num_blocks: int
    tp_size: int = 1

    def __post_init__(self) -> None:
        self.shard(0).heads(self.model.num_kv_heads)  # refuses sizes that do not divide

    def shard(self, rank: int) -> Shard:
        return Shard(rank, self.tp_size)

    @property
    def rank_layout(self) -> KvLayout:
        """Of any rank's pool: they are all alike."""
        return self.shard(0).layout(self.model)

    @property
    def rank_stride(self) -> int:
        """From one rank's pool to the next one's: whole pages, so that each can be mapped alone."""
        size = self.num_blocks * self.rank_layout.block_bytes
        return size if self.tp_size == 1 else -(-size // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        return self.tp_size * self.rank_stride

    def gather(
        self, pool_blocks: Sequence[int], whole: Sequence[int], layers: range | None = None
    ) -> NDArray[np.int64]:
        """Runs from the pools into whole blocks, for pool_blocks[i] -> whole[i]; of some
        neighbouring layers only, if they are given.

        They fill whole[0], then whole[1] and so on, each from its first to its last byte.
        """
        layers = layers or range(self.model.num_layers)
        if self.tp_size == 1:
            return self.model.block_runs(pool_blocks, whole, layers)
        ranks = [self._giver(head) for head in range(self.model.num_kv_heads)]
        givers = [rank for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1]]
        pool, blocks, lengths = self._parts(givers, pool_blocks, whole, layers)
        return merge_runs(np.stack([pool, blocks, lengths], axis=1))

    def scatter(self, whole: Sequence[int], pool_blocks: Sequence[int]) -> NDArray[np.int64]:
        """Runs from whole blocks into the pool of every rank, for whole[i] -> pool_blocks[i]."""
        if self.tp_size == 1:
            return self.model.block_runs(whole, pool_blocks)
        layers = range(self.model.num_layers)
        pool, blocks, lengths = self._parts(range(self.tp_size), pool_blocks, whole, layers)
        return merge_runs(np.stack([blocks, pool, lengths], axis=1))

    def _giver(self, head: int) -> int:
        """The rank whose copy of the head leaves the instance."""
        if self.tp_size <= self.model.num_kv_heads:
            return head * self.tp_size // self.model.num_kv_heads
        replicas = self.tp_size // self.model.num_kv_heads
        # Heads take turns among their replicas.
        return head * replicas + head % replicas

    def _parts(
        self,
        ranks: Iterable[int],
        pool_blocks: Sequence[int],
        whole: Sequence[int],
        layers: range,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets in the pools, offsets in whole blocks, lengths: block by block, layer by layer,
        K before V, rank by rank.
        """
        if len(pool_blocks) != len(whole):
            raise ValueError(f"{len(pool_blocks)} blocks of the pool for {len(whole)} whole ones")
        own, stride = self.rank_layout, self.model.head_stride
        heads = [(rank, self.shard(rank).heads(self.model.num_kv_heads).start) for rank in ranks]
        pools = np.array([rank * self.rank_stride for rank, _ in heads], dtype=np.int64)
        firsts = np.array([head * stride for _, head in heads], dtype=np.int64)
        inner = _layer_offsets(own, pool_blocks, layers)[..., None] + pools
        outer = _layer_offsets(self.model, whole, layers)[..., None] + firsts
        lengths = np.full(inner.size, own.kv_stride, dtype=np.int64)
        return inner.ravel(), outer.ravel(), lengths


def _layer_offsets(layout: KvLayout, blocks: Sequence[int], layers: range) -> NDArray[np.int64]:
    """Where K and V of each of the layers start in each block: int64 (blocks, layers, 2)."""
    block = np.asarray(blocks, dtype=np.int64) * layout.block_bytes
    layer = np.asarray(layers, dtype=np.int64) * layout.layer_stride
    kv = np.arange(2, dtype=np.int64) * layout.kv_stride
    offsets: NDArray[np.int64] = block[:, None, None] + layer[None, :, None] + kv[None, None, :]
    return offsets

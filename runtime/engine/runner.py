"""Turns work on sequences into one batch, runs the decoder over the paged pool, returns logits.

Owns batch building and attention. Knows no queue, no sampling, no events. The torch path is the
oracle of the native one and serves devices that have no native one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime import _native
from runtime.engine.rank_protocol import Chunk, Step
from runtime.engine.ranks import RankLinks
from runtime.engine.sequence import Work
from runtime.errors import RankError
from runtime.kv.pool import KvPool
from runtime.models.decoder import Decoder

OnLayers = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first, first + count) of a batch: tokens of one sequence from position `start` on."""

    first: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of N sequences."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    block_of: Tensor  # [T]: pool block that takes this token's K and V
    slot_of: Tensor  # [T]: position in that block
    tables: Tensor  # [N, most blocks] int32
    sequence_of: Tensor  # [T] int32: row of `tables`
    positions32: Tensor  # [T] int32
    spans: tuple[Span, ...]
    rows: Tensor  # last row of each sequence that samples


class Runner:
    """Used by the engine thread."""

    def __init__(self, decoder: Decoder, pool: KvPool, threads: int, native: bool) -> None:
        """`native`: attend in C++, on the CPU; else in torch."""
        self.pool = pool
        self._decoder = decoder
        self._threads = threads
        self._native = native
        self._scale = decoder.spec.head_dim**-0.5

    @property
    def block_size(self) -> int:
        return self.pool.layout.block_size

    def run(self, work: Items[Work], on_layers: OnLayers) -> Tensor:
        """Computes the work's KV; float32 logits, one row for each work that samples, in order.

        On a CPU calls `on_layers(n)` once the KV is final in the first n layers, for each n but the
        last. A GPU is still at work when this thread has given it all layers.
        """
        return self.compute(chunks_of(work, self.block_size), on_layers)

    @torch.inference_mode()
    def compute(self, chunks: Items[Chunk], on_layers: OnLayers | None = None) -> Tensor:
        """As `run`."""
        device = self._decoder.device
        batch = build_batch(chunks, self.block_size, device)
        told = on_layers if device.type == "cpu" else None

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            # The layer before ended in a sum over all ranks: they are done with its KV, too.
            if told and layer:
                told(layer)
            cache = self.pool.layers[layer]  # [blocks, 2, kv_heads, tokens, head_dim]
            cache[batch.block_of, :, :, batch.slot_of] = kv
            if self._native:
                return self._attend_native(batch, cache, q)
            return attend_torch(batch, cache, q, self._scale)

        logits = self._decoder.logits(batch.tokens, batch.positions, attend, batch.rows)
        if device.type == "cuda" and not len(logits):
            # A step that samples is over when its tokens are read. So shall this one be: what its
            # requests then free may be given to others to write (cuda_ipc, rdma).
            torch.cuda.current_stream(device).synchronize()
        return logits

    def _attend_native(self, batch: Batch, cache: Tensor, q: Tensor) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        _native.paged_attention(
            q,
            cache,
            batch.tables,
            batch.sequence_of,
            batch.positions32,
            out,
            self._scale,
            self._threads,
        )
        return out.view(len(q), -1)


class LeadingRunner:
    """Rank 0's ModelRunner: every rank computes the same step."""

    def __init__(self, runner: Runner, links: RankLinks) -> None:
        self._runner = runner
        self._links = links

    def run(self, work: Items[Work], on_layers: OnLayers) -> Tensor:
        """Raises RankError whatever goes wrong: the ranks are then no longer at the same step."""
        chunks = chunks_of(work, self._runner.block_size)
        try:
            self._links.compute(Step(chunks))
            return self._runner.compute(chunks, on_layers)
        except Exception as e:
            first_line = str(e).partition("\n")[0]
            raise RankError(f"a step of the ranks failed: {first_line}") from e


def chunks_of(work: Items[Work], block_size: int) -> tuple[Chunk, ...]:
    """The work, without the scheduler's state."""
    return tuple(_chunk(item, block_size) for item in work)


def _chunk(work: Work, block_size: int) -> Chunk:
    sequence, start = work.sequence, work.sequence.num_computed
    end = start + work.count
    return Chunk(
        start=start,
        tokens=tuple(sequence.tokens[start:end]),
        blocks=tuple(sequence.blocks[: -(-end // block_size)]),
        samples=work.samples,
    )


def build_batch(chunks: Items[Chunk], block_size: int, device: torch.device) -> Batch:
    counts = [len(chunk.tokens) for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    ids = [token for chunk in chunks for token in chunk.tokens]
    sequence_of = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
    within = np.arange(len(ids)) - np.repeat(firsts, counts)
    positions = within + np.repeat(starts, counts)
    tables = np.zeros((len(chunks), max(len(c.blocks) for c in chunks)), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    lasts = [
        int(first) + count - 1
        for first, count, chunk in zip(firsts, counts, chunks, strict=True)
        if chunk.samples
    ]

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device)

    return Batch(
        tokens=tensor(ids),
        positions=tensor(positions),
        block_of=tensor(tables[sequence_of, positions // block_size]),
        slot_of=tensor(positions % block_size),
        tables=tensor(tables, torch.int32),
        sequence_of=tensor(sequence_of, torch.int32),
        positions32=tensor(positions, torch.int32),
        spans=tuple(
            Span(int(first), start, count)
            for first, start, count in zip(firsts, starts, counts, strict=True)
        ),
        rows=tensor(lasts),
    )


def attend_torch(batch: Batch, cache: Tensor, q: Tensor, scale: float) -> Tensor:
    """Gathers each sequence's K and V and lets torch attend: [T, heads * head_dim]."""
    kv_heads, block_size, head_dim = cache.shape[2:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for row, span in enumerate(batch.spans):
        end = span.start + span.count
        blocks = batch.tables[row, : -(-end // block_size)].long()
        # [n, 2, kv_heads, tokens, head_dim] -> [2, kv_heads, context, head_dim]
        context = cache[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)
        keys, values = context[:, :, :end]
        rows = slice(span.first, span.first + span.count)
        reach = torch.arange(span.start, end, device=q.device)
        mask = torch.arange(end, device=q.device) <= reach[:, None]
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out.reshape(len(q), -1)

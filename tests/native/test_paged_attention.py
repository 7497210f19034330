"""Paged attention against torch, and its independence of batch and threads, to the bit."""

from __future__ import annotations

import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime._native import paged_attention
from runtime.kv.layout import KvLayout


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """A batch, with the K and V of each sequence also as plain tensors."""

    shape: Shape
    query: Tensor  # [T, heads, head_dim]
    kv: Tensor  # [blocks, 2, kv_heads, block_size, head_dim], strided
    tables: Tensor  # [sequences, most blocks]
    rows: Tensor  # [T]
    positions: Tensor  # [T]
    keys: list[Tensor]  # per sequence [length, kv_heads, head_dim]
    values: list[Tensor]

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.shape.head_dim)

    def run(self, num_threads: int = 1) -> Tensor:
        out = torch.full_like(self.query, 777.0)
        paged_attention(
            self.query,
            self.kv,
            self.tables,
            self.rows,
            self.positions,
            out,
            self.scale,
            num_threads,
        )
        return out

    def take(self, tokens: list[int]) -> Case:
        """The same sequences with only these tokens, in this order."""
        index = torch.tensor(tokens, dtype=torch.long)
        return replace(
            self,
            query=self.query[index],
            rows=self.rows[index],
            positions=self.positions[index],
        )


def make_case(shape: Shape, spans: list[tuple[int, int]], seed: int = 0) -> Case:
    """`spans`: per sequence its length and how many of its last positions are queried."""
    torch.manual_seed(seed)
    layers, layer = 3, 1
    counts = [-(-length // shape.block_size) for length, _ in spans]
    total = sum(counts) + 2
    # What is not written is NaN: reading it into any result shows.
    pool = torch.full(
        (total, layers, 2, shape.kv_heads, shape.block_size, shape.head_dim),
        float("nan"),
        dtype=shape.kv_dtype,
    )
    order = torch.randperm(total).to(torch.int32)
    tables = torch.full((len(spans), max(counts) + 1), -1, dtype=torch.int32)
    keys, values = [], []
    for i, (length, _) in enumerate(spans):
        tables[i, : counts[i]], order = order[: counts[i]], order[counts[i] :]
        k, v = torch.randn(2, length, shape.kv_heads, shape.head_dim).to(shape.kv_dtype)
        position = torch.arange(length)
        block = tables[i, position // shape.block_size].long()
        pool[block, layer, 0, :, position % shape.block_size] = k
        pool[block, layer, 1, :, position % shape.block_size] = v
        keys.append(k)
        values.append(v)
    rows = torch.cat([torch.full((n,), i) for i, (_, n) in enumerate(spans)]).to(torch.int32)
    positions = torch.cat([torch.arange(end - n, end) for end, n in spans]).to(torch.int32)
    query = torch.randn(len(rows), shape.heads, shape.head_dim).to(shape.query_dtype)
    return Case(shape, query, pool[:, layer], tables, rows, positions, keys, values)


def exact(case: Case) -> Tensor:
    """In float64, one token at a time."""
    group = case.shape.heads // case.shape.kv_heads
    results = []
    for t in range(len(case.query)):
        seen = int(case.positions[t]) + 1
        k = case.keys[int(case.rows[t])][:seen].double().repeat_interleave(group, 1)
        v = case.values[int(case.rows[t])][:seen].double().repeat_interleave(group, 1)
        weights = torch.einsum("hd,thd->ht", case.query[t].double(), k) * case.scale
        results.append(torch.einsum("ht,thd->hd", weights.softmax(-1), v))
    return torch.stack(results)


def same_bits(a: Tensor, b: Tensor) -> bool:
    assert a.dtype == b.dtype and a.shape == b.shape
    return bool((a.view(torch.uint8) == b.view(torch.uint8)).all())


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16])
    return Shape(
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 20, 32, 64, 80, 128])),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 32, 48])),
        kv_dtype=draw(dtypes),
        query_dtype=draw(dtypes),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 200))
        spans.append((length, draw(st.integers(1, min(length, 30)))))
    return make_case(draw(shapes()), spans, draw(st.integers(0, 1000)))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_equals_float64(case: Case) -> None:
    tolerance = 3e-6 if case.shape.query_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.run(2).double(), exact(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 300])
def test_equals_sdpa(length: int) -> None:
    case = make_case(Shape(9, 3, 64, 16), [(length, length)])
    q, k, v = (x.transpose(0, 1)[None] for x in (case.query, case.keys[0], case.values[0]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(case.run(), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_token_does_not_depend_on_its_batch(case: Case) -> None:
    together = case.run(1)
    count = len(case.query)
    order = torch.randperm(count).tolist()
    assert same_bits(case.take(order).run(1), together[order])
    for t in {0, count // 2, count - 1}:
        assert same_bits(case.take([t]).run(1), together[[t]])


def test_as_many_heads_on_one_kv_head_as_it_takes() -> None:
    case = make_case(Shape(64, 1, 16, 16), [(70, 3)])
    torch.testing.assert_close(case.run().double(), exact(case), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_the_threads(kv_dtype: torch.dtype) -> None:
    # Enough work that all threads are really used.
    case = make_case(Shape(9, 3, 64, 16, kv_dtype), [(700, 300), (900, 40), (33, 1), (512, 256)])
    alone = case.run(1)
    for threads in (2, 3, 8):
        assert same_bits(case.run(threads), alone)


def test_a_token_does_not_depend_on_the_blocks_it_lies_in() -> None:
    one = make_case(Shape(4, 2, 64, 16), [(150, 20)], seed=5)
    move = torch.randperm(len(one.kv))
    other = replace(
        one,
        kv=torch.empty_like(one.kv).index_copy_(0, move, one.kv),
        tables=torch.where(one.tables < 0, one.tables, move[one.tables.long()].to(torch.int32)),
    )
    assert not torch.equal(one.tables, other.tables)
    assert same_bits(one.run(), other.run())


def test_large_scores_do_not_overflow() -> None:
    case = make_case(Shape(4, 2, 64, 16), [(100, 10)])
    case.kv.mul_(200)
    torch.nan_to_num_(case.kv)
    for k, v in zip(case.keys, case.values, strict=True):
        k.mul_(200)
        v.mul_(200)
    torch.testing.assert_close(case.run().double(), exact(case), rtol=1e-4, atol=1e-3)


def test_a_broken_key_is_not_hidden() -> None:
    case = make_case(Shape(2, 2, 64, 16), [(40, 40)])
    case.kv[case.tables[0, 1].long(), 0, 0, 3] = float("nan")  # position 19, head 0
    out = case.run()
    assert out[19:, 0].isnan().all()
    assert not out[:19].isnan().any()
    assert not out[:, 1].isnan().any()


def test_calls_from_several_threads_at_once() -> None:
    case = make_case(Shape(9, 3, 64, 16), [(600, 300)])
    alone = case.run(1)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: case.run(4), range(12)))
    assert all(same_bits(result, alone) for result in results)


def test_a_forked_child_attends_too() -> None:
    """The pool's threads do not survive a fork; the child must not wait for them."""
    case = make_case(Shape(9, 3, 64, 16), [(700, 300)])
    alone = case.run(4)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not as pytest-timeout has it
        signal.alarm(20)
        torch.set_num_threads(1)  # torch's do not survive it either, and it waits for them
        os._exit(0 if same_bits(case.run(4), alone) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_numpy_arrays_and_an_empty_batch() -> None:
    case = make_case(Shape(4, 2, 32, 16), [(20, 4)])
    query, kv, tables, rows, positions = (
        x.numpy() for x in (case.query, case.kv, case.tables, case.rows, case.positions)
    )
    out = np.zeros_like(query)
    paged_attention(query, kv, tables, rows, positions, out, case.scale, 1)
    assert np.array_equal(out, case.run().numpy())
    paged_attention(query[:0], kv, tables, rows[:0], positions[:0], out[:0], case.scale, 1)


def test_reads_the_layout_of_kv_layout() -> None:
    """Offsets of runtime.kv.layout and what the kernel reads are the same thing."""
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype="float32")
    pool = np.zeros(layout.block_bytes * 5, dtype=np.uint8)
    kv = pool.view(np.float32).reshape(5, *layout.block_shape)[:, 2]
    block, head, token = 3, 1, 2
    for kind in (0, 1):
        at = layout.offset(block, 2, kind, head, token)
        pool[at : at + layout.row_bytes].view(np.float32)[:] = np.arange(16) + kind
    tables = np.array([[block]], dtype=np.int32)
    query, out = np.ones((1, 2, 16), np.float32), np.zeros((1, 2, 16), np.float32)
    zero, last = np.array([0], np.int32), np.array([token], np.int32)
    paged_attention(query, kv, tables, zero, last, out, 1.0, 1)
    assert np.array_equal(out[0, 1], np.arange(16) + 1)  # its score dwarfs the zeros'
    assert not out[0, 0].any()


def refused(
    case: Case,
    message: str,
    error: type[Exception] = ValueError,
    num_threads: int = 1,
    **new: Tensor,
) -> None:
    """The call with `new` arrays in place of the case's raises, and nothing is written."""
    names = ("query", "kv", "tables", "rows", "positions")
    query, kv, tables, rows, positions = (new.get(name, getattr(case, name)) for name in names)
    out = new.get("out", torch.full_like(case.query, 777.0))
    with pytest.raises(error, match=message):
        paged_attention(query, kv, tables, rows, positions, out, 1.0, num_threads)
    assert (out == 777.0).all()


def test_bad_indices_are_refused_before_anything_is_written() -> None:
    case = make_case(Shape(4, 2, 32, 16), [(40, 3), (20, 2)])
    last = torch.tensor([37, 38, 39, 18, 19], dtype=torch.int32)
    for row in (-1, 2):
        rows = case.rows.clone()
        rows[4] = row
        refused(case, f"token 4: seq_index {row}", rows=rows)
    for position in (-1, 64, 2**31 - 1):
        positions = last.clone()
        positions[4] = position
        refused(case, f"token 4: position {position}", positions=positions)
    for block in (-1, len(case.kv), 2**31 - 1):
        tables = case.tables.clone()
        tables[1, 1] = block
        refused(case, rf"block_tables\[1, 1\] is {block}, the pool has", tables=tables)


def test_bad_shapes_are_refused() -> None:
    case = make_case(Shape(4, 2, 32, 16), [(40, 3)])
    refused(case, "num_threads", num_threads=0)
    refused(case, "out must have", out=torch.full((3, 4, 16), 777.0))
    refused(case, "out must have", out=torch.full((3, 4, 32), 777.0, dtype=torch.bfloat16))
    refused(case, "one entry per token", rows=case.rows[:2])
    refused(case, "one entry per token", positions=case.positions[:2])
    refused(
        case,
        "multiple of num_kv_heads",
        query=case.query[:, :3].contiguous(),
        out=torch.full((3, 3, 32), 777.0),
    )
    refused(
        case,
        "at most 64 heads",
        query=torch.zeros(3, 130, 32),
        out=torch.full((3, 130, 32), 777.0),
    )
    refused(case, "differ in head_dim", kv=case.kv[..., :16])
    refused(case, "K and V", kv=case.kv[:, :1])
    refused(case, "contiguous", kv=case.kv.transpose(3, 4).contiguous().transpose(3, 4))
    refused(
        case, "float32 or bfloat16", query=case.query.double(), out=case.query.double() * 0 + 777
    )
    refused(case, "incompatible", TypeError, tables=case.tables.long())
    refused(case, "incompatible", TypeError, query=case.query[0])

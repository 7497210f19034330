"""Copies of a GPU pool, with a stand-in for CUDA (gpu_stand_in.py)."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
from fake_engine import expected
from gpu_stand_in import StandIn
from handoff_lab import pair
from numpy.typing import NDArray
from transport_rig import Rig, block_runs, eventually

from runtime.errors import ConfigError, TransferError
from runtime.kv.copies import Runs
from runtime.kv.cupy_engine import CupyEngine
from runtime.kv.gpu_swap import MANY, SHORT, GpuCopies
from runtime.kv.region import Region
from runtime.kv.swap import PIECE_BYTES
from runtime.transfer.pool_put import pool_put

SIZE = 64


def memory(blocks: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, blocks * SIZE, dtype=np.uint8)


def region(array: NDArray[np.uint8]) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def test_both_directions() -> None:
    pool, host = memory(8, 1), memory(8, 2)
    before = pool.copy()
    copies = GpuCopies(region(pool), StandIn())
    runs = block_runs([3, 1, 7], [0, 5, 2], SIZE)
    assert copies.out(region(host), runs) == 3 * SIZE
    for at, to, size in runs.tolist():
        assert (host[to : to + size] == before[at : at + size]).all()
    pool[:] = 0
    back = runs[:, [1, 0, 2]]
    assert copies.into(region(host), np.ascontiguousarray(back)) == 3 * SIZE
    for at, _, size in runs.tolist():
        assert (pool[at : at + size] == before[at : at + size]).all()
    assert copies.engine is not None


@pytest.mark.parametrize("run", [(-1, 0, 8), (0, -1, 8), (0, 0, -8), (0, 500, 13), (508, 0, 5)])
def test_a_run_outside_moves_nothing(run: tuple[int, int, int]) -> None:
    engine = StandIn()
    copies = GpuCopies(region(memory(8, 1)), engine)
    runs: Runs = np.array([(0, 0, 8), run], dtype=np.int64)
    with pytest.raises(TransferError, match="outside"):
        copies.out(region(memory(8, 2)), runs)
    assert engine.moved == 0


def test_what_was_enqueued_before_an_error_is_waited_for() -> None:
    engine = StandIn(fail_at=1)
    copies = GpuCopies(region(memory(8, 1)), engine)
    with pytest.raises(TransferError, match="stand-in failure"):
        copies.into(region(memory(8, 2)), block_runs([0, 1, 2], [0, 1, 2], SIZE))
    assert engine.moved == SIZE and not engine._mine.enqueued


def test_staging_is_lent_to_one_at_a_time_and_again() -> None:
    engine = StandIn()
    copies = GpuCopies(region(memory(8, 1)), engine)
    with copies.staging(100) as one, copies.staging(50) as other:
        assert (one.nbytes, other.nbytes) == (100, 50)
        assert one.address != other.address
        assert copies.staging_of(one) == Region(one.address, PIECE_BYTES)
    for _ in range(10):
        with copies.staging(PIECE_BYTES) as again, pytest.raises(RuntimeError):
            assert again.address in (one.address, other.address)
            with copies.staging(1):
                raise RuntimeError
    with copies.staging(PIECE_BYTES + 1) as larger:
        assert copies.staging_of(larger) == larger
    assert len(engine._kept) == 3
    assert copies.staging_of(copies.pool) is None


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_puts_out_of_a_gpu(kind: str) -> None:
    rig = Rig.make(kind, blocks=8, size=4096)
    rig.connect()
    try:
        copies = GpuCopies(rig.source, StandIn())
        rig.receiver.expect(1, (6, 1, 4))
        runs = block_runs([5, 0, 7], [6, 1, 4], rig.size)
        assert pool_put(rig.sender, copies, 1, runs, 3) == 3 * rig.size
        eventually(lambda: rig.receiver.landed(1, 3) == 3, 20)
        assert rig.bytes_of([6, 1, 4]) == rig.pool_bytes([5, 0, 7])
        rig.sender.abort()
        with pytest.raises(TransferError):
            pool_put(rig.sender, copies, 1, runs, 3)
    finally:
        rig.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_requests_between_two_instances(kind: str) -> None:
    async def main() -> None:
        async with pair(kind, gpu=True) as both:
            prompts = [tuple(range(1, n)) for n in (3, 9, 17, 30)]
            ids = [both.decode.ask(prompt, max_tokens=4) for prompt in prompts]
            for id_, prompt in zip(ids, prompts, strict=True):
                await both.decode.answer(id_)
                assert both.decode.tokens_of(id_) == expected(prompt, 4)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "size", "kernels", "one_kernel"),
    [
        (MANY, 16, True, True),
        (MANY, 16, False, False),  # memory that kernels do not reach, or no kernel
        (MANY - 1, 16, True, False),
        (MANY, SHORT, True, False),
    ],
)
def test_many_short_runs_are_one_kernel(
    count: int, size: int, kernels: bool, one_kernel: bool
) -> None:
    engine = StandIn(kernels=kernels)
    pool = np.random.default_rng(0).integers(0, 256, count * size, dtype=np.uint8)
    host = np.zeros_like(pool)
    runs = block_runs(list(range(count)), list(reversed(range(count))), size)
    assert GpuCopies(region(pool), engine).out(region(host), runs) == count * size
    assert engine.launched == one_kernel
    assert (host.reshape(count, size) == pool.reshape(count, size)[::-1]).all()


def test_without_cupy_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="cupy, which is missing") as caught:
        CupyEngine(0)
    assert "pdctl[cuda12]" in caught.value.hint

"""copy_runs against numpy slices, and its refusal of anything out of bounds."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime._native import copy_runs

Bytes = NDArray[np.uint8]
Run = tuple[int, int, int]
MAX = 2**63 - 1


def random_bytes(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def as_array(runs: list[Run]) -> NDArray[np.int64]:
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def call(dst: Bytes, src: Bytes, runs: list[Run]) -> int:
    return copy_runs(dst.ctypes.data, dst.size, src.ctypes.data, src.size, as_array(runs))


def by_numpy(dst: Bytes, src: Bytes, runs: list[Run]) -> Bytes:
    expected = dst.copy()
    for source, target, length in runs:
        expected[target : target + length] = src[source : source + length]
    return expected


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, list[Run]]:
    src_size, dst_size = draw(st.integers(0, 3000)), draw(st.integers(0, 3000))
    runs = []
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(0, min(src_size, dst_size)))
        source = draw(st.integers(0, src_size - length))
        runs.append((source, draw(st.integers(0, dst_size - length)), length))
    return src_size, dst_size, runs


@given(cases())
def test_equals_numpy(case: tuple[int, int, list[Run]]) -> None:
    src_size, dst_size, runs = case
    src, dst = random_bytes(src_size, 1), random_bytes(dst_size, 2)
    expected = by_numpy(dst, src, runs)
    assert call(dst, src, runs) == sum(run[2] for run in runs)
    assert np.array_equal(dst, expected)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers((32 << 10) - 70, (32 << 10) + 600) | st.integers(60_000, 300_000),
    source=st.integers(0, 130),
    target=st.integers(0, 130),
)
def test_long_runs_of_any_alignment_and_nothing_beside_them(
    length: int, source: int, target: int
) -> None:
    src, dst = random_bytes(length + 200, 3), random_bytes(length + 200, 4)
    expected = by_numpy(dst, src, [(source, target, length)])
    assert call(dst, src, [(source, target, length)]) == length
    assert np.array_equal(dst, expected)


@pytest.mark.parametrize("shift", [-70_000, -4096, -1, 0, 1, 4096, 70_000])
def test_a_run_may_overlap_itself(shift: int) -> None:
    pool = random_bytes(400_000)
    expected = pool.copy()
    expected[100_000 + shift : 300_000 + shift] = pool[100_000:300_000]
    call(pool, pool, [(100_000, 100_000 + shift, 200_000)])
    assert np.array_equal(pool, expected)


@pytest.mark.parametrize(
    "bad",
    [
        (0, 0, 101),  # longer than the source
        (1, 0, 100),
        (0, 101, 100),  # past the destination
        (-1, 0, 1),
        (0, -1, 1),
        (0, 0, -1),
        (101, 0, 0),
        (0, 201, 0),
        (MAX, 0, 1),  # offset + length overflows
        (1, 1, MAX),
        (0, MAX, MAX),
        (-MAX - 1, 0, MAX),
    ],
)
def test_out_of_bounds_is_refused_before_the_first_byte_moves(bad: Run) -> None:
    src, dst = random_bytes(100, 1), random_bytes(200, 2)
    before = dst.copy()
    with pytest.raises(ValueError, match=r"^run 1 "):
        call(dst, src, [(0, 0, 50), bad, (50, 50, 50)])
    assert np.array_equal(dst, before)


def test_the_ends_are_inside() -> None:
    src, dst = random_bytes(100, 1), random_bytes(200, 2)
    assert call(dst, src, [(0, 100, 100), (100, 200, 0)]) == 100
    assert np.array_equal(dst[100:], src)


def test_only_int64_runs_in_c_order() -> None:
    src, dst = random_bytes(10), random_bytes(10)
    good = as_array([(0, 0, 1), (1, 1, 1), (2, 2, 1)])
    for bad in (good.astype(np.int32), np.asfortranarray(good), good[:, :2], good.ravel(), None):
        with pytest.raises(TypeError):
            copy_runs(dst.ctypes.data, 10, src.ctypes.data, 10, bad)  # type: ignore[arg-type]


def test_other_threads_run_meanwhile() -> None:
    size = 256 << 20
    src, dst = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    runs = as_array([(0, 0, size)])
    copying = threading.Event()
    spans: list[tuple[float, float]] = []

    def copy() -> None:
        copying.set()
        for _ in range(4):
            start = time.perf_counter()
            copy_runs(dst.ctypes.data, size, src.ctypes.data, size, runs)
            spans.append((start, time.perf_counter()))

    thread = threading.Thread(target=copy)
    thread.start()
    copying.wait(10)
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.0005)
    thread.join()
    # With the lock held, no tick could fall inside the second half of a copy.
    inside = [t for t in ticks for a, b in spans if a + (b - a) / 2 < t < b]
    assert inside

"""The copy kernel's own text (runtime/kv/copy_runs.cu) on a CPU: compiled as C++ behind a shim that
stands in for CUDA's grid, one thread after the other. A GPU's memory and speed are
tests/gpu/check.py's.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

SHIM = """
#define __global__
struct dim3 { unsigned x, y; };
struct alignas(16) int4 { int x, y, z, w; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
"""
LAUNCH = """
extern "C" void launch(unsigned x, unsigned y, unsigned threads, char* to, const char* from,
                       const long long* runs, long long count) {
  gridDim = {x, y};
  blockDim = {threads, 1};
  for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) copy_runs(to, from, runs, count);
}
"""
ROOM = 4096


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = Path(tmp_path_factory.mktemp("kernel"))
    kernel = files("runtime.kv").joinpath("copy_runs.cu").read_text()
    (folder / "kernel.cpp").write_text(SHIM + kernel + LAUNCH)
    built = folder / "kernel.so"
    # UBSan's alignment check stands in for the GPU's misaligned-address fault.
    flags = ("-O1", "-shared", "-fPIC", "-fsanitize=alignment", "-fno-sanitize-recover=all")
    subprocess.run([compiler, *flags, folder / "kernel.cpp", "-o", built], check=True)
    return ctypes.CDLL(str(built))


def aligned(nbytes: int, shift: int) -> NDArray[np.uint8]:
    """Memory that begins `shift` bytes after a multiple of 16."""
    raw = np.zeros(nbytes + 32, dtype=np.uint8)
    start = -raw.ctypes.data % 16 + shift
    return raw[start : start + nbytes]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    gaps=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    grid=st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 4, 32])),
    seed=st.integers(0, 99),
)
def test_any_runs_with_any_grid(
    launch: ctypes.CDLL,
    lengths: list[int],
    gaps: list[int],
    shifts: tuple[int, int],
    grid: tuple[int, int, int],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    source, to = aligned(ROOM, shifts[0]), aligned(ROOM, shifts[1])
    source[:] = rng.integers(0, 256, ROOM)
    wanted = to.copy()
    rows, at = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        at += gap
        start = int(rng.integers(0, ROOM - length + 1))
        rows.append((start, at, length))
        wanted[at : at + length] = source[start : start + length]
        at += length
    runs = np.array(rows, dtype=np.int64).reshape(-1, 3)
    address = [ctypes.c_void_p(a.ctypes.data) for a in (to, source, runs)]
    launch.launch(*grid, *address, ctypes.c_longlong(len(runs)))
    assert (to == wanted).all()


def test_aligned_blocks_go_sixteen_bytes_at_a_time(launch: ctypes.CDLL) -> None:
    """And the same bytes arrive, with what is left at each end of a run."""
    source, to = aligned(ROOM, 0), aligned(ROOM, 0)
    source[:] = np.random.default_rng(1).integers(0, 256, ROOM)
    runs = np.array([(0, 2048, 1024), (1024, 16, 1023), (3000, 3200, 7)], dtype=np.int64)
    wanted = to.copy()
    for start, at, length in runs.tolist():
        wanted[at : at + length] = source[start : start + length]
    address = [ctypes.c_void_p(a.ctypes.data) for a in (to, source, runs)]
    launch.launch(3, 2, 64, *address, ctypes.c_longlong(len(runs)))
    assert (to == wanted).all()

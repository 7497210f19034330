"""Registration with the GPU driver, against a driver that only keeps books (fake_cuda.c)."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the fake driver")

PRELUDE = """
import ctypes, os, sys
from runtime._native import *
name = sys.argv[1]
def books():
    out = ctypes.create_string_buffer(100)
    ctypes.CDLL("libcuda.so.1").fake_cuda_books(out, 100)
    return out.value.decode()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 in it."""
    assert COMPILER is not None
    folder = tmp_path_factory.mktemp("cuda")
    library, source = folder / "libcuda.so.1", Path(__file__).with_name("fake_cuda.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return folder


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"pdctl-test.{os.getpid()}.{secrets.token_hex(4)}"
    yield unique
    (Path("/dev/shm") / unique).unlink(missing_ok=True)


def run(driver: Path, name: str, code: str, **env: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, name],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_registered_while_mapped(driver: Path, name: str) -> None:
    lines = run(
        driver,
        name,
        """
shm = create_pinned_shm(name, 8192)
other = open_pinned_shm(name, 8192)
print(shm.pinned, shm.lock, other.lock, books())
free_pinned_shm(shm, unlink=False)
free_pinned_shm(shm, unlink=True)
print(shm.pinned, shm.lock, books())
del other
print(books())
""",
    )
    assert lines == [
        "True cuda cuda retained=1 depth=0 registered=2",
        "False none retained=1 depth=0 registered=1",
        "retained=1 depth=0 registered=0",
    ]


def test_a_failed_registration_is_an_error_and_leaves_nothing(driver: Path, name: str) -> None:
    lines = run(
        driver,
        name,
        """
try:
    create_pinned_shm(name, 8192)
except OSError as e:
    print(e.errno, e.strerror)
print(books(), name in open("/proc/self/maps").read())
""",
        FAKE_CUDA_FAIL="1",
    )
    assert lines == [
        f"12 shared memory segment {name}: cannot register 8192 bytes with the GPU driver:"
        " CUDA_ERROR_OUT_OF_MEMORY",
        "retained=1 depth=0 registered=0 False",
    ]
    assert not (Path("/dev/shm") / name).exists()


def test_a_driver_without_devices_is_no_gpu(driver: Path, name: str) -> None:
    lines = run(
        driver,
        name,
        "shm = create_pinned_shm(name, 8192)\nprint(shm.lock in ('mlock', 'none'), books())",
        FAKE_CUDA_DEVICES="0",
    )
    assert lines == ["True retained=0 depth=0 registered=0"]

"""Pinned shared memory: exclusive, private, really reserved, and nothing left on any error path."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime._native import PinnedShm, create_pinned_shm, free_pinned_shm, open_pinned_shm

SHM = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def name() -> Iterator[str]:
    unique = f"pdctl-test.{os.getpid()}.{secrets.token_hex(4)}"
    yield unique
    (SHM / unique).unlink(missing_ok=True)


def put(shm: PinnedShm, offset: int, data: bytes) -> None:
    ctypes.memmove(shm.address + offset, data, len(data))


def get(shm: PinnedShm, offset: int, count: int) -> bytes:
    return ctypes.string_at(shm.address + offset, count)


def in_child(code: str, *args: str) -> str:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os, sys, ctypes\nfrom runtime._native import *\n{code}",
            *args,
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode in (0, -9), run.stderr
    return run.stdout.strip()


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def test_create_describes_itself(name: str) -> None:
    shm = create_pinned_shm(name, MIB + 5)
    assert (shm.name, shm.nbytes) == (name, MIB + 5)
    assert shm.address % os.sysconf("SC_PAGE_SIZE") == 0
    assert shm.lock in ("cuda", "mlock", "none")
    assert shm.pinned == (shm.lock != "none")
    assert get(shm, 0, 8) == bytes(8)
    for attribute in ("name", "address", "nbytes", "pinned", "lock"):
        with pytest.raises(AttributeError):
            setattr(shm, attribute, 0)
    free_pinned_shm(shm, unlink=True)


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_mode_is_0600_whatever_the_umask(name: str, umask: int) -> None:
    before = os.umask(umask)
    try:
        shm = create_pinned_shm(name, 4096)
    finally:
        os.umask(before)
    assert (SHM / name).stat().st_mode & 0o7777 == 0o600
    free_pinned_shm(shm, unlink=True)


def test_space_and_pages_are_there_from_the_start(name: str) -> None:
    shm = create_pinned_shm(name, 3 * MIB)
    status = (SHM / name).stat()
    assert status.st_size == 3 * MIB
    assert status.st_blocks * 512 >= 3 * MIB
    smaps = Path("/proc/self/smaps").read_text().split(name, 1)[1]
    resident = next(line for line in smaps.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 >= 3 * MIB
    free_pinned_shm(shm, unlink=True)


def test_create_is_exclusive(name: str) -> None:
    first = create_pinned_shm(name, 4096)
    put(first, 0, b"mine")
    with pytest.raises(FileExistsError, match=name) as caught:
        create_pinned_shm(name, 8192)
    assert caught.value.errno == errno.EEXIST
    assert get(first, 0, 4) == b"mine"
    assert (SHM / name).stat().st_size == 4096
    free_pinned_shm(first, unlink=True)


def test_concurrent_create_has_one_winner(name: str) -> None:
    barrier = threading.Barrier(8)

    def attempt(_: int) -> PinnedShm | None:
        barrier.wait(10)
        try:
            return create_pinned_shm(name, MIB)
        except FileExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [shm for shm in pool.map(attempt, range(8)) if shm is not None]
    assert len(winners) == 1
    assert (SHM / name).stat().st_size == MIB
    free_pinned_shm(winners[0], unlink=True)


def test_too_large_is_a_clear_error_and_leaves_nothing(name: str) -> None:
    status = os.statvfs(SHM)
    free = status.f_bavail * status.f_frsize
    asked = free + (1 << 40)
    with pytest.raises(OSError, match=rf"{name}: cannot reserve {asked} bytes.* free") as caught:
        create_pinned_shm(name, asked)
    assert caught.value.errno == errno.ENOSPC
    assert not (SHM / name).exists()
    assert not mapped(name)


def test_space_that_runs_out_on_the_way_leaves_nothing(name: str) -> None:
    # RLIMIT_FSIZE is the one limit that stops a reservation half-way without filling the host.
    output = in_child(
        """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (80 << 20, 80 << 20))
try:
    create_pinned_shm(sys.argv[1], 100 << 20)
except OSError as e:
    print(e.errno, sys.argv[1] in open("/proc/self/maps").read(), len(os.listdir("/proc/self/fd")))
""",
        name,
    )
    number, still_mapped, _ = output.split()
    assert int(number) == errno.EFBIG
    assert still_mapped == "False"
    assert not (SHM / name).exists()


def test_a_mapping_that_fails_leaves_nothing(name: str) -> None:
    output = in_child(
        """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    create_pinned_shm(sys.argv[1], 2 << 30)
except OSError as e:
    print(e.errno, sys.argv[1] in str(e))
""",
        name,
    )
    assert output in (f"{errno.ENOMEM} True", f"{errno.ENOSPC} True")  # ENOSPC: a small /dev/shm
    assert not (SHM / name).exists()


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "/a", "a\0b", "x" * 255])
def test_bad_name(bad: str) -> None:
    for call in (create_pinned_shm, open_pinned_shm):
        with pytest.raises(ValueError, match="name"):
            call(bad, 4096)


def test_zero_bytes(name: str) -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        create_pinned_shm(name, 0)
    assert not (SHM / name).exists()


def test_open_checks_the_size(name: str) -> None:
    shm = create_pinned_shm(name, 8192)
    for wrong in (4096, 8191, 12288):
        with pytest.raises(OSError, match=rf"{name}: has 8192 bytes, not {wrong}") as caught:
            open_pinned_shm(name, wrong)
        assert caught.value.errno == errno.EINVAL
    free_pinned_shm(shm, unlink=True)


def test_open_of_nothing(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        open_pinned_shm(name, 4096)
    assert not (SHM / name).exists()


def test_two_mappings_see_each_other(name: str) -> None:
    one = create_pinned_shm(name, 8192)
    two = open_pinned_shm(name, 8192)
    assert one.address != two.address
    put(two, 5000, b"from two")
    assert get(one, 5000, 8) == b"from two"
    free_pinned_shm(two, unlink=False)
    assert get(one, 5000, 8) == b"from two"
    free_pinned_shm(one, unlink=True)


def test_two_processes_see_each_other(name: str) -> None:
    shm = create_pinned_shm(name, MIB)
    put(shm, 100, b"question")
    seen = in_child(
        """
shm = open_pinned_shm(sys.argv[1], 1 << 20)
print(ctypes.string_at(shm.address + 100, 8).decode())
ctypes.memmove(shm.address + 200, b"answer", 6)
""",
        name,
    )
    assert seen == "question"
    assert get(shm, 200, 6) == b"answer"
    assert (SHM / name).exists()  # the other process's end unlinked nothing
    free_pinned_shm(shm, unlink=True)


def test_survives_its_creators_kill(name: str) -> None:
    in_child(
        """
shm = create_pinned_shm(sys.argv[1], 4096)
ctypes.memmove(shm.address, b"legacy", 6)
os.kill(os.getpid(), 9)
""",
        name,
    )
    shm = open_pinned_shm(name, 4096)
    assert get(shm, 0, 6) == b"legacy"
    free_pinned_shm(shm, unlink=True)
    assert not (SHM / name).exists()


def test_free_is_idempotent(name: str) -> None:
    shm = create_pinned_shm(name, 4096)
    free_pinned_shm(shm, unlink=False)
    assert not mapped(name)
    assert (SHM / name).exists()
    free_pinned_shm(shm, unlink=True)
    assert not (SHM / name).exists()
    free_pinned_shm(shm, unlink=True)
    assert not shm.pinned
    with pytest.raises(ValueError, match="was freed"):
        _ = shm.address


def test_free_from_many_threads_unmaps_once(name: str) -> None:
    for _ in range(20):
        shm = create_pinned_shm(name, 4096)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: free_pinned_shm(shm, unlink=True), range(4)))  # noqa: B023
        assert not mapped(name)


def test_free_tolerates_a_name_already_gone(name: str) -> None:
    shm = create_pinned_shm(name, 4096)
    (SHM / name).unlink()
    free_pinned_shm(shm, unlink=True)


def test_the_destructor_unmaps_and_keeps_the_name(name: str) -> None:
    shm = create_pinned_shm(name, 4096)
    assert mapped(name)
    del shm
    assert not mapped(name)
    assert (SHM / name).stat().st_size == 4096


def _open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_kept(name: str) -> None:
    before = _open_fds()
    shm = create_pinned_shm(name, 4096)
    other = open_pinned_shm(name, 4096)
    failures: list[Callable[[], object]] = [
        lambda: create_pinned_shm(name, 4096),
        lambda: open_pinned_shm(name, 1),
        lambda: create_pinned_shm(name + ".big", 1 << 50),
    ]
    for call in failures:
        with pytest.raises(OSError):
            call()
    assert _open_fds() == before
    free_pinned_shm(other, unlink=False)
    free_pinned_shm(shm, unlink=True)

"""Locks: what pip resolves for other machines, remembered; and hashes of files that are sent."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import wheelhouse

from pdctl import lockfile, sending, wheels
from pdctl.errors import PdctlError


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_lock_is_for_its_target_and_stays_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = tmp_path / "house"
    house.mkdir()
    wheelhouse.write(house, "some", "1.0")
    plain = house / "some-1.0-py3-none-any.whl"
    here = replace(wheels.here(), version=(3, 12), machine="aarch64", libc=(2, 31))
    older = replace(here, libc=(2, 17))
    for tag in ("cp312-cp312-manylinux_2_28_aarch64", "cp311-cp311-manylinux_2_28_aarch64"):
        shutil.copy(plain, house / f"some-1.0-{tag}.whl")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")  # a user's setting is not for a wheelhouse

    lock = lockfile.resolve(["some>=1"], here, house, upgrade=False)
    (package,) = lock.packages
    assert package.file == "some-1.0-cp312-cp312-manylinux_2_28_aarch64.whl"
    assert Path(package.path) == house / package.file
    assert lock.text == f"some==1.0 --hash=sha256:{sending.file_hash(house / package.file)}\n"
    assert lockfile.resolve(["some>=1"], older, house, upgrade=False).packages[0].file == plain.name

    with monkeypatch.context() as m:
        m.setattr(lockfile, "_ask_pip", lambda *_: pytest.fail("it was remembered"))
        assert lockfile.resolve(["some>=1"], here, house, upgrade=False) == lock
    wheelhouse.write(house, "some", "2.0")
    newer = lockfile.resolve(["some>=1"], here, house, upgrade=False)
    assert newer.packages[0].version == "2.0"


def test_what_a_wheelhouse_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(PdctlError, match=r"does not have all packages.*absent") as caught:
        lockfile.resolve(["absent>=1"], wheels.here(), tmp_path, upgrade=False)
    assert f"pip download --dest {tmp_path}" in caught.value.hint
    assert lockfile.resolve([], wheels.here(), tmp_path, upgrade=False).text == ""


def test_hashes_of_large_files_are_remembered_until_these_are_touched(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(2 << 20))
    first = sending.file_hash(weights)
    found = weights.stat()
    weights.write_bytes(b"x" + bytes((2 << 20) - 1))
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert sending.file_hash(weights) == first, "size and time are what is looked at"
    os.utime(weights)
    assert sending.file_hash(weights) != first

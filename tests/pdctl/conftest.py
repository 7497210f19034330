"""A private pdctl home and a stand-in for the runtime, so that supervision is tested alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from changing import DECODE, PORTS, PREFILL, Demo
from supervision import STUB, Home, Lab, Site

from pdctl.hosts import LocalHost


@pytest.fixture(scope="session")
def shim_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests share one copy of the shim, compiled once."""
    return tmp_path_factory.mktemp("shim")


@pytest.fixture
def home(tmp_path: Path, shim_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    home = Home(tmp_path)
    home.base.mkdir(mode=0o700)
    (home.base / ".shim").symlink_to(shim_store)
    monkeypatch.setenv("PDCTL_HOME", str(home.base))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")  # where a failed `up` leaves a folder
    yield home
    left = home.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # marked with this test's own directory
    segments = home.segments()
    for name in segments:
        Path("/dev/shm", name).unlink()
    assert left == [], "the test left processes behind"
    assert segments == [], "the test left shared memory behind"


@pytest.fixture
def host(home: Home) -> LocalHost:
    return LocalHost()


@pytest.fixture
def lab(home: Home, host: LocalHost) -> Lab:
    return Lab(home, host)


@pytest.fixture
def site(home: Home) -> Site:
    python = home.root / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
    python.chmod(0o700)
    model = home.root / "model.gguf"
    model.write_bytes(b"GGUF\x03" + bytes(59))
    return Site(home, python, model)


@pytest.fixture
def demo(site: Site) -> Demo:
    """Writes the topology of `changing`, with these sections instead of the usual ones."""
    router = {"host": "local", "port": PORTS[-1]}

    def write(**sections: Any) -> Path:
        sections["router"] = router | sections.pop("router", {})
        return site.topology(**{"prefill": [PREFILL], "decode": [DECODE]} | sections)

    return write

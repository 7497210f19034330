"""The local cache of deployments: only a cache, never an obstacle."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pdctl import state

KNOWN = state.KnownDeployment("demo", "/t/demo.yaml", {"gpu-a": "192.0.2.1", "me": None}, 5.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "pdctl"


def test_remembered_recalled_forgotten(folder: Path) -> None:
    assert state.recall("demo") is None and state.names() == ()
    assert state.remember(KNOWN) == ""
    assert state.recall("demo") == KNOWN and state.names() == ("demo",)
    assert oct((folder / "demo.json").stat().st_mode & 0o777) == "0o600"
    state.forget("demo")
    state.forget("demo")
    assert state.recall("demo") is None and state.names() == ()
    assert state.recall_gone("demo") == KNOWN and state.last_gone() == "demo"


def test_the_last_one_that_went(folder: Path) -> None:
    assert state.last_gone() is None
    for number, name in enumerate(("a", "c", "b")):
        state.remember(replace(KNOWN, name=name))
        state.forget(name)
        os.utime(folder / "gone" / f"{name}.json", (number, number))
    assert state.last_gone() == "b"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 9}', '{"schema": 1, "odd": 2}'])
def test_a_broken_entry_is_as_good_as_none(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "demo.json").write_text(text)
    assert state.recall("demo") is None


def test_what_cannot_be_written_is_said(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("in the way")
    assert "pdctl" in state.remember(KNOWN)
    assert state.recall("demo") is None

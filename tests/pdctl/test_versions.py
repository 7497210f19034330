"""What an interpreter says of its runtime."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from pdctl.shim import versions


def test_an_install_in_place_is_known_by_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package has two folders, and the first one holds the compiled extension alone."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/__init__.py").write_text("VALUE = 1\n")
    spec = importlib.machinery.ModuleSpec(
        "runtime", None, origin=str(tmp_path / "sources/__init__.py"), is_package=True
    )
    spec.submodule_search_locations = [str(tmp_path / "installed"), str(tmp_path / "sources")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    code = versions.report()["code"]
    assert code == versions.fingerprint(str(tmp_path / "sources"))
    assert code != versions.fingerprint(str(tmp_path / "installed"))

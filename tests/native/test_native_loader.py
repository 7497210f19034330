"""What a host without the C++ extension says."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import pytest

from runtime import native
from runtime.errors import ConfigError


class _Finder:
    """Stands in the import system's first place and fails for runtime._native only."""

    error: ClassVar[ImportError]

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> None:
        if name == "runtime._native":
            raise self.error


def _break_import(monkeypatch: pytest.MonkeyPatch, error: ImportError) -> None:
    finder = _Finder()
    monkeypatch.setattr(_Finder, "error", error, raising=False)
    monkeypatch.delitem(sys.modules, "runtime._native", raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])


def test_present() -> None:
    native.require()


def test_missing_says_what_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_import(monkeypatch, ModuleNotFoundError("no", name="runtime._native"))
    with pytest.raises(ConfigError, match=r"runtime\._native is missing.*C\+\+ compiler") as caught:
        native.require()
    assert "apt install g++" in caught.value.hint


def test_unloadable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_import(monkeypatch, ImportError("GLIBC_2.99 not found"))
    with pytest.raises(ConfigError, match=r"does not load: GLIBC_2\.99 not found"):
        native.require()


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_import(monkeypatch, ModuleNotFoundError("no numpy", name="numpy"))
    with pytest.raises(ModuleNotFoundError, match="no numpy"):
        native.require()

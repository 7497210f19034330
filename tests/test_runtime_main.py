"""`python -m runtime` on a host where only the command line is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("kind", "package"), [("router", "uvloop"), ("worker", "tokenizers"), ("core", "torch")]
)
def test_a_missing_package_is_one_line(kind: str, package: str, tmp_path: Path) -> None:
    # As on a laptop with plain `pip install pdctl`: the import system finds no such package.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    options = ["--config", "unread.json", *(["--fd", "0"] if kind == "core" else [])]
    found = subprocess.run(
        [sys.executable, "-m", "runtime", kind, *options],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[1]}", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 1
    assert f"{kind}: the Python package {package} is missing" in found.stderr
    assert "pdctl[runtime]" in found.stderr and found.stderr.count("\n") == 1

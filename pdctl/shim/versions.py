"""Which runtime an interpreter would run. `interpreters.ask` gives this file to it on its stdin.

pdctl computes `fingerprint` of its own runtime with the same code, so equal text means equal code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from typing import Any

DISTRIBUTIONS = ("pdctl_runtime", "pdctl")


def fingerprint(folder: str) -> str:
    """Of all Python files below, by path and content: 12 hex digits."""
    digest = hashlib.sha256()
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                digest.update(os.path.relpath(path, folder).encode() + b"\0")
                with open(path, "rb") as f:
                    digest.update(hashlib.sha256(f.read()).digest())
    return digest.hexdigest()[:12]


def version_of(*names: str) -> str:
    """Of the first of these distributions that is installed; empty when none is.

    By the names of their folders: importlib.metadata takes longer to load than all the rest here.
    """
    found: dict[str, str] = {}
    for folder in filter(os.path.isdir, reversed(sys.path)):
        for entry in os.listdir(folder):
            if entry.endswith(".dist-info"):
                name, _, version = entry[: -len(".dist-info")].partition("-")
                found[name.lower()] = version
    return next((found[n] for n in names if n in found), "")


def report() -> dict[str, Any]:
    """`code` is empty without a runtime, `native` says why the extension cannot be loaded."""
    found = importlib.util.find_spec("runtime")
    # Where `__init__` is: an install in place has a second folder, with the extension alone.
    folder = os.path.dirname(found.origin) if found is not None and found.origin else ""
    answer = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "runtime": version_of(*DISTRIBUTIONS),
        "code": fingerprint(folder) if folder else "",
        "torch": version_of("torch"),
        "ibverbs": version_of("ibverbs"),
        "native": "",
    }
    if folder:
        try:
            importlib.import_module("runtime._native")
        except ImportError as e:
            answer["native"] = str(e)
    return answer


if __name__ == "__main__":
    print(json.dumps(report()))

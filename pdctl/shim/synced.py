"""Where code and models lie that were synced, and which code is used. Only looks: see `provision`.

Loads nothing heavy, for every `up` asks.
"""

from __future__ import annotations

import os

CODE = ".code"
COMPLETE = "complete.json"


def model_cache() -> str:
    """As on the machine of pdctl: `$XDG_CACHE_HOME/pdctl/models`, else below ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "pdctl", "models")


def current(base: str) -> dict[str, str] | None:
    """What new services use: its id and interpreter; None when nothing was synced."""
    root = os.path.join(base, CODE)
    name = link(root, "current")
    if not name or not is_complete(os.path.join(root, name)):
        return None
    return {"id": name, "python": os.path.join(root, name, "venv", "bin", "python")}


def link(root: str, name: str) -> str:
    """The id that `current` or `previous` leads to; empty when there is none."""
    try:
        return os.readlink(os.path.join(root, name))
    except OSError:
        return ""


def is_complete(path: str) -> bool:
    return os.path.exists(os.path.join(path, COMPLETE))

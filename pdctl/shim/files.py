"""Private files, names that are safe in paths, and the failures that are sent to pdctl.

Owns file modes (0600, 0700). Knows no processes.
"""

from __future__ import annotations

import json
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


class Refused(Exception):
    """An expected failure, one line for pdctl. `kind`: locked, state, start, stop, request."""

    def __init__(self, kind: str, message: str, hint: str = "", **more: Any) -> None:
        super().__init__(message)
        self.answer = {"ok": False, "kind": kind, "error": message, "hint": hint, **more}


def checked(name: Any) -> str:
    if not isinstance(name, str) or not NAME.match(name):
        raise Refused("request", f"{name!r} is not a name")
    return name


def base_of(request: dict[str, Any]) -> str:
    base: str = os.path.abspath(os.path.expanduser(request["base"]))
    if re.search(r'["\\\x00-\x1f]', base):  # `{dir}` is filled into JSON files
        raise Refused("state", f"{base!r}: a path with quotes or control characters cannot be used")
    return base


def write_private(path: str, text: str) -> None:
    """Write whole or not at all, readable by us alone."""
    temporary = path + ".tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    handle = os.open(temporary, flags, 0o600)
    try:
        # An environment variable may hold any bytes.
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as f:
            os.fchmod(handle, 0o600)
            f.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str, value: dict[str, Any]) -> None:
    write_private(path, json.dumps(value))


def read_json(path: str) -> dict[str, Any]:
    """{} when there is no such file, or it holds no JSON object."""
    try:
        with open(path) as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def private_dir(path: str) -> bool:
    """Make the directory, 0700. False: it was there."""
    try:
        os.mkdir(path, 0o700)
        return True
    except FileExistsError:
        if os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o700)
        return False

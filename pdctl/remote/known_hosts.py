"""Which host keys the user trusts, as sshd(8) describes the file known_hosts.

Understands lists, wildcards, negation, [host]:port, hashed names and @revoked. A new key is
appended under a lock; nothing that is there is ever rewritten.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_HASHED = "|1|"


@dataclass(frozen=True, slots=True)
class HostKey:
    kind: str
    """`ssh-ed25519`, ..."""
    text: str
    """base64, as in the file."""

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(base64.b64decode(self.text)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Known:
    """What the files say of one host."""

    trusted: tuple[HostKey, ...]
    revoked: tuple[HostKey, ...]


def look_up(files: Sequence[str], name: str) -> Known:
    """`name` as OpenSSH looks it up: `host`, or `[host]:port` for another port than 22."""
    trusted: list[HostKey] = []
    revoked: list[HostKey] = []
    for file in files:
        for marker, patterns, key in _entries(file):
            if marker in ("", "@revoked") and _matches(patterns, name):
                (revoked if marker else trusted).append(key)
    return Known(tuple(trusted), tuple(revoked))


def append(file: str, name: str, key: HostKey, *, hashed: bool) -> None:
    """Add a line, unless it has got there meanwhile. Raises OSError."""
    Path(file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "rb+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        if not os.path.isfile(file) or key in look_up([file], name).trusted:
            return  # /dev/null: the user wants none kept
        end = f.seek(0, os.SEEK_END)
        f.seek(max(0, end - 1))
        gap = "\n" if end and f.read(1) != b"\n" else ""
        f.write(f"{gap}{_hash(name) if hashed else name} {key.kind} {key.text}\n".encode())


def _entries(file: str) -> Iterator[tuple[str, str, HostKey]]:
    """Marker, host patterns and key of each line that has them."""
    try:
        lines = Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            try:
                base64.b64decode(words[2], validate=True)
            except binascii.Error:
                continue
            yield marker, words[0], HostKey(words[1], words[2])


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith(_HASHED):
        return hmac.compare_digest(patterns, _hash(name, patterns.split("|")[2]))
    found = False
    for pattern in patterns.lower().split(","):
        if _fits(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _fits(pattern: str, name: str) -> bool:
    """`*` and `?` are the only wildcards: brackets belong to [host]:port."""
    if pattern == name or not {"*", "?"} & set(pattern):
        return pattern == name
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name))


def _hash(name: str, salt: str = "") -> str:
    raw = base64.b64decode(salt) if salt else os.urandom(20)
    digest = hmac.new(raw, name.encode(), hashlib.sha1).digest()
    return f"{_HASHED}{base64.b64encode(raw).decode()}|{base64.b64encode(digest).decode()}"

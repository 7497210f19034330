"""Take secrets out of text, on the host where they are known: by value, by name and by shape.

A value that is hidden never leaves the host. What a reader needs (which names there are, that a
value was set) stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
PRIVATE = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
"""A variable whose name has one of these may be a secret, wherever the user put it."""
SHORTEST = 4
"""Shorter values would take half of the text with them."""

_NAMED = re.compile(
    r"""((?:api[_-]?keys?|token|secret|passw(?:or)?d|passphrase|credentials?)["']?\s*[:=]\s*["']?)"""
    r"""(?!\*\*\*|[\d.]+\b|null\b|none\b|true\b|false\b)([^\s"',;&}\]]+)""",
    re.IGNORECASE,
)
_SHAPES = (
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE), r"\1 ***"),
    (re.compile(r"\b(sk-|hf_|ghp_|glpat-)[A-Za-z0-9_-]{6,}"), r"\1***"),
    (re.compile(r"(://)[^/\s:@]+:[^/\s@]+@"), r"\1***@"),
)


def environment(env: Mapping[str, str], secrets: Iterable[str] = ()) -> dict[str, str]:
    """All names; the values of `secrets`, and of what by its name may be one, hidden."""
    hidden = set(secrets)
    return {k: HIDDEN if k in hidden or PRIVATE.search(k) else v for k, v in env.items()}


def document(found: Any) -> Any:
    """JSON in which every `env` is an environment, wherever it is."""
    if isinstance(found, list):
        return [document(item) for item in found]
    if not isinstance(found, dict):
        return found
    shown = {key: document(value) for key, value in found.items()}
    if isinstance(found.get("env"), dict):
        shown["env"] = environment(found["env"])
    return shown


def private_values(env: Mapping[str, str], secrets: Iterable[str] = ()) -> set[str]:
    """What must not show up in any text, line by line: a file of keys has one on each.

    Of what is private only by its name, no plain words: TOKENIZERS_PARALLELISM=false is no secret.
    """
    hidden = set(secrets)
    values = set()
    for name, value in env.items():
        for line in map(str.strip, value.splitlines()):
            random = len(line) >= 8 and any(c.isdigit() for c in line)
            if (name in hidden and len(line) >= SHORTEST) or (PRIVATE.search(name) and random):
                values.add(line)
    return values


def text(found: str, values: Iterable[str]) -> str:
    """`found` without these values, as they are or in JSON, and without what looks like one."""
    for value in sorted(values, key=len, reverse=True):
        for form in (value, json.dumps(value)[1:-1]):
            found = found.replace(form, HIDDEN)
    for pattern, instead in _SHAPES:
        found = pattern.sub(instead, found)
    return _NAMED.sub(r"\1" + HIDDEN, found)

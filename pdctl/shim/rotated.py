"""Whether secrets of services here are still those that pdctl would give them, told by no value.

pdctl sends digests under a key that it makes for each question. Neither is kept.
"""

from __future__ import annotations

import hashlib
from typing import Any

from .files import read_json
from .service import Service


def digest(key: str, value: str) -> str:
    """`key`: 64 characters at most."""
    text = value.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, key=key.encode(), digest_size=32).hexdigest()


def rotated(base: str, request: dict[str, Any]) -> dict[str, list[str]]:
    """Service -> variables of which it has another value. Asked: service -> variable -> digest."""
    key, asked = request["secrets"]["key"], request["secrets"]["digests"]
    services = {name: Service(base, request["deployment"], name) for name in asked}
    return {
        name: [
            variable
            for variable, wanted in sorted(digests.items())
            if any(digest(key, value) != wanted for value in _held(services[name], variable))
        ]
        for name, digests in asked.items()
    }


def _held(service: Service, variable: str) -> list[str]:
    """The variable's values, in the environment and in files. A missing one is empty."""
    held = []
    if variable in service.spec.get("secrets", ()):
        held.append(read_json(service.path("env")).get(variable, ""))
    for file, source in service.spec.get("secret_files", {}).items():
        if source == variable:
            try:
                with open(service.path(file), newline="") as f:  # as it was written
                    held.append(f.read())
            except OSError:
                held.append("")
    return held

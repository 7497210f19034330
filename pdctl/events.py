"""What `ops` tells while it works, for whoever shows it. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "phase", "note", "keep", "start", "wait", "ready", "fail", "log", "stop", "stopped", "rollback"
]
"""
phase   what is done from now on, worth a word only when it takes long; empty: somebody is asked
wait    a service still waits for something; repeated, for a spinner, or once per change of text
log     one of the last lines of a service that failed
"""


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    text: str
    service: str = ""
    host: str = ""
    seconds: float | None = None
    """Since the phase began, where that means something."""


Report = Callable[[Event], None]


def silent(_: Event) -> None:
    """For callers that show nothing."""

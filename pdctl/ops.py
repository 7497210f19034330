"""What the command line can do to deployments: the façade over its parts."""

from __future__ import annotations

from pdctl.down import DownResult, StoppedService, down
from pdctl.events import Event, EventKind, Report, silent
from pdctl.up import UpOptions, UpResult, plan_up, up

__all__ = [
    "DownResult",
    "Event",
    "EventKind",
    "Report",
    "StoppedService",
    "UpOptions",
    "UpResult",
    "down",
    "plan_up",
    "silent",
    "up",
]

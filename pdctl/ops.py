"""What the command line can do to deployments: the façade over its parts.

plan_up, up        bring a deployment to what its topology says
down               stop it and prove that nothing is left
status, logs       look at it
deployments, the_deployment   which there are, and which one is meant
"""

from __future__ import annotations

from pdctl.down import DownResult, StoppedService, down
from pdctl.events import Event, EventKind, Report, silent
from pdctl.logs import LogLine, logs
from pdctl.status import DeploymentStatus, ServiceStatus, deployments, status, the_deployment
from pdctl.up import UpOptions, UpResult, plan_up, up

__all__ = [
    "DeploymentStatus",
    "DownResult",
    "Event",
    "EventKind",
    "LogLine",
    "Report",
    "ServiceStatus",
    "StoppedService",
    "UpOptions",
    "UpResult",
    "deployments",
    "down",
    "logs",
    "plan_up",
    "silent",
    "status",
    "the_deployment",
    "up",
]

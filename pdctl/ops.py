"""What the command line can do to deployments: the façade over its parts.

plan_up, up        bring a deployment to what its topology says
scale              the same with other numbers of replicas
restart, drain     renew what runs; keep new requests away from an instance
down, down_orphans stop it and prove that nothing is left; or only what the topology lost
status, logs, audit   look at it
show_lock, break_locks  the lock on it
collect            all of it in a folder, redacted
on_service, on_host   run a command beside a service, or on a host
deployments, resolve_name   which there are, and which one is meant
"""

from __future__ import annotations

from pdctl.audit import AuditEntry, AuditReport, audit
from pdctl.collect import Collected, collect
from pdctl.down import DownResult, StoppedService, down, down_orphans
from pdctl.drain import DrainOptions, DrainResult, drain
from pdctl.events import Event, EventKind, Report, silent
from pdctl.execute import Command, on_host, on_service
from pdctl.find import Where, deployments, resolve_name
from pdctl.locks import LockHolder, LockReport, break_locks
from pdctl.locks import show as show_lock
from pdctl.logs import LogLine, LogQuery, logs
from pdctl.restart import RestartOptions, RestartResult, restart
from pdctl.scale import scale
from pdctl.status import DeploymentStatus, ServiceStatus, status
from pdctl.up import UpOptions, UpResult, plan_up, up

__all__ = [
    "Command",
    "AuditEntry",
    "AuditReport",
    "Collected",
    "LockHolder",
    "LockReport",
    "audit",
    "collect",
    "break_locks",
    "show_lock",
    "DeploymentStatus",
    "DownResult",
    "DrainOptions",
    "DrainResult",
    "Event",
    "EventKind",
    "LogLine",
    "LogQuery",
    "Report",
    "RestartOptions",
    "RestartResult",
    "ServiceStatus",
    "StoppedService",
    "UpOptions",
    "UpResult",
    "Where",
    "deployments",
    "down",
    "down_orphans",
    "drain",
    "logs",
    "on_host",
    "on_service",
    "plan_up",
    "restart",
    "scale",
    "silent",
    "status",
    "resolve_name",
    "up",
]

"""The JSON documents of `plan` and `validate`, and what people see of these and of `status`. Pure.

Values that may be private are shown as ***; secrets never get this far.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pdctl.audit import AuditReport
from pdctl.logs import LogLine
from pdctl.output import HUES, Cell, Screen, Style, duration, table
from pdctl.plan import Plan, Step, StepKind
from pdctl.scaling import to_record
from pdctl.shim.redact import HIDDEN, environment
from pdctl.sizes import counted, exact_size, format_size
from pdctl.status import BufferStatus, DeploymentStatus, Health, ServiceStatus
from pdctl.topology import LoadedTopology

_SIZES = ("kv_cache", "cpu_buffer")
_STYLES: dict[StepKind, Style] = {
    "start": "good",
    "keep": "dim",
    "replace": "warn",
    "remove": "bad",
    "restart": "warn",
}


def validate_document(loaded: LoadedTopology) -> dict[str, Any]:
    """The topology with every default filled in, valid wherever it is put, and its instances."""
    topology = loaded.topology
    content = to_record(topology, loaded.path.resolve().parent)
    for role in ("prefill", "decode", "mixed"):
        for group in content[role]:
            group["env"] = environment(group["env"])
            group["host"] = group["host"] or next(iter(topology.hosts))
            for key in _SIZES:
                if key in group:
                    group[key] = exact_size(group[key])
    content["router"]["host"] = topology.host_of(topology.router)
    return {
        "schema": "pdctl.validate/1",
        "ok": True,
        "file": str(loaded.path),
        "warnings": list(loaded.warnings),
        "topology": content,
        "services": [
            {
                "name": "router",
                "host": content["router"]["host"],
                "ports": {"http": topology.router.port},
            },
            *(
                {"name": i.name, "host": i.host, "ports": i.wanted_ports()}
                for i in topology.instances()
            ),
        ],
    }


def topology_text(document: dict[str, Any]) -> str:
    """The topology of a `validate_document` as YAML, without what is left to pdctl."""
    import yaml

    def stated(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stated(item) for key, item in value.items() if item is not None}
        return [stated(item) for item in value] if isinstance(value, list) else value

    text: str = yaml.safe_dump(stated(document["topology"]), sort_keys=False)
    return text


def plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "schema": "pdctl.plan/1",
        "name": plan.deployment,
        "changes": plan.changes,
        "notes": list(plan.notes),
        "steps": [_step(step) for step in plan.steps],
    }


def _step(step: Step) -> dict[str, Any]:
    service = step.service
    return {
        "kind": step.kind,
        "name": service.name,
        "role": service.role,
        "host": service.host,
        "reason": step.reason,
        "ports": service.ports,
        "url": service.url,
        "argv": list(service.argv),
        "env": environment(service.env),
        "files": service.files,
    }


def plan_text(plan: Plan, screen: Screen, *, verbose: bool) -> str:
    """What would be done, and with `verbose` with which commands and config files."""
    rows = [
        (
            Cell(step.kind, _STYLES[step.kind]),
            step.service.name,
            step.service.host,
            " ".join(f"{purpose}:{port}" for purpose, port in step.service.ports.items()),
            step.reason,
        )
        for step in plan.steps
    ]
    parts = [table(("STEP", "SERVICE", "HOST", "PORTS", "WHY"), rows, screen)] if rows else []
    if verbose:
        parts += [_command(step) for step in plan.of("start", "replace")]
    notes = [f"{screen.paint(screen.symbol('note'), 'warn')} {note}" for note in plan.notes]
    return "\n\n".join([*parts, "\n".join([*notes, plan_summary(plan)])])


def plan_summary(plan: Plan) -> str:
    counts = {
        "to start": len(plan.of("start")),
        "to replace": len(plan.of("replace")),
        "to restart": len(plan.of("restart")),
        "to remove": len(plan.of("remove")),
        "unchanged": len(plan.of("keep")),
    }
    shown = [f"{n} {what}" for what, n in counts.items() if n or what in ("to start", "unchanged")]
    return f"{plan.deployment}: {', '.join(shown)}"


# ---- status --------------------------------------------------------------------------------------

_HEALTH: dict[Health, tuple[str, Style]] = {
    "healthy": ("ok", "good"),
    "starting": ("waiting", "warn"),
    "unready": ("failed", "warn"),
    "draining": ("waiting", "warn"),
    "down": ("failed", "bad"),
}
_COLUMNS = (
    *("SERVICE", "ROLE", "HOST", "PID", "STATE", "HEALTH", "UPTIME", "ENDPOINT"),
    *("KV MOVED", "HELD"),
)


def status_text(found: DeploymentStatus, screen: Screen) -> str:
    """A line for the deployment, the table, and a line for each thing that is worth a look."""
    word = "healthy" if found.healthy else "degraded" if found.services else "not running"
    if found.unreachable and not found.services:
        word = "unknown"
    head = f"{found.name}  {screen.paint(word, 'good' if found.healthy else 'bad')}"
    parts = [f"{head}  {found.endpoint}".rstrip()]
    if found.services:
        parts.append(table(_COLUMNS, [_service(s, screen) for s in found.services], screen))
    notes = [f"{s.name}: {s.reason}" for s in found.services if s.reason]
    notes += [f"{s.name}: {text}" for s in found.services if (text := _buffer(s.buffer))]
    notes += [f"{lock.host}: locked by {lock.text}" for lock in found.locks]
    lost = [*found.unreachable.values()]
    if lost:
        ok = counted(found.hosts_ok, "host")
        lost.append(f"{ok} ok, {len(lost)} failed: what runs there is not known")
    return "\n".join([*parts, *notes, *lost])


def audit_text(report: AuditReport, screen: Screen) -> str:
    """A line per change, oldest first."""
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e.at)),
            e.host,
            e.service or "-",
            Cell(e.result, "bad" if e.result.startswith("failed") else ""),
            f"{e.user}@{e.machine}",
            f"{e.command or e.do} (pdctl {e.version})",
        )
        for e in report.entries
    ]
    header = ("TIME (UTC)", "HOST", "SERVICE", "CHANGE", "WHO", "COMMAND")
    if rows:
        return table(header, rows, screen)
    return "no change was recorded" + where_asked(report.unreachable)


def where_asked(unreachable: Mapping[str, str]) -> str:
    """Ends a sentence that something is not: it may be on the hosts that did not answer."""
    return " on the hosts that answered" if unreachable else ""


class LogPrinter:
    """Log lines for people: `service host | line`, each service in a colour of its own."""

    def __init__(self, screen: Screen, *, bare: bool) -> None:
        self._screen = screen
        self._bare = bare
        self._hues: dict[tuple[str, str], Style] = {}

    def text(self, entry: LogLine) -> str:
        if entry.event != "line":
            style: Style = "bad" if entry.event == "lost" else "good"
            return self._screen.paint(f"! {entry.host}: {entry.event}: {entry.line}", style)
        if self._bare:
            return entry.line
        hue = self._hues.setdefault((entry.service, entry.host), HUES[len(self._hues) % len(HUES)])
        prefix = f"{entry.service:<10} {entry.host:<8} | "
        return f"{self._screen.paint(prefix, hue)}{entry.line}"


def _service(service: ServiceStatus, screen: Screen) -> list[Cell | str]:
    symbol, style = _HEALTH[service.health]
    return [
        service.name,
        _role(service),
        service.host,
        str(service.pid or "-"),
        service.state,
        Cell(f"{screen.symbol(symbol)} {service.health}", style),
        duration(service.uptime_s) if service.uptime_s is not None else "-",
        service.url or "-",
        _kv_moved(service),
        _held(service),
    ]


def _role(service: ServiceStatus) -> str:
    ranks = service.tp_size or 1
    return service.role if ranks == 1 else f"{service.role} (tp {ranks})"


def _kv_moved(service: ServiceStatus) -> str:
    """`1.5MiB shm`, for each path that was used; `-` where none can be."""
    if service.role not in ("prefill", "decode"):
        return "-"
    used = [f"{format_size(n)} {path}" for path, n in service.kv_bytes.items() if n]
    return ", ".join(used) or ("0" if service.idle is not None else "?")


def _held(service: ServiceStatus) -> str:
    """What requests hold now; 0 when idle."""
    if service.role == "router":
        return "-"
    if service.idle is None:
        return "?"
    return " ".join(f"{key}={n}" for key, n in service.held.items()) or "0"


def _buffer(buffer: BufferStatus | None) -> str:
    """What the CPU buffer does; empty when it is empty and never was in anybody's way."""
    if buffer is None or not (buffer.used or buffer.swap_outs or buffer.reserve_seconds >= 1):
        return ""
    parts = [f"CPU buffer {buffer.used} of {buffer.total} blocks"]
    if buffer.quarantined:
        parts.append(f"{buffer.quarantined} quarantined")
    if buffer.waiting:
        parts.append(f"{buffer.waiting} requests wait")
    parts.append(f"since the start {buffer.reserve_seconds:.1f} s waited for room")
    parts.append(f"{buffer.swap_in_seconds:.1f} s swap-in")
    if buffer.swap_outs:
        parts.append(f"{buffer.swap_outs} swap-outs, {buffer.swapped_seconds:.1f} s away")
    return ", ".join(parts)


def _command(step: Step) -> str:
    service = step.service
    env = [f"{name}={value}" for name, value in environment(service.env).items()]
    env += [f"{name}={HIDDEN}" for name in service.secrets]
    lines = [f"{service.name} on {service.host}", "  " + " ".join([*env, *service.argv])]
    for name, text in service.files.items():
        lines += [f"  {{dir}}/{name}:", *(f"    {line}" for line in text.splitlines())]
    return "\n".join(lines)

"""A `Diagnosis` for people and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdctl.doctor import Diagnosis, PairReport
from pdctl.doctor_checks import Trouble, View
from pdctl.errors import HostUnreachable
from pdctl.output import Cell, Row, Screen, table
from pdctl.sizes import format_size

_HOSTS = (
    *("HOST", "SSH", "PYTHON", "RUNTIME", "TORCH", "GPUS", "/DEV/SHM", "MEMLOCK", "NOFILE"),
    *("CLOCK", "RDMA", "DISK"),
)
_PAIRS = ("PREFILL", "DECODE", "PATH", "PORT", "REACHED", "SHM GB/S", "TCP GB/S")


def doctor_text(found: Diagnosis, screen: Screen) -> str:
    rows: list[Row] = [_host(v, screen) for v in found.views]
    for key, error in found.lost.items():
        rows.append([key, _ssh(not isinstance(error, HostUnreachable), screen), *["-"] * 10])
    parts = [table(_HOSTS, rows, screen)]
    if found.pairs:
        parts.append(table(_PAIRS, [_pair(p, screen) for p in found.pairs], screen))
    summary = [f"{found.name}: {_tried(found)}", *_failed(found)]
    summary += [_trouble(t, screen) for t in found.troubles]
    if not found.troubles:
        summary.append(f"{screen.paint(screen.symbol('ok'), 'good')} nothing is in the way of `up`")
    return "\n\n".join([*parts, "\n".join(summary)])


def _tried(found: Diagnosis) -> str:
    if not found.reached:
        return "no connection could be tried"
    works = sum(not r.error for r in found.reached.values())
    pairs = ", the pairs above among them" if found.pairs else ""
    return f"{works} of {len(found.reached)} connections work (clients, router, instances{pairs})"


def _failed(found: Diagnosis) -> Iterator[str]:
    """Connections that do not work only because of a trouble that is named."""
    named = {t.edge for t in found.troubles}
    for edge, answer in found.reached.items():
        if answer.error and edge not in named:
            where = f"{edge.source or 'this machine'} -> {edge.target} port {edge.port}"
            yield f"    failed: {where} ({edge.service}): {answer.error}"


def _host(view: View, screen: Screen) -> Row:
    facts, shm = view.facts, view.probe["shm"]
    versions = view.versions
    code = versions.get("code", "")
    memlock = "any" if facts["memlock"] < 0 or facts["may_lock"] else _size(facts["memlock"])
    rdma = [f"{p['device']}/{p['port']} ({len(p['gids'])} GIDs)" for p in view.rdma_ports]
    return [
        view.key,
        "local" if view.entry.local else _ssh(True, screen),
        versions.get("python") or facts["python"],
        f"{versions.get('runtime', '').partition('+')[0]} {code[:8]}" if code else "-",
        versions.get("torch") or "-",
        ", ".join(f"{g['index']}: {_size(g['free'])} free" for g in facts["gpus"]) or "-",
        f"{_size(shm['free'])} of {_size(shm['total'])}",
        memlock,
        "any" if facts["nofile"] < 0 else str(facts["nofile"]),
        str(view.clock),
        ", ".join(rdma) or "-",
        _size(facts["disk_free"]),
    ]


def _ssh(works: bool, screen: Screen) -> Cell:
    if works:
        return Cell(f"{screen.symbol('ok')} yes", "good")
    return Cell(f"{screen.symbol('failed')} no", "bad")


def _pair(pair: PairReport, screen: Screen) -> Row:
    words = {
        True: Cell(f"{screen.symbol('ok')} yes", "good"),
        False: Cell(f"{screen.symbol('failed')} no", "bad"),
        None: Cell("?", "warn"),
    }
    return [
        f"{pair.prefill.name} ({pair.prefill.host})",
        f"{pair.decode.name} ({pair.decode.host})",
        pair.path,
        str(pair.port),
        words[pair.reached],
        *(_rate(pair.rates.get(path, 0.0)) for path in ("shm", "tcp")),
    ]


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f}" if rate else "-"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "0"


def _trouble(trouble: Trouble, screen: Screen) -> str:
    name, style = ("failed", "bad") if trouble.severe else ("note", "warn")
    mark = screen.paint(screen.symbol(name), "bad" if style == "bad" else "warn")
    text = f"{mark} {trouble.where}: {trouble.what}"
    return f"{text}\n    do: {trouble.do}" if trouble.do else text


def doctor_document(found: Diagnosis) -> dict[str, Any]:
    hosts = [
        {
            "host": v.key,
            "ok": True,
            "versions": dict(v.versions),
            "clock": {"ahead_s": round(v.clock.ahead, 3), "error_s": round(v.clock.error, 3)},
            "shm": v.probe["shm"],
            "ports": v.probe["ports"],
            "running": sorted(v.running),
            **{k: v.facts[k] for k in ("python", "path", "memlock", "may_lock", "nofile")},
            **{k: v.facts[k] for k in ("disk_free", "memory_free", "gpus", "rdma", "addresses")},
        }
        for v in found.views
    ]
    hosts += [{"host": k, "ok": False, "error": str(e)} for k, e in found.lost.items()]
    return {
        "schema": "pdctl.doctor/1",
        "name": found.name,
        "ok": found.exit_code == 0,
        "hosts": hosts,
        "pairs": [
            {
                "prefill": p.prefill.name,
                "decode": p.decode.name,
                "hosts": [p.prefill.host, p.decode.host],
                "path": p.path,
                "port": p.port,
                "reached": p.reached,
                "bytes_per_second": {k: round(v) for k, v in p.rates.items() if v},
            }
            for p in found.pairs
        ],
        "connections": [
            {
                "from": e.source or None,
                "to": e.target,
                "address": e.address,
                "port": e.port,
                "service": e.service,
                "error": r.error,
            }
            for e, r in found.reached.items()
        ],
        "troubles": [
            {"where": t.where, "what": t.what, "do": t.do, "severe": t.severe}
            for t in found.troubles
        ],
    }

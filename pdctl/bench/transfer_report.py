"""What `pdctl bench transfer` shows: a table for each pair, or one JSON document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdctl.bench.metrics import percentile
from pdctl.bench.transfer import WHATS, Pair, Row, Transfers, What
from pdctl.output import Screen, table

SCHEMA = "pdctl.bench.transfer/1"
_TITLES: dict[What, str] = {"path": "GB/s", "memcpy": "memcpy", "socket": "socket loop"}


def document(found: Transfers) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": found.name,
        "partial": found.partial,
        "pairs": [_pair(pair) for pair in found.pairs],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "path": pair.path,
        "block_bytes": pair.block_bytes or None,
        "one_block_s": _latency(pair.latencies_s),
        "limit": pair.limit,
        "rows": [
            {
                "run_blocks": row.run,
                "run_bytes": row.run * pair.block_bytes,
                "rounds": min(len(row.speeds[what]) for what in WHATS),
                **{f"{what}_gb_s": row.median(what) for what in WHATS},
                "ratio_to_limit": ratio(pair, row),
            }
            for row in pair.rows
        ],
        "error": pair.error or None,
    }


def _latency(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {"p50": percentile(ordered, 50), "p99": percentile(ordered, 99)}


def ratio(pair: Pair, row: Row) -> float | None:
    """Of the medians of the same rounds."""
    speed, limit = row.median("path"), row.median(pair.limit)
    return speed / limit if speed is not None and limit else None


def text(found: Transfers, screen: Screen) -> str:
    parts = [_pair_text(pair, screen) for pair in found.pairs]
    if found.partial:
        parts.append("interrupted: the rest was not measured")
    return "\n\n".join(parts)


def _pair_text(pair: Pair, screen: Screen) -> str:
    lines = [f"{pair.prefill} to {pair.decode} over {pair.path}"]
    if latency := _latency(pair.latencies_s):
        lines[0] += (
            f": one block of {pair.block_bytes / 1024:g} KiB in {1e3 * latency['p50']:.2f} ms"
            f" (P99 {1e3 * latency['p99']:.2f})"
        )
    if any(row.median("path") is not None for row in pair.rows):
        header = ["KiB at a time", *_TITLES.values(), f"of {_TITLES[pair.limit]}"]
        rows = [
            [
                f"{row.run * pair.block_bytes / 1024:g}",
                *(_number(row.median(what)) for what in _TITLES),
                _number(ratio(pair, row)),
            ]
            for row in pair.rows
        ]
        lines.append(table(header, rows, screen))
    if pair.error:
        lines.append(f"failed: {pair.error}")
    elif not pair.latencies_s:
        lines.append("not measured")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

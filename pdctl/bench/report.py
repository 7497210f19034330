"""A summary as the reference table and as one JSON document (`pdctl.bench/1`). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdctl.bench.metrics import PERCENTILES, Distribution, HandOver, Metric, Summary
from pdctl.bench.outcome import Outcome

SCHEMA = "pdctl.bench/1"
_WIDTH = 50
_BUSY_CLIENT = 0.8
_MERGED_CHUNKS = 1.05


def table(summary: Summary) -> str:
    """The report for people: 50 columns and a line per number, notes last."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    if summary.partial:
        lines.append("PARTIAL: interrupted, completed requests only")
    lines += _counts(summary)
    for metric in summary.metrics:
        lines += _metric(metric)
    lines += _parts(summary)
    lines += _hand_over(summary.hand_over)
    lines.append("=" * _WIDTH)
    lines += [f"note: {note}" for note in notes(summary)]
    lines += [f"FAILED {f.count} x {f.kind}, the first: {f.first}" for f in summary.failures]
    return "\n".join(lines)


def notes(summary: Summary) -> list[str]:
    """What a reader must know to read the numbers right."""
    found = []
    n = summary.successful
    if 0 < n < 10_000:
        found.append(f"{n} samples: percentiles beyond P{100 - 100 / n:.4g} are the worst one")
    per_chunk = summary.tokens_per_chunk
    if per_chunk is not None and per_chunk > _MERGED_CHUNKS:
        found.append(f"arrivals held {per_chunk:.2f} tokens on average: ITL is not per token here")
    if summary.cached_tokens * 2 > summary.input_tokens:
        found.append(
            f"{summary.cached_tokens} of {summary.input_tokens} input tokens came from prefix "
            "caches: another --seed makes new prompts"
        )
    if summary.without_usage:
        found.append(f"{summary.without_usage} answers said no usage: their tokens are not counted")
    if summary.client_cores > _BUSY_CLIENT:
        found.append(
            f"this client used {summary.client_cores:.2f} of a core: it may be the bottleneck"
        )
    return found


def document(
    summary: Summary,
    outcomes: Sequence[Outcome],
    *,
    versions: Mapping[str, str],
    arguments: Mapping[str, Any],
    target: Mapping[str, Any],
    started_at: str,
) -> dict[str, Any]:
    """One JSON document. Times in it are milliseconds, sizes bytes; null: no samples."""
    return {
        "schema": SCHEMA,
        "versions": dict(versions),
        "started_at": started_at,
        "arguments": dict(arguments),
        "target": dict(target),
        "partial": summary.partial,
        "requests": {
            "attempted": summary.attempted,
            "successful": summary.successful,
            "failed": summary.failed,
            "interrupted": summary.interrupted,
        },
        "failures": [
            {"kind": f.kind, "count": f.count, "first": f.first} for f in summary.failures
        ],
        "duration_s": summary.duration_s,
        "tokens": {
            "input": summary.input_tokens,
            "cached": summary.cached_tokens,
            "output": summary.output_tokens,
        },
        "throughput": {
            "requests_per_s": summary.request_throughput,
            "output_tokens_per_s": summary.output_throughput,
            "total_tokens_per_s": summary.total_throughput,
        },
        "metrics": {
            m.key: {"unit": m.unit, "low_is_bad": m.low_is_bad, "values": _json(m.values)}
            for m in summary.metrics
        },
        "ttft_parts_ms": {stage: _json(d) for stage, d in summary.ttft_parts.items()},
        "hand_over": _hand_over_json(summary.hand_over),
        "goodput": _goodput_json(summary),
        "sending": _sending_json(summary),
        "tokens_per_chunk": summary.tokens_per_chunk,
        "client_cores": summary.client_cores,
        "notes": notes(summary),
        "per_request": [_outcome(o) for o in sorted(outcomes, key=lambda o: o.index)],
    }


def _row(name: str, value: str) -> str:
    return f"{name + ':':<40} {value:<10}".rstrip()


def _rule(title: str) -> str:
    return f"{title:-^{_WIDTH}}"


def _number(value: float | None) -> str:
    """Two decimals; more where two would round something to nothing."""
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def _counts(s: Summary) -> Iterator[str]:
    yield _row("Successful requests", str(s.successful))
    yield _row("Failed requests", str(s.failed))
    if s.partial:
        yield _row("Interrupted requests", str(s.interrupted))
    done = s.successful > 0
    yield _row("Benchmark duration (s)", _number(s.duration_s))
    yield _row("Total input tokens", str(s.input_tokens) if done else "-")
    yield _row("Cached input tokens", str(s.cached_tokens) if done else "-")
    yield _row("Total generated tokens", str(s.output_tokens) if done else "-")
    yield _row("Request throughput (req/s)", _number(s.request_throughput if done else None))
    yield _row("Output token throughput (tok/s)", _number(s.output_throughput if done else None))
    yield _row("Total token throughput (tok/s)", _number(s.total_throughput if done else None))
    if s.sending:
        yield _row("Asked request rate (req/s)", _number(s.sending.asked_rate))
        yield _row("Achieved request rate (req/s)", _number(s.sending.achieved_rate))
        yield _row("Sent late, mean (ms)", _number(s.sending.late_mean_ms))
        yield _row("Sent late, worst (ms)", _number(s.sending.late_max_ms))
    if s.goodput:
        limits = " ".join(f"{k}:{v:g}" for k, v in s.goodput.limits_ms.items())
        yield _row(f"Goodput ({limits})", f"{s.goodput.met}/{s.goodput.attempted}")
        yield _row("Goodput (req/s)", _number(s.goodput.per_second))


def _metric(metric: Metric) -> Iterator[str]:
    name, values = metric.title, metric.values
    yield _rule(" Decode speed (P99: slowest 1%) " if metric.low_is_bad else f" {name} ")
    yield _row(f"Mean {name} ({metric.unit})", _number(values.mean if values else None))
    yield _row(f"Median {name} ({metric.unit})", _number(values.median if values else None))
    for q in PERCENTILES:
        value = values.percentiles[q] if values else None
        yield _row(f"P{q:g} {name} ({metric.unit})", _number(value))


def _columns(name: str, *values: str) -> str:
    return f"{name:<17}" + "".join(f"{v:>11}" for v in values)


def _spread(name: str, values: Distribution | None) -> str:
    if values is None:
        return _columns(name, "-", "-", "-")
    p95 = values.percentiles[95.0]
    return _columns(name, _number(values.mean), _number(values.median), _number(p95))


def _parts(summary: Summary) -> Iterator[str]:
    if not summary.ttft_parts:
        return
    yield _rule(" TTFT by stage (ms) ")
    yield _columns("", "mean", "median", "P95")
    for stage, values in summary.ttft_parts.items():
        yield _spread(stage, values)


def _hand_over(h: HandOver) -> Iterator[str]:
    if not h.requests_by_path:
        return
    yield _rule(" Hand-over ")
    for path in sorted(h.requests_by_path):
        n, mib = h.requests_by_path[path], h.bytes_by_path[path] / 2**20
        yield _row(f"KV by {path} (MiB)", f"{mib:.1f} in {n}")
    if h.kv_bytes is None:
        return
    yield _columns("", "mean", "median", "P95")
    yield _spread("transfer (ms)", h.transfer_ms)
    yield _spread("swap_in (ms)", h.swap_in_ms)
    yield _spread("2nd token (ms)", h.second_token_ms)
    yield _spread("exposed (GB/s)", h.transfer_gb_s)


def _json(d: Distribution | None) -> dict[str, float] | None:
    if d is None:
        return None
    named = {f"p{q:g}": value for q, value in d.percentiles.items()}
    return {"n": d.n, "mean": d.mean, "median": d.median, "std": d.std, **named}


def _hand_over_json(h: HandOver) -> dict[str, Any]:
    return {
        "requests_by_path": dict(h.requests_by_path),
        "bytes_by_path": dict(h.bytes_by_path),
        "transfer_ms": _json(h.transfer_ms),
        "swap_in_ms": _json(h.swap_in_ms),
        "second_token_ms": _json(h.second_token_ms),
        "kv_bytes": _json(h.kv_bytes),
        "exposed_gb_per_s": _json(h.transfer_gb_s),
    }


def _goodput_json(s: Summary) -> dict[str, Any] | None:
    if s.goodput is None:
        return None
    g = s.goodput
    return {
        "limits_ms": dict(g.limits_ms),
        "met": g.met,
        "attempted": g.attempted,
        "requests_per_s": g.per_second,
    }


def _sending_json(s: Summary) -> dict[str, Any] | None:
    if s.sending is None:
        return None
    return {
        "asked_rate": s.sending.asked_rate,
        "achieved_rate": s.sending.achieved_rate,
        "late_mean_ms": s.sending.late_mean_ms,
        "late_max_ms": s.sending.late_max_ms,
    }


def _outcome(o: Outcome) -> dict[str, Any]:
    ttft, tpot = o.ttft_s, o.tpot_s
    return {
        "index": o.index,
        "start_s": o.started_s,
        "ttft_ms": None if ttft is None else 1e3 * ttft,
        "tpot_ms": None if tpot is None else 1e3 * tpot,
        "e2e_ms": 1e3 * o.e2e_s,
        "input_tokens": o.prompt_tokens,
        "output_tokens": o.output_tokens,
        "prefill": o.served.prefill if o.served else None,
        "decode": o.served.decode if o.served else None,
        "path": o.served.path if o.served else None,
        "error": None if o.failure is None else f"{o.failure.kind}: {o.failure.message}",
    }

"""Numbers out of outcomes. Pure; the definitions in words are in `explain`.

A metric without samples has none of its numbers: nothing is ever reported as 0 for want of data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdctl.bench.load import Run
from pdctl.bench.outcome import Outcome
from pdctl.errors import UsageError

PERCENTILES = (80.0, 95.0, 99.0, 99.9, 99.95, 99.99)
GOODPUT_KEYS = ("ttft", "tpot", "e2e")
BEFORE_FIRST_TOKEN = ("admit", "route", "reserve", "prefill_queue", "prefill")
"""Stages that follow one another until the first token exists; the rest of the TTFT is `stream`."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """`n` samples, at least one. In a metric where low is bad the percentiles count from above."""

    n: int
    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    title: str
    unit: str
    low_is_bad: bool
    values: Distribution | None


@dataclass(frozen=True, slots=True)
class HandOver:
    """What moving the KV took. `bytes_by_path` includes `local`: requests that moved none."""

    requests_by_path: Mapping[str, int]
    bytes_by_path: Mapping[str, int]
    transfer_ms: Distribution | None
    swap_in_ms: Distribution | None
    second_token_ms: Distribution | None
    kv_bytes: Distribution | None
    transfer_gb_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every limit, among all that were attempted."""

    limits_ms: Mapping[str, float]
    met: int
    attempted: int
    per_second: float


@dataclass(frozen=True, slots=True)
class FailureGroup:
    kind: str
    count: int
    first: str


@dataclass(frozen=True, slots=True)
class Sending:
    """How well the client kept its own schedule."""

    asked_rate: float
    achieved_rate: float | None
    late_mean_ms: float
    late_max_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    attempted: int
    successful: int
    failed: int
    interrupted: int
    partial: bool
    """The run was ended early."""
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    metrics: tuple[Metric, ...]
    ttft_parts: Mapping[str, Distribution]
    hand_over: HandOver
    failures: tuple[FailureGroup, ...]
    goodput: Goodput | None
    sending: Sending | None
    tokens_per_chunk: float | None
    without_usage: int
    client_cores: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of sorted samples, linear between neighbours."""
    at = (len(ordered) - 1) * q / 100.0
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def distribution(samples: Iterable[float], *, low_is_bad: bool = False) -> Distribution | None:
    """None without samples. With `low_is_bad`, P99 is the value that 99 % of the samples exceed."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return Distribution(
        n=len(ordered),
        mean=statistics.fmean(ordered),
        median=percentile(ordered, 50.0),
        std=statistics.pstdev(ordered),
        percentiles={q: percentile(ordered, 100.0 - q if low_is_bad else q) for q in PERCENTILES},
    )


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:300,tpot:30` to milliseconds per key. Commas or spaces separate."""
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        key, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if key not in GOODPUT_KEYS or not 0 < limit < math.inf:
            raise UsageError(
                f"--goodput {part}: expected KEY:MILLISECONDS with KEY {', '.join(GOODPUT_KEYS)}",
                hint="--goodput ttft:300,tpot:30",
            )
        limits[key] = limit
    if not limits:
        raise UsageError("--goodput: empty", hint="--goodput ttft:300,tpot:30")
    return limits


def summarize(
    run: Run, *, asked_rate: float = math.inf, goodput: Mapping[str, float] | None = None
) -> Summary:
    ok = [o for o in run.outcomes if o.failure is None]
    input_tokens = sum(o.prompt_tokens or 0 for o in ok)
    output_tokens = sum(o.output_tokens or 0 for o in ok)
    seconds = run.duration_s
    return Summary(
        attempted=run.attempted,
        successful=len(ok),
        failed=len(run.outcomes) - len(ok),
        interrupted=run.interrupted,
        partial=run.stopped,
        duration_s=seconds,
        input_tokens=input_tokens,
        cached_tokens=sum(o.served.cached_tokens for o in ok if o.served),
        output_tokens=output_tokens,
        request_throughput=len(ok) / seconds,
        output_throughput=output_tokens / seconds,
        total_throughput=(input_tokens + output_tokens) / seconds,
        metrics=_metrics(ok),
        ttft_parts=_ttft_parts(ok),
        hand_over=_hand_over(ok),
        failures=_failures(run.outcomes),
        goodput=_goodput(ok, run, goodput) if goodput else None,
        sending=_sending(run, asked_rate),
        tokens_per_chunk=_tokens_per_chunk(ok),
        without_usage=sum(o.output_tokens is None for o in ok),
        client_cores=run.client_cpu_s / seconds,
    )


def _metrics(ok: Sequence[Outcome]) -> tuple[Metric, ...]:
    tpots = [o.tpot_s for o in ok]

    def ms(key: str, title: str, samples: Iterable[float | None]) -> Metric:
        values = distribution(1e3 * s for s in samples if s is not None)
        return Metric(key, title, "ms", False, values)

    speed = distribution((1.0 / t for t in tpots if t), low_is_bad=True)
    return (
        Metric("decode", "Decode", "tok/s", True, speed),
        ms("ttft", "TTFT", (o.ttft_s for o in ok)),
        ms("s_ttft", "S_TTFT", (o.served.ttft_s for o in ok if o.served)),
        ms("tpot", "TPOT", tpots),
        ms("itl", "ITL", (gap for o in ok for gap in o.gaps_s)),
        ms("e2e", "E2E", (o.e2e_s for o in ok)),
    )


def _ttft_parts(ok: Sequence[Outcome]) -> dict[str, Distribution]:
    """The client's TTFT by stage. Only requests whose server said its stages take part."""
    parts: dict[str, list[float]] = {}
    for o in ok:
        if o.served is None or o.ttft_s is None or not o.served.stages:
            continue
        stages, router = o.served.stages, o.router_s
        taken = {
            s: stages.get(s, 0.0) + router.get(s, 0.0)  # both admit the request
            for s in BEFORE_FIRST_TOKEN
            if s in stages or s in router
        }
        for stage, seconds in taken.items():
            parts.setdefault(stage, []).append(1e3 * seconds)
        parts.setdefault("stream", []).append(1e3 * (o.ttft_s - sum(taken.values())))
    found = {stage: distribution(parts.get(stage, ())) for stage in (*BEFORE_FIRST_TOKEN, "stream")}
    return {stage: d for stage, d in found.items() if d is not None}


def _hand_over(ok: Sequence[Outcome]) -> HandOver:
    requests: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    moved: list[tuple[Outcome, Mapping[str, float], int]] = []
    for o in ok:
        if o.served is None or not o.served.path:
            continue
        requests[o.served.path] = requests.get(o.served.path, 0) + 1
        nbytes[o.served.path] = nbytes.get(o.served.path, 0) + o.served.kv_bytes
        if o.served.kv_bytes > 0:
            moved.append((o, o.served.stages, o.served.kv_bytes))

    def stage(name: str) -> Distribution | None:
        return distribution(1e3 * stages[name] for _, stages, _ in moved if name in stages)

    return HandOver(
        requests_by_path=requests,
        bytes_by_path=nbytes,
        transfer_ms=stage("transfer"),
        swap_in_ms=stage("swap_in"),
        second_token_ms=distribution(1e3 * o.gaps_s[0] for o, _, _ in moved if o.gaps_s),
        kv_bytes=distribution(float(n) for _, _, n in moved),
        transfer_gb_s=distribution(
            (n / t / 1e9 for _, stages, n in moved if (t := stages.get("transfer", 0.0)) > 0),
            low_is_bad=True,
        ),
    )


def _failures(outcomes: Sequence[Outcome]) -> tuple[FailureGroup, ...]:
    first: dict[str, str] = {}
    count: dict[str, int] = {}
    for o in outcomes:
        if o.failure is not None:
            first.setdefault(o.failure.kind, o.failure.message)
            count[o.failure.kind] = count.get(o.failure.kind, 0) + 1
    kinds = sorted(count, key=lambda k: (-count[k], k))
    return tuple(FailureGroup(kind, count[kind], first[kind]) for kind in kinds)


def _goodput(ok: Sequence[Outcome], run: Run, limits: Mapping[str, float]) -> Goodput:
    met = sum(
        all(s is None or 1e3 * s <= limits[key] for key, s in _timed(o) if key in limits)
        for o in ok
    )
    return Goodput(dict(limits), met, run.attempted, met / run.duration_s)


def _timed(o: Outcome) -> tuple[tuple[str, float | None], ...]:
    return (("ttft", o.ttft_s), ("tpot", o.tpot_s), ("e2e", o.e2e_s))


def _sending(run: Run, asked_rate: float) -> Sending | None:
    """None without an asked rate: then nothing is late."""
    if math.isinf(asked_rate) or not run.outcomes:
        return None
    started = sorted(o.started_s for o in run.outcomes)
    late = [1e3 * (o.started_s - o.scheduled_s) for o in run.outcomes]
    span = started[-1] - started[0]
    achieved = (len(started) - 1) / span if span > 0 else None
    return Sending(asked_rate, achieved, statistics.fmean(late), max(late))


def _tokens_per_chunk(ok: Sequence[Outcome]) -> float | None:
    counted = [(o.output_tokens, len(o.arrivals_s)) for o in ok if o.output_tokens is not None]
    chunks = sum(c for _, c in counted)
    return sum(t for t, _ in counted) / chunks if chunks else None

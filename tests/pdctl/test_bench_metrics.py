"""The metrics, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.bench.load import Run
from pdctl.bench.metrics import (
    PERCENTILES,
    Metric,
    Summary,
    distribution,
    parse_goodput,
    percentile,
    summarize,
)
from pdctl.bench.outcome import Failure, Outcome, Served
from pdctl.errors import UsageError


def _outcome(
    index: int = 0,
    *,
    start: float = 0.0,
    arrivals: tuple[float, ...] = (0.5, 0.6, 0.7),
    end: float = 0.75,
    tokens: int | None = 3,
    served: Served | None = None,
    failure: Failure | None = None,
    router: dict[str, float] | None = None,
    scheduled: float = 0.0,
) -> Outcome:
    return Outcome(
        index=index,
        scheduled_s=scheduled,
        started_s=start,
        ended_s=end,
        arrivals_s=arrivals,
        prompt_tokens=100,
        output_tokens=tokens,
        served=served,
        router_s=router or {},
        failure=failure,
    )


def _run(*outcomes: Outcome, duration: float = 2.0, attempted: int | None = None) -> Run:
    n = len(outcomes) if attempted is None else attempted
    return Run(outcomes, duration, n, n, client_cpu_s=0.1, stopped=n > len(outcomes))


def _metric(summary: Summary, key: str) -> Metric:
    return next(m for m in summary.metrics if m.key == key)


def _mean(summary: Summary, key: str) -> float:
    values = _metric(summary, key).values
    assert values is not None
    return values.mean


def test_percentiles_are_linear_between_samples() -> None:
    samples = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert percentile(samples, 0) == 10
    assert percentile(samples, 50) == 30
    assert percentile(samples, 80) == pytest.approx(42.0)  # at 3.2: 40 + 0.2 * 10
    assert percentile(samples, 99.9) == pytest.approx(49.96)  # at 3.996
    assert percentile(samples, 100) == 50
    assert percentile([7.0], 99.99) == 7.0


def test_low_is_bad_counts_percentiles_from_the_slow_end() -> None:
    speeds = [float(v) for v in range(1, 101)]  # one stream at 1 tok/s, the best at 100
    d = distribution(speeds, low_is_bad=True)
    assert d is not None
    assert d.percentiles[99.0] == pytest.approx(1.99)  # the slow 1 %, not 99.01
    assert d.percentiles[80.0] == pytest.approx(20.8)
    assert d.mean == pytest.approx(50.5)
    assert d.median == pytest.approx(50.5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_ordered_and_within_the_samples(samples: list[float]) -> None:
    up, down = distribution(samples), distribution(samples, low_is_bad=True)
    assert up is not None and down is not None
    rising = [up.percentiles[q] for q in PERCENTILES]
    falling = [down.percentiles[q] for q in PERCENTILES]
    slack = 1e-9 * (1 + max(samples))
    assert all(b >= a - slack for a, b in itertools.pairwise(rising))
    assert all(b <= a + slack for a, b in itertools.pairwise(falling))
    assert min(samples) - slack <= falling[-1] and rising[-1] <= max(samples) + slack
    assert up.median == pytest.approx(statistics.median(samples))


def test_times_of_one_request() -> None:
    s = summarize(_run(_outcome(start=0.2, arrivals=(0.5, 0.6, 0.9), end=1.0)))
    assert _mean(s, "ttft") == pytest.approx(300.0)
    assert _mean(s, "tpot") == pytest.approx(200.0)  # 400 ms over two tokens after the first
    assert _mean(s, "decode") == pytest.approx(5.0)
    assert _mean(s, "e2e") == pytest.approx(800.0)
    itl = _metric(s, "itl").values
    assert itl is not None and itl.n == 2 and itl.mean == pytest.approx(200.0)
    assert s.request_throughput == pytest.approx(0.5)
    assert s.output_throughput == pytest.approx(1.5)
    assert s.total_throughput == pytest.approx(51.5)


def test_tpot_counts_tokens_not_arrivals() -> None:
    """Nine tokens in three arrivals: eight of them after the first."""
    s = summarize(_run(_outcome(arrivals=(0.1, 0.5, 0.9), tokens=9)))
    assert _mean(s, "tpot") == pytest.approx(100.0)
    assert s.tokens_per_chunk == pytest.approx(3.0)


def test_no_samples_is_none_never_zero() -> None:
    s = summarize(_run(_outcome(arrivals=(0.5,), tokens=1)))
    for key in ("decode", "tpot", "itl", "s_ttft"):
        assert _metric(s, key).values is None
    assert _mean(s, "ttft") == pytest.approx(500.0)


def test_an_answer_without_usage_has_no_tpot_and_is_told() -> None:
    s = summarize(_run(_outcome(tokens=None)))
    assert _metric(s, "tpot").values is None
    assert s.without_usage == 1
    assert s.output_tokens == 0


def test_failures_are_grouped_and_in_no_metric() -> None:
    outcomes = [
        _outcome(0),
        _outcome(1, failure=Failure("HTTP 503", "full")),
        _outcome(2, arrivals=(5.0,), failure=Failure("stream cut", "ended early")),
        _outcome(3, failure=Failure("HTTP 503", "still full")),
    ]
    s = summarize(_run(*outcomes))
    assert (s.attempted, s.successful, s.failed, s.interrupted) == (4, 1, 3, 0)
    assert [(f.kind, f.count, f.first) for f in s.failures] == [
        ("HTTP 503", 2, "full"),
        ("stream cut", 1, "ended early"),
    ]
    assert s.input_tokens == 100 and s.output_tokens == 3
    ttft = _metric(s, "ttft").values
    assert ttft is not None and ttft.n == 1


def test_goodput_is_over_attempted_requests() -> None:
    outcomes = [
        _outcome(0, arrivals=(0.2, 0.3, 0.4)),
        _outcome(1, arrivals=(0.4, 0.5, 0.6)),  # TTFT 400 ms: too slow
        _outcome(2, arrivals=(0.2, 0.4, 0.6)),  # TPOT 200 ms: too slow
        _outcome(3, arrivals=(0.2,), tokens=1),  # no TPOT to miss
        _outcome(4, failure=Failure("HTTP 503", "full")),
    ]
    limits = parse_goodput("ttft:300,tpot:150")
    g = summarize(_run(*outcomes, attempted=6), goodput=limits).goodput
    assert g is not None
    assert (g.met, g.attempted) == (2, 6)
    assert g.per_second == pytest.approx(1.0)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "itl:3", "ttft:inf", ""])
def test_bad_goodput_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput(text)


def test_goodput_takes_spaces_too() -> None:
    assert parse_goodput("ttft:300 e2e:1e3") == {"ttft": 300.0, "e2e": 1000.0}


def _served(path: str = "shm", kv: int = 1 << 20, **stages: float) -> Served:
    return Served("prefill-0", "decode-0", path, kv, 16, stages, ttft_s=0.4, e2e_s=0.7)


def test_ttft_parts_add_up_to_the_ttft() -> None:
    served = _served(
        admit=0.004, reserve=0.02, prefill_queue=0.03, prefill=0.3, transfer=0.001, decode=0.2
    )
    s = summarize(_run(_outcome(served=served, router={"admit": 0.001, "route": 0.002})))
    means = {stage: d.mean for stage, d in s.ttft_parts.items()}
    assert list(means) == ["admit", "route", "reserve", "prefill_queue", "prefill", "stream"]
    assert means["admit"] == pytest.approx(5.0)  # the router's and the instance's
    assert means["stream"] == pytest.approx(143.0)
    assert sum(means.values()) == pytest.approx(_mean(s, "ttft"))
    assert _mean(s, "s_ttft") == pytest.approx(400.0)
    assert s.cached_tokens == 16


def test_hand_over_by_path() -> None:
    outcomes = [
        _outcome(0, served=_served(transfer=0.001, swap_in=0.002), arrivals=(0.5, 0.56, 0.6)),
        _outcome(1, served=_served(kv=3 << 20, transfer=0.003), arrivals=(0.5, 0.58, 0.6)),
        _outcome(2, served=_served("tcp", 2 << 20, transfer=0.01), arrivals=(0.5,), tokens=1),
        _outcome(3, served=_served("local", 0)),
    ]
    h = summarize(_run(*outcomes)).hand_over
    assert h.requests_by_path == {"shm": 2, "tcp": 1, "local": 1}
    assert h.bytes_by_path == {"shm": 4 << 20, "tcp": 2 << 20, "local": 0}
    assert h.transfer_ms is not None and h.transfer_ms.n == 3
    assert h.swap_in_ms is not None and h.swap_in_ms.mean == pytest.approx(2.0)
    assert h.second_token_ms is not None and h.second_token_ms.mean == pytest.approx(70.0)
    assert h.transfer_gb_s is not None and h.transfer_gb_s.n == 3
    assert h.transfer_gb_s.percentiles[99.99] == pytest.approx((2 << 20) / 0.01 / 1e9, rel=1e-3)


def test_mixed_only_moves_nothing_and_says_so() -> None:
    h = summarize(_run(_outcome(served=_served("local", 0)))).hand_over
    assert h.kv_bytes is None and h.transfer_ms is None
    assert h.requests_by_path == {"local": 1}


def test_asked_and_achieved_rate() -> None:
    outcomes = [
        _outcome(i, start=i * 0.5 + 0.01 * i, scheduled=i * 0.5, arrivals=(9.0,)) for i in range(5)
    ]
    sending = summarize(_run(*outcomes), asked_rate=2.0).sending
    assert sending is not None
    assert sending.achieved_rate == pytest.approx(4 / 2.04)
    assert sending.late_max_ms == pytest.approx(40.0)
    assert sending.late_mean_ms == pytest.approx(20.0)
    assert summarize(_run(*outcomes), asked_rate=math.inf).sending is None

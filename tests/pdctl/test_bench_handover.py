"""The hand-over benchmark's arithmetic: what a stream gives, and when it dares a verdict."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pdctl.bench.outcome import Failure, Outcome, Served

SCRIPT = Path(__file__).parents[1] / "bench" / "handover.py"


@pytest.fixture(scope="module")
def handover() -> ModuleType:
    spec = importlib.util.spec_from_file_location("handover_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _outcome(
    arrivals: tuple[float, ...], *, path: str = "shm", failure: Failure | None = None
) -> Outcome:
    stages = {"transfer": 0.001, "swap_in": 0.002, "prefill": 0.9}
    served = Served("prefill-0", "decode-0", path, 45 << 20, 0, stages, 0.9, 2.0)
    return Outcome(
        index=0,
        scheduled_s=0.0,
        started_s=0.0,
        ended_s=arrivals[-1] if arrivals else 0.0,
        arrivals_s=arrivals,
        output_tokens=5,
        served=served,
        failure=failure,
    )


def _side(handover: ModuleType, costs_ms: list[float], path: str = "shm") -> object:
    side = handover.Side("pd-shm", "http://h")
    for number, cost in enumerate(costs_ms):
        second = 1.0 + 0.020 + cost / 1e3
        arrivals = (1.0, second, second + 0.02, second + 0.04, second + 0.06)
        side.alone[number] = handover.sample(_outcome(arrivals, path=path))
    return side


def test_one_stream(handover: ModuleType) -> None:
    s = handover.sample(_outcome((1.0, 1.05, 1.07, 1.09, 1.15)))
    assert s.ttft == pytest.approx(1000)
    assert s.second == pytest.approx(50)
    assert s.step == pytest.approx(20)  # the median of 20, 20 and 60
    assert s.cost == pytest.approx(30)
    assert (s.transfer, s.swap_in, s.kv_mib) == (1.0, 2.0, 45.0)


def test_a_failed_or_merged_stream_has_no_numbers(handover: ModuleType) -> None:
    side, into = handover.Side("mixed", "http://h"), dict[int, object]()
    handover.take(side, 0, _outcome((1.0,), failure=Failure("stream cut", "gone")), into)
    handover.take(side, 1, _outcome((1.0, 1.1)), into)
    assert (side.failures, side.merged, into) == (["stream cut: gone"], 1, {})


def test_ttft_is_compared_over_equal_prompts(handover: ModuleType) -> None:
    side, mixed = _side(handover, [1.0, 1.0]), handover.Side("mixed", "http://h")
    mixed.alone[1] = handover.sample(_outcome((0.5, 0.6, 0.7, 0.8, 0.9)))
    assert "TTFT(pd-shm) / TTFT(mixed): 2.000" in "\n".join(handover.report([side, mixed]))


@pytest.mark.parametrize(
    ("costs", "word"),
    [
        ([1.0, 2.0, 1.5, 1.2, 1.8], "met"),
        ([9.0, 9.5, 8.8, 9.1, 9.2], "NOT met"),
        ([-200.0, 150.0, 3.0, -90.0, 120.0], "too few or too noisy to tell"),
        ([2.0, 2.1], "too few or too noisy to tell"),
    ],
)
def test_the_verdict(handover: ModuleType, costs: list[float], word: str) -> None:
    (line,) = handover.verdict(_side(handover, costs))
    assert line.endswith(f"target <= 2 ms: {word}")


def test_no_verdict_over_another_path(handover: ModuleType) -> None:
    (line,) = handover.verdict(_side(handover, [1.0] * 6, path="tcp"))
    assert "KV went by tcp" in line


def test_several_in_flight_are_reported_by_percentiles(handover: ModuleType) -> None:
    side = _side(handover, [1.0, 2.0, 3.0])
    assert handover.crowded(side) == []
    side.crowd = side.alone  # type: ignore[attr-defined]
    (line,) = handover.crowded(side)
    assert "P50 / P99 of gap - one step 2.00 / " in line and "(3 requests)" in line

"""The table's layout, the JSON document, and the words that explain both."""

from __future__ import annotations

import json
from pathlib import Path

from pdctl.bench.explain import TEXT
from pdctl.bench.load import Run
from pdctl.bench.metrics import parse_goodput, summarize
from pdctl.bench.outcome import Failure, Outcome, Served
from pdctl.bench.report import SCHEMA, document, notes, table

DOCS = Path(__file__).parents[2] / "docs" / "bench.md"


def _outcome(index: int, failure: Failure | None = None, tokens: int = 5) -> Outcome:
    stages = {"reserve": 0.001, "prefill": 0.2, "transfer": 0.0005, "swap_in": 0.002}
    return Outcome(
        index=index,
        scheduled_s=0.0,
        started_s=0.0,
        ended_s=0.5,
        arrivals_s=tuple(0.25 + 0.05 * i for i in range(tokens)),
        prompt_tokens=64,
        output_tokens=tokens,
        served=Served("prefill-0", "decode-0", "shm", 2 << 20, 0, stages, 0.22, 0.45),
        router_s={"admit": 0.0002, "route": 0.0001},
        failure=failure,
    )


def _run(*outcomes: Outcome, interrupted: int = 0) -> Run:
    n = len(outcomes) + interrupted
    return Run(outcomes, 2.0, n, n, client_cpu_s=0.1, stopped=interrupted > 0)


def test_the_table_has_the_reference_layout() -> None:
    lines = table(summarize(_run(_outcome(0), _outcome(1)))).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1:9] == [
        "Successful requests:                     2",
        "Failed requests:                         0",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      128",
        "Cached input tokens:                     0",
        "Total generated tokens:                  10",
        "Request throughput (req/s):              1.00",
        "Output token throughput (tok/s):         5.00",
    ]
    at = lines.index("---------------------- TTFT ----------------------")
    assert lines[at + 1 : at + 9] == [
        "Mean TTFT (ms):                          250.00",
        "Median TTFT (ms):                        250.00",
        "P80 TTFT (ms):                           250.00",
        "P95 TTFT (ms):                           250.00",
        "P99 TTFT (ms):                           250.00",
        "P99.9 TTFT (ms):                         250.00",
        "P99.95 TTFT (ms):                        250.00",
        "P99.99 TTFT (ms):                        250.00",
    ]
    assert "--------- Decode speed (P99: slowest 1%) ---------" in lines
    assert "Mean Decode (tok/s):                     20.00" in lines
    assert "prefill               200.00     200.00     200.00" in lines
    assert "stream                 48.70      48.70      48.70" in lines
    assert "KV by shm (MiB):                         4.0 in 2" in lines
    report = [line for line in lines if not line.startswith(("note", "FAILED"))]
    assert max(map(len, report)) <= 50
    assert report[-1] == "=" * 50


def test_without_samples_there_is_a_dash_not_a_zero() -> None:
    run = _run(_outcome(0, Failure("HTTP 503", "full")), _outcome(1, Failure("HTTP 503", "no")))
    lines = table(summarize(run)).splitlines()
    assert "Failed requests:                         2" in lines
    for name in ("Mean TTFT (ms)", "P99 Decode (tok/s)", "Request throughput (req/s)"):
        assert f"{name + ':':<40} -" in lines
    assert "Total generated tokens:                  -" in lines
    assert lines[-1] == "FAILED 2 x HTTP 503, the first: full"


def test_small_numbers_are_not_rounded_to_zero() -> None:
    quick = Outcome(0, 0.0, 0.0, 0.5, (0.000_003, 0.2), 64, 2)
    lines = table(summarize(_run(quick))).splitlines()
    assert "Mean TTFT (ms):                          0.003" in lines


def test_a_partial_report_says_so() -> None:
    lines = table(summarize(_run(_outcome(0), interrupted=3))).splitlines()
    assert lines[1] == "PARTIAL: interrupted, completed requests only"
    assert "Interrupted requests:                    3" in lines


def test_notes_tell_what_the_numbers_cannot() -> None:
    merged = summarize(_run(*(_outcome(i, tokens=5) for i in range(4))))
    assert notes(merged) == ["4 samples: percentiles beyond P75 are the worst one"]
    one = _outcome(0)
    held = Outcome(
        index=0,
        scheduled_s=0,
        started_s=0,
        ended_s=1,
        arrivals_s=one.arrivals_s,
        prompt_tokens=5,
        output_tokens=20,
    )
    found = notes(summarize(Run((held,), 1.0, 1, 1, client_cpu_s=0.95)))
    assert any("arrivals held 4.00 tokens" in note for note in found)
    assert any("0.95 of a core" in note for note in found)


def test_the_document_is_json_with_a_schema() -> None:
    outcomes = (_outcome(1, Failure("stream cut", "gone")), _outcome(0))
    run = _run(*outcomes)
    summary = summarize(run, asked_rate=4.0, goodput=parse_goodput("ttft:300"))
    doc = document(
        summary,
        outcomes,
        versions={"pdctl": "0"},
        arguments={"seed": 0},
        target={"endpoint": "http://h"},
        started_at="2026-01-01T00:00:00+00:00",
    )
    again = json.loads(json.dumps(doc, allow_nan=False))
    assert again["schema"] == SCHEMA == "pdctl.bench/1"
    assert again["requests"] == {"attempted": 2, "successful": 1, "failed": 1, "interrupted": 0}
    assert again["failures"] == [{"kind": "stream cut", "count": 1, "first": "gone"}]
    assert again["metrics"]["ttft"]["values"]["p99.95"] == 250.0
    assert again["metrics"]["decode"]["low_is_bad"] is True
    assert again["goodput"] == {
        "limits_ms": {"ttft": 300.0},
        "met": 1,
        "attempted": 2,
        "requests_per_s": 0.5,
    }
    assert again["hand_over"]["bytes_by_path"] == {"shm": 2 << 20}
    assert [r["index"] for r in again["per_request"]] == [0, 1]
    assert again["per_request"][1]["error"] == "stream cut: gone"
    assert again["partial"] is False


def test_the_explanation_covers_every_number_of_the_table() -> None:
    summary = summarize(_run(_outcome(0)), goodput={"ttft": 300.0})
    words = {m.title for m in summary.metrics} | set(summary.ttft_parts)
    words |= {"transfer", "swap_in", "goodput", "attempted", "successful", "failed"}
    assert {word for word in words if word not in TEXT} == set()
    assert max(map(len, TEXT.splitlines())) <= 100


def test_the_documentation_quotes_the_explanation() -> None:
    assert f"```text\n{TEXT}```\n" in DOCS.read_text()

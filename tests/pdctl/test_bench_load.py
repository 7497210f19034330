"""One request and whole runs, against a scripted server on loopback."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from bench_server import (
    DONE,
    MODEL,
    Action,
    Cut,
    Pause,
    Refuse,
    Script,
    answer,
    serve,
    sse,
    text,
    tokens,
    usage,
)

from pdctl.bench import client, load
from pdctl.bench.client import Target, normalize, open_session, server_timing
from pdctl.bench.dataset import Prompt, chat_prompt, token_prompt
from pdctl.bench.load import Load, Run, arrivals
from pdctl.bench.outcome import Outcome
from pdctl.errors import PdctlError, UsageError

PROMPT = token_prompt([1, 2, 3], 8)


def _ask(
    script: Script | Sequence[Action], prompt: Prompt = PROMPT, timeout_s: float = 10.0
) -> Outcome:
    """The outcome of one request to a server that plays the script."""

    async def go(url: str) -> Outcome:
        async with open_session(timeout_s) as session:
            return await client.request(session, Target(url, "toy"), prompt, ignore_eos=True)

    with serve(script if callable(script) else lambda number, body: script) as server:
        return asyncio.run(go(server.url))


def _run(
    script: Script, prompts: Sequence[Prompt], how: Load, stop_after: int | None = None
) -> tuple[Run, int]:
    """A whole run; with `stop_after`, stopped after that many outcomes. And the most at once."""

    async def go(url: str) -> Run:
        stop = asyncio.Event()
        seen: list[Outcome] = []

        def on_done(outcome: Outcome) -> None:
            seen.append(outcome)
            if len(seen) == stop_after:
                stop.set()

        async with open_session(20.0) as session:
            target = Target(url, "toy")
            return await load.run(session, target, prompts, how, on_done=on_done, stop=stop)

    with serve(script) as server:
        return asyncio.run(go(server.url)), server.most_active


def test_a_good_answer() -> None:
    served = {
        "prefill": "prefill-0",
        "decode": "decode-0",
        "path": "shm",
        "kv_bytes": 4096,
        "cached_tokens": 2,
        "stages": {"prefill": 0.25},
        "ttft_s": 0.3,
        "e2e_s": 0.5,
    }
    o = _ask(answer(4, prompt=7, gap_s=0.03, **served))
    assert o.failure is None
    assert (o.prompt_tokens, o.output_tokens, len(o.arrivals_s)) == (7, 4, 4)
    assert all(gap == pytest.approx(0.03, abs=0.025) for gap in o.gaps_s)
    assert o.served is not None
    assert (o.served.path, o.served.kv_bytes, o.served.cached_tokens) == ("shm", 4096, 2)
    assert o.served.stages == {"prefill": 0.25} and o.served.ttft_s == 0.3
    assert o.router_s == {"admit": 0.0015, "route": 0.0005}


def test_the_request_asks_for_a_stream_with_usage() -> None:
    bodies: list[dict[str, Any]] = []

    def script(number: int, body: dict[str, Any]) -> list[Action]:
        bodies.append(body)
        return answer(1)

    _ask(script)
    assert bodies == [
        {
            "prompt": [1, 2, 3],
            "model": "toy",
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_chunks_split_anywhere_count_the_same() -> None:
    whole = b"".join(a for a in answer(5) if isinstance(a, bytes))
    pieces: list[Action] = []
    for i in range(0, len(whole), 7):
        pieces += [whole[i : i + 7], Pause(0.001)]
    o = _ask(pieces)
    assert o.failure is None and o.output_tokens == 5
    assert len(o.arrivals_s) == 5


def test_what_arrives_together_is_one_arrival() -> None:
    together = text("a") + text("b") + text("c")
    o = _ask([text("x"), Pause(0.05), together, text("d", "stop"), usage(3, 5), DONE])
    assert o.failure is None and o.output_tokens == 5
    assert 2 <= len(o.arrivals_s) <= 3
    assert o.gaps_s[0] > 0.03


def test_a_role_chunk_is_not_the_first_output() -> None:
    role = sse({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    piece = sse({"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]})
    last = sse({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    prompt = chat_prompt([{"role": "user", "content": "hello"}], 4)
    o = _ask([role, Pause(0.1), piece, last, usage(3, 1), DONE], prompt)
    assert o.failure is None
    assert o.ttft_s is not None and o.ttft_s > 0.09
    assert len(o.arrivals_s) == 1


def test_half_a_character_is_a_token_when_the_endpoint_tells() -> None:
    """Two tokens make one character: the first has no text yet, and is the first output."""
    o = _ask([tokens([7], ""), Pause(0.1), tokens([8], "é", "length"), usage(3, 2), DONE])
    assert o.failure is None
    assert o.ttft_s is not None and o.ttft_s < 0.09
    assert len(o.arrivals_s) == 2


BROKEN = {"error": {"message": "decode-0 died", "type": "leg"}}


@pytest.mark.parametrize(
    ("actions", "kind", "words"),
    [
        ([Refuse(503, "no healthy pair")], "HTTP 503", "no healthy pair"),
        ([text("a"), sse(BROKEN, event="error")], "stream error", "decode-0 died"),
        ([text("a"), sse(BROKEN)], "stream error", "decode-0 died"),
        ([text("a"), sse("bye", event="error"), DONE], "stream error", "bye"),
        ([text("a"), text("b", "stop"), sse(BROKEN), DONE], "stream error", "decode-0 died"),
        ([text("a"), sse(BROKEN), Pause(0.05), Cut()], "stream error", "decode-0 died"),
        ([text("a"), Pause(0.05), Cut()], "stream cut", ""),
        ([text("a"), text("b")], "stream cut", "without a finish reason"),
        ([text("a"), DONE], "stream cut", "without a finish reason"),
        ([text("a"), text("b", "stop")], "stream cut", "without [DONE]"),
        ([text("", "stop"), usage(3, 0), DONE], "empty output", "nothing"),
        ([text("a"), sse("{nonsense"), text("b", "stop"), DONE], "malformed chunk", "{nonsense"),
        ([], "stream cut", "without a finish reason"),
        ([Cut()], "connection", ""),
    ],
)
def test_what_counts_as_failed(actions: list[Action], kind: str, words: str) -> None:
    o = _ask(actions)
    assert o.failure is not None
    assert o.failure.kind == kind
    assert words in o.failure.message


def test_a_stream_that_stalls_times_out() -> None:
    o = _ask([text("a"), Pause(5.0)], timeout_s=0.3)
    assert o.failure is not None and o.failure.kind == "timeout"
    assert o.e2e_s < 2.0


def test_nobody_listening() -> None:
    async def go() -> Outcome:
        async with open_session(5.0) as session:
            return await client.request(session, Target("http://127.0.0.1:9", "toy"), PROMPT)

    o = asyncio.run(go())
    assert o.failure is not None
    assert o.failure.kind == "connection" and "refused" in o.failure.message.lower()


def test_our_own_endpoints_are_asked_for_token_ids() -> None:
    async def go(url: str) -> None:
        async with open_session(5.0) as session:
            target = await client.look(session, url, None)
            await client.request(session, target, PROMPT)

    for owner, asked in (("pdctl", True), ("someone", None)):
        with serve(lambda number, body: answer(1), MODEL | {"owned_by": owner}) as server:
            asyncio.run(go(server.url))
        assert server.bodies[0].get("return_token_ids") is asked


def test_looking_at_an_endpoint() -> None:
    async def go(url: str, model: str | None) -> Target:
        async with open_session(5.0) as session:
            return await client.look(session, url, model)

    with serve(lambda number, body: []) as server:
        assert asyncio.run(go(server.url + "/v1/", None)) == Target(server.url, "toy", 4096, 1000)
        with pytest.raises(UsageError, match="does not serve the model gpt"):
            asyncio.run(go(server.url, "gpt"))
        with pytest.raises(PdctlError, match="HTTP 404"):
            asyncio.run(go(server.url + "/nowhere", None))
    with pytest.raises(PdctlError, match="refused"):
        asyncio.run(go("127.0.0.1:9", None))


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("https://h/v1/", "https://h"),
    ],
)
def test_endpoints_as_people_type_them(typed: str, url: str) -> None:
    assert normalize(typed) == url


def test_server_timing() -> None:
    headers = ["admit;dur=1.5, route;dur=0.5;desc=x", 'a;desc="q", b;dur=oops, c;dur="2"']
    assert server_timing(headers) == {"admit": 0.0015, "route": 0.0005, "c": 0.002}
    assert server_timing([]) == {}


def test_every_request_has_one_outcome_and_the_limit_holds() -> None:
    def script(number: int, body: dict[str, Any]) -> list[Action]:
        return [Refuse(503, "full")] if number % 5 == 4 else answer(3, gap_s=0.005)

    prompts = [token_prompt([i], 4) for i in range(30)]
    run, most = _run(script, prompts, Load(max_concurrency=4))
    assert sorted(o.index for o in run.outcomes) == list(range(30))
    assert sum(o.failure is not None for o in run.outcomes) == 6
    assert most == 4
    assert (run.attempted, run.interrupted, run.stopped) == (30, 0, False)
    assert run.duration_s >= max(o.ended_s for o in run.outcomes)


def test_without_a_limit_all_are_sent_at_once() -> None:
    prompts = [token_prompt([i], 4) for i in range(20)]
    _, most = _run(lambda number, body: answer(2, gap_s=0.5), prompts, Load())
    assert most == 20


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Answers take far longer than the gaps: all the same, sending keeps to the schedule."""
    prompts = [token_prompt([i], 4) for i in range(20)]
    how = Load(rate=100.0)
    run, _ = _run(lambda number, body: answer(2, gap_s=0.5), prompts, how)
    assert len(run.outcomes) == 20
    late = [o.started_s - o.scheduled_s for o in run.outcomes]
    assert statistics.median(late) < 0.1
    assert [o.scheduled_s for o in sorted(run.outcomes, key=lambda o: o.index)] == arrivals(20, how)


def test_stopping_keeps_what_is_done() -> None:
    def script(number: int, body: dict[str, Any]) -> list[Action]:
        return answer(2) if number < 3 else [text("a"), Pause(30.0)]

    prompts = [token_prompt([i], 4) for i in range(50)]
    run, _ = _run(script, prompts, Load(max_concurrency=5), stop_after=3)
    assert len(run.outcomes) == 3 and all(o.failure is None for o in run.outcomes)
    assert run.stopped and 0 < run.interrupted <= 5
    assert run.duration_s < 5.0


def test_arrivals_have_the_asked_mean_and_spread() -> None:
    n = 20_000
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(n, Load(rate=50.0, burstiness=burstiness))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = statistics.fmean(gaps)
        assert times[0] == 0.0 and min(gaps) >= 0.0
        assert mean == pytest.approx(1 / 50, rel=0.06)
        variation = statistics.pstdev(gaps) / mean
        assert variation == pytest.approx(burstiness**-0.5, rel=0.06)


def test_arrivals_follow_the_seed() -> None:
    assert arrivals(50, Load(rate=5, seed=1)) == arrivals(50, Load(rate=5, seed=1))
    assert arrivals(50, Load(rate=5, seed=1)) != arrivals(50, Load(rate=5, seed=2))
    assert arrivals(3, Load()) == [0.0, 0.0, 0.0]

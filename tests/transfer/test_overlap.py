"""What overlaps what, by the order of events: each test holds one side still and sees the other go
on."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import expected
from handoff_lab import Pair, drive, held, prompt

from runtime.protocol import RequestId


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


async def decoding(both: Pair, tokens: tuple[int, ...], **ask: Any) -> RequestId:
    both.decode.engine.pause("decode")
    id_ = both.decode.ask(tokens, **ask)
    await both.decode.until(lambda: both.handoff._requests[id_].resumed)
    both.decode.engine.pause()
    return id_


async def tokens_go_on(both: Pair, id_: RequestId, count: int = 5) -> None:
    seen = len(both.decode.tokens_of(id_))
    await both.decode.until(lambda: len(both.decode.tokens_of(id_)) >= seen + count)


def test_blocks_leave_and_are_swapped_in_while_later_chunks_compute(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill_after_first")
        id_ = both.decode.ask(prompt(40))
        request = both.handoff._requests[id_]
        await both.decode.until(lambda: request.landing.copied == 2)
        # The first chunk is in the device pool; the second is not computed, no token is sampled.
        [outgoing] = both.prefill.role._handoff._by_engine_id.values()  # type: ignore[attr-defined]
        assert (outgoing.put, outgoing.computed_at) == (2, 0.0)
        assert request.first is None and request.ready is None
        assert both.decode.tokens_of(id_) == []
        both.prefill.engine.pause()
        await both.decode.answer(id_)
        assert both.decode.tokens_of(id_) == expected(prompt(40), 4)

    drive(kind, scenario)


def test_the_first_token_is_streamed_while_blocks_are_on_their_way(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        [session] = both.prefill.role._handoff._sessions.values()  # type: ignore[attr-defined]
        with held(session.lane):
            id_ = both.decode.ask(prompt(40))
            await both.decode.until(lambda: both.decode.tokens_of(id_))
            assert both.handoff._requests[id_].landing.landed == 0
        await both.decode.answer(id_)
        assert both.decode.tokens_of(id_) == expected(prompt(40), 4)

    drive(kind, scenario)


def test_others_decode_while_a_request_is_swapped_in(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        running = await decoding(both, prompt(8), max_tokens=10_000)
        with held(both.handoff._swap._lane) as begun:
            coming = both.decode.ask(prompt(40, seed=1))
            await both.decode.until(begun.is_set)
            await tokens_go_on(both, running)
            assert both.handoff._requests[coming].landing.copied == 0
        await both.decode.answer(coming)
        assert both.decode.tokens_of(coming) == expected(prompt(40, seed=1), 4)
        both.decode.role.abort(running)

    drive(kind, scenario)


def test_others_decode_and_come_in_while_a_request_is_swapped_out() -> None:
    async def scenario(both: Pair) -> None:
        running = await decoding(both, prompt(8), max_tokens=10_000)
        leaving = await decoding(both, prompt(40, seed=1), max_tokens=10_000)
        with held(both.handoff._swap_outs._lane) as begun:
            both.swap_out(leaving)
            await both.decode.until(begun.is_set)
            await tokens_go_on(both, running)
            coming = both.decode.ask(prompt(20, seed=2))
            await both.decode.answer(coming)
            assert not both.handoff._requests[leaving].away_since
        await tokens_go_on(both, leaving)
        both.decode.role.abort(running)
        both.decode.role.abort(leaving)

    drive("shm", scenario)


def test_prefill_computes_the_next_prompt_while_it_puts(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        [session] = both.prefill.role._handoff._sessions.values()  # type: ignore[attr-defined]
        with held(session.lane) as begun:
            first = both.decode.ask(prompt(40))
            await both.decode.until(begun.is_set)
            second = both.decode.ask(prompt(30, seed=1))
            await both.decode.until(lambda: both.decode.tokens_of(second))
            assert both.handoff._requests[first].landing.landed == 0
        for id_, tokens in ((first, prompt(40)), (second, prompt(30, seed=1))):
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(tokens, 4)

    drive(kind, scenario)

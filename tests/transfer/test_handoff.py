"""The hand-over in every state and on every way out, over each transport."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest
from fake_engine import FORBIDDEN_TOKEN, expected
from handoff_lab import BLOCK_BYTES, BLOCK_SIZE, Pair, prompt, start
from handoff_lab import drive as run
from rdma_lab import BUFFERED

from runtime.errors import TOO_LONG
from runtime.protocol import Abort, Failed, Prefill, RequestId, Tokens
from runtime.transfer.decode_request import DecodeRequest
from runtime.transfer.prefill_request import Outgoing


@pytest.fixture(params=BUFFERED)
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


# ---- what is asked for -------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 31, 100])
def test_the_answer_is_that_of_one_engine_and_says_how_it_was_served(
    kind: str, tokens: int
) -> None:
    async def scenario(both: Pair) -> None:
        decode = both.decode
        id_ = decode.ask(prompt(tokens), max_tokens=6)
        last = await decode.answer(id_)
        assert isinstance(last, Tokens) and last.finish == "length"
        assert decode.tokens_of(id_) == expected(prompt(tokens), 6)
        served = last.served
        assert served is not None
        assert (served.prefill, served.decode, served.path) == ("prefill-0", "decode-0", kind)
        assert served.kv_bytes == -(-tokens // BLOCK_SIZE) * BLOCK_BYTES
        assert served.prompt_tokens == tokens
        assert set(served.stages) == {
            "reserve", "prefill_queue", "prefill", "transfer", "swap_in", "decode",
        }  # fmt: skip
        assert all(seconds >= 0 for seconds in served.stages.values())
        first = decode.events_of(id_)[0]
        assert isinstance(first, Tokens) and first.served is not None
        assert set(first.served.stages) == {"reserve", "prefill_queue", "prefill"}
        assert decode.role.counters()["transfers"] == 1
        assert decode.role.counters()[f"kv_bytes_{kind}"] == served.kv_bytes
        assert both.prefill.role.counters()[f"kv_bytes_{kind}"] == served.kv_bytes

    run(kind, scenario)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2), (4, 2), (1, 4)])
def test_kv_reaches_the_ranks_of_instances_of_unequal_size(
    kind: str, sizes: tuple[int, int]
) -> None:
    """The engine fails a request whose KV differs on any rank; it has two KV heads."""

    async def scenario(both: Pair) -> None:
        prompts = [prompt(1 + 11 * n, n) for n in range(6)]
        ids = [both.decode.ask(p, max_tokens=3) for p in prompts]
        for id_, p in zip(ids, prompts, strict=True):
            last = await both.decode.answer(id_)
            assert isinstance(last, Tokens), last
            assert both.decode.tokens_of(id_) == expected(p, 3)
            # Each head crosses once, on however many ranks it is.
            assert last.served is not None
            assert last.served.kv_bytes == -(-len(p) // BLOCK_SIZE) * BLOCK_BYTES

    run(kind, scenario, tp_sizes=sizes)


def test_many_at_once_share_a_small_buffer(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        prompts = [prompt(1 + 7 * n % 60, n) for n in range(60)]
        ids = [both.decode.ask(p, max_tokens=5) for p in prompts]
        for id_, p in zip(ids, prompts, strict=True):
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(p, 5)

    run(kind, scenario, buffer_blocks=20)


def test_one_token_asks_for_no_kv(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        id_ = both.decode.ask(prompt(30), max_tokens=1)
        last = await both.decode.answer(id_)
        assert isinstance(last, Tokens) and last.finish == "length"
        assert both.decode.tokens_of(id_) == expected(prompt(30), 1)
        assert last.served is not None and last.served.kv_bytes == 0

    run(kind, scenario)


def test_the_first_token_does_not_wait_for_device_blocks(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.decode.engine.pause("adopt")
        id_ = both.decode.ask(prompt(20))
        await both.decode.until(lambda: both.decode.tokens_of(id_))
        await both.decode.until(lambda: both.handoff._requests[id_].all_landed)
        assert both.decode.tokens_of(id_) == expected(prompt(20), 1)
        both.decode.engine.pause()
        await both.decode.answer(id_)
        assert both.decode.tokens_of(id_) == expected(prompt(20), 4)

    run(kind, scenario)


# ---- abort and deadline in every state ---------------------------------------------------------


def copied(both: Pair, id_: RequestId) -> int:
    landing = both.handoff._requests[id_].landing
    return landing.copied if landing else 0


async def _waiting(both: Pair, **ask: Any) -> RequestId:
    both.prefill.engine.pause("prefill")
    blocker = both.decode.ask(prompt(64))  # the whole buffer
    id_ = both.decode.ask(prompt(9), **ask)
    await asyncio.sleep(0.02)
    assert both.handoff._requests[id_].landing is None
    both.handoff._loop.call_later(1.0, both.decode.role.abort, blocker)
    return id_


async def _prefilling(both: Pair, **ask: Any) -> RequestId:
    both.prefill.engine.pause("prefill")
    id_ = both.decode.ask(prompt(40), **ask)
    await both.decode.until(lambda: both.prefill.ledger.outgoing == 1)
    return id_


async def _landing(both: Pair, **ask: Any) -> RequestId:
    both.prefill.engine.pause("prefill_after_first")
    id_ = both.decode.ask(prompt(40), **ask)
    await both.decode.until(lambda: copied(both, id_) == 2)
    return id_


async def _first_token(both: Pair, **ask: Any) -> RequestId:
    both.decode.engine.pause("adopt")
    id_ = both.decode.ask(prompt(40), **ask)
    await both.decode.until(lambda: both.handoff._requests[id_].all_landed)
    return id_


async def _decoding(both: Pair, **ask: Any) -> RequestId:
    both.decode.engine.pause("decode")
    id_ = both.decode.ask(prompt(40), **ask)
    await both.decode.until(lambda: both.handoff._requests[id_].resumed)
    return id_


STATES = {
    "waiting": (_waiting, "decode"),
    "prefilling": (_prefilling, "prefill"),
    "landing": (_landing, "prefill"),
    "first_token": (_first_token, "decode"),
    "decoding": (_decoding, "decode"),
}


@pytest.mark.parametrize("state", STATES)
def test_abort(kind: str, state: str) -> None:
    async def scenario(both: Pair) -> None:
        id_ = await STATES[state][0](both)
        both.decode.role.abort(id_)
        last = both.decode.last_of(id_)
        assert isinstance(last, Tokens) and last.finish == "abort"
        both.decode.role.abort(id_)  # a second one finds nothing
        both.prefill.engine.pause()
        both.decode.engine.pause()
        await both.idle()
        assert len([e for e in both.decode.events_of(id_) if e is last]) == 1
        again = both.decode.ask(prompt(64))
        await both.decode.answer(again)
        assert both.decode.tokens_of(again) == expected(prompt(64), 4)

    run(kind, scenario, buffer_blocks=16)


@pytest.mark.parametrize("state", STATES)
def test_deadline(kind: str, state: str) -> None:
    async def scenario(both: Pair) -> None:
        reach, leg = STATES[state]
        id_ = await reach(both, deadline_s=0.4)
        last = await both.decode.answer(id_, timeout=3.0)
        assert isinstance(last, Failed)
        assert (last.status, last.leg) == (504, leg)
        assert last.instance == ("decode-0" if leg == "decode" else "prefill-0")
        both.prefill.engine.pause()
        both.decode.engine.pause()
        await both.idle()

    run(kind, scenario, buffer_blocks=16)


@pytest.mark.parametrize("state", STATES)
def test_memory_of_what_is_over_does_not_wait_for_the_cycle_collector(
    kind: str, state: str
) -> None:
    """Which a process with this many objects runs once in thousands of requests."""

    async def scenario(both: Pair) -> None:
        await both.decode.answer(both.decode.ask(prompt(33)))
        expires = state == "prefilling"
        id_ = await STATES[state][0](both, deadline_s=0.4 if expires else 30.0)
        if not expires:
            both.decode.role.abort(id_)
        await both.decode.answer(id_)
        both.prefill.engine.pause()
        both.decode.engine.pause()
        await both.idle()
        left = [o for o in gc.get_objects() if type(o) in (DecodeRequest, Outgoing)]
        assert not left

    gc.collect()
    gc.disable()
    try:
        run(kind, scenario, buffer_blocks=16)
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_end_with_nothing_held(kind: str, seed: int) -> None:
    async def scenario(both: Pair) -> None:
        rng = random.Random(seed)
        asked: dict[RequestId, tuple[tuple[int, ...], int]] = {}
        aborted: set[RequestId] = set()
        for n in range(60):
            p, limit = prompt(rng.randrange(1, 64), 1000 * seed + n), rng.randrange(1, 6)
            id_ = both.decode.ask(p, max_tokens=limit)
            asked[id_] = (p, limit)
            if rng.random() < 0.3:
                both.decode.role.abort(id_)
                aborted.add(id_)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.3:
                victim = rng.choice(list(asked))
                if both.decode.last_of(victim) is None:
                    both.decode.role.abort(victim)
                    aborted.add(victim)
        for id_, (p, limit) in asked.items():
            last = await both.decode.answer(id_)
            if id_ not in aborted:
                assert both.decode.tokens_of(id_) == expected(p, limit), last

    run(kind, scenario, buffer_blocks=24)


# ---- refusals ----------------------------------------------------------------------------------


def refusal(both: Pair, id_: RequestId) -> Failed:
    """Refused within the call that asked."""
    last = both.decode.last_of(id_)
    assert isinstance(last, Failed)
    return last


def test_a_prompt_larger_than_the_buffer_is_refused_with_both_numbers(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        failed = refusal(both, both.decode.ask(prompt(17 * BLOCK_SIZE)))
        assert failed.status == 400
        assert "17 blocks" in failed.message and "16" in failed.message
        assert failed.code == TOO_LONG

    run(kind, scenario, buffer_blocks=16)


def test_a_prompt_larger_than_the_device_pool_is_refused_before_prefill(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        failed = refusal(both, both.decode.ask(prompt(8 * BLOCK_SIZE)))
        assert failed.status == 400 and "9 blocks" in failed.message and "8" in failed.message
        assert failed.code == TOO_LONG

    run(kind, scenario, kv_cache_bytes=8 * BLOCK_BYTES)


def test_an_unknown_peer_is_the_clients_fault(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        failed = refusal(both, both.decode.ask(prompt(4), prefill="prefill-9"))
        assert failed.status == 400 and "prefill-9" in failed.message and failed.code is None

    run(kind, scenario)


def test_a_full_queue_and_a_long_wait_are_503_with_retry_after(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill")
        blocker = both.decode.ask(prompt(64))
        waiting = both.decode.ask(prompt(4))
        failed = refusal(both, both.decode.ask(prompt(4)))
        assert failed.status == 503 and failed.retry_after_s
        timed_out = await both.decode.answer(waiting, timeout=3.0)
        assert isinstance(timed_out, Failed)
        assert timed_out.status == 503 and timed_out.retry_after_s
        both.decode.role.abort(blocker)
        both.prefill.engine.pause()

    run(kind, scenario, buffer_blocks=16, max_queued=1, reserve_timeout_s=0.3)


def test_one_that_never_had_room_names_no_time_for_it(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill")
        first, waiting = both.decode.ask(prompt(64)), both.decode.ask(prompt(4))
        for id_, stages in ((waiting, set()), (first, {"reserve"})):
            both.decode.role.abort(id_)
            last = both.decode.last_of(id_)
            assert isinstance(last, Tokens) and last.served is not None
            assert last.served.stages.keys() == stages
        both.prefill.engine.pause()

    run(kind, scenario, buffer_blocks=16)


def test_what_prefill_refuses_is_passed_on(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        id_ = both.decode.ask((1, FORBIDDEN_TOKEN, 2))
        last = await both.decode.answer(id_)
        assert isinstance(last, Failed)
        assert (last.status, last.leg, last.instance) == (400, "prefill", "prefill-0")
        assert "forbidden" in last.message and last.code == "forbidden"

    run(kind, scenario)


# ---- order -------------------------------------------------------------------------------------


def test_small_requests_do_not_overtake_a_large_one(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill")
        first = both.decode.ask(prompt(40))  # 10 of 16 blocks
        large = both.decode.ask(prompt(64))  # all 16
        small = [both.decode.ask(prompt(4, n)) for n in range(5)]
        await asyncio.sleep(0.05)
        requests = both.handoff._requests
        assert all(requests[id_].landing is None for id_ in [large, *small])
        both.prefill.engine.pause()
        for id_ in [first, large, *small]:
            await both.decode.answer(id_)
        order = [engine_id.partition("@")[0] for engine_id in both.prefill.engine.submitted]
        assert order == [first, large, *small]
        assert both.decode.tokens_of(large) == expected(prompt(64), 4)

    run(kind, scenario, buffer_blocks=16)


# ---- lost links --------------------------------------------------------------------------------


def test_a_lost_link_fails_what_needs_the_peer_at_once_and_spares_the_rest(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        decode = both.decode
        decode.engine.pause("decode")
        spared = decode.ask(prompt(8), max_tokens=5)
        await decode.until(lambda: both.handoff._requests[spared].resumed)
        both.prefill.engine.pause("prefill_after_first")
        landing = decode.ask(prompt(40))
        await decode.until(lambda: copied(both, landing))
        queued = decode.ask(prompt(64))
        session = both.handoff.peers._up["prefill-0"]
        both.handoff.session_down(session, "cut")
        for id_ in (landing, queued):
            failed = refusal(both, id_)
            assert (failed.status, failed.leg, failed.instance) == (502, "prefill", "prefill-0")
        assert decode.last_of(spared) is None
        # shm: this very process is the writer, and lives. tcp: the connection's end is the fence.
        assert bool(decode.ledger.quarantined_blocks) == (kind == "shm")
        down = refusal(both, decode.ask(prompt(4), prefill="prefill-0"))
        assert (down.status, down.leg) == (502, "prefill")
        none = refusal(both, decode.ask(prompt(4)))
        assert none.status == 503 and none.retry_after_s
        both.cut()
        both.prefill.engine.pause()
        decode.engine.pause()
        await decode.answer(spared)
        assert decode.tokens_of(spared) == expected(prompt(8), 5)
        # A new session of the same incarnation has fenced the old one: its blocks are free again.
        await decode.until(lambda: both.handoff.peers._up)
        await both.idle()
        again = decode.ask(prompt(64))
        await decode.answer(again)
        assert decode.tokens_of(again) == expected(prompt(64), 4)

    run(kind, scenario, buffer_blocks=16)


def test_what_a_lost_peer_gives_back_is_not_granted_to_who_needs_it_too(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill")
        ids = [both.decode.ask(prompt(40, seed)) for seed in range(3)]  # 10 of 16 blocks each
        session = both.handoff.peers._up["prefill-0"]
        told: list[Any] = []
        session.link.send = told.append
        both.handoff.session_down(session, "cut")
        assert [refusal(both, id_).status for id_ in ids] == [502, 502, 502]
        assert not any(isinstance(message, Prefill) for message in told)
        del session.link.send
        both.cut()
        both.prefill.engine.pause()

    run(kind, scenario, buffer_blocks=16)


def test_a_restarted_prefill_is_a_new_peer(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        old = both.handoff.peers._up["prefill-0"].welcome
        await both.prefill.close()
        await both.decode.until(lambda: not both.handoff.peers._up)
        assert refusal(both, both.decode.ask(prompt(4), prefill="prefill-0")).status == 502
        both.prefill = await start(both.prefill.config)
        await both.decode.until(lambda: both.handoff.peers._up)
        new = both.handoff.peers._up["prefill-0"].welcome
        assert new.incarnation != old.incarnation
        id_ = both.decode.ask(prompt(30))
        await both.decode.answer(id_)
        assert both.decode.tokens_of(id_) == expected(prompt(30), 4)

    run(kind, scenario)


def test_aborts_of_unknown_requests_are_ignored(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.decode.role.abort(Abort(RequestId("nobody")).id)
        both.prefill.role.abort(RequestId("nobody"))

    run(kind, scenario)

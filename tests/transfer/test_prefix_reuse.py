"""Decode's prefix cache in the hand-over: what it has is held, not sent, and given back."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import expected
from handoff_lab import BLOCK_BYTES, BLOCK_SIZE, Pair, drive, prompt
from rdma_lab import BUFFERED

from runtime.protocol import Failed, Served, Tokens


@pytest.fixture(params=BUFFERED)
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


async def served(both: Pair, tokens: tuple[int, ...], max_tokens: int = 4) -> Served:
    id_ = both.decode.ask(tokens, max_tokens=max_tokens)
    last = await both.decode.answer(id_)
    assert isinstance(last, Tokens), last
    assert both.decode.tokens_of(id_) == expected(tokens, max_tokens)
    assert last.served is not None
    return last.served


def test_the_second_turn_moves_only_what_is_new(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        first = prompt(41)
        assert (await served(both, first)).decode_cached_tokens == 0
        turn = await served(both, (*first, *prompt(20, seed=1)))
        assert turn.decode_cached_tokens == 40
        assert turn.kv_bytes == 6 * BLOCK_BYTES  # of 16
        again = await served(both, first)
        assert (again.decode_cached_tokens, again.kv_bytes) == (40, BLOCK_BYTES)
        counters = both.decode.role.counters()
        assert counters["cached_tokens"] == 80
        assert counters[f"kv_bytes_{kind}"] == (11 + 6 + 1) * BLOCK_BYTES

    drive(kind, scenario)


def test_a_prompt_that_is_there_whole_moves_nothing(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        whole = prompt(8 * BLOCK_SIZE)
        await served(both, whole)
        again = await served(both, whole)
        assert (again.decode_cached_tokens, again.kv_bytes) == (len(whole), 0)
        assert {"transfer", "swap_in", "decode"} <= again.stages.keys()
        assert both.decode.role.counters()["transfers"] == 2
        one = await served(both, whole, max_tokens=1)
        assert one.kv_bytes == 0

    drive(kind, scenario)


def test_a_prompt_that_is_there_whole_needs_no_room_in_the_buffer(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        whole = prompt(8 * BLOCK_SIZE)
        await served(both, whole)
        both.prefill.engine.pause("prefill")
        blocker = both.decode.ask(prompt(64, seed=1))
        assert both.decode.ledger.buffer_blocks == 16
        id_ = both.decode.ask(whole)
        assert both.handoff._requests[id_].landing is not None
        both.prefill.engine.pause()
        for asked, tokens in ((id_, whole), (blocker, prompt(64, seed=1))):
            await both.decode.answer(asked)
            assert both.decode.tokens_of(asked) == expected(tokens, 4)

    drive(kind, scenario, buffer_blocks=16)


@pytest.mark.parametrize("how", ["abort", "deadline", "lost", "refused"])
def test_held_blocks_are_given_back_on_every_way_out(kind: str, how: str) -> None:
    async def scenario(both: Pair) -> None:
        decode, first = both.decode, prompt(40)
        await served(both, first)
        await both.idle()
        both.prefill.engine.pause("prefill")
        tail = prompt(20, seed=1) if how != "refused" else (666,)
        id_ = decode.ask((*first, *tail), deadline_s=0.5 if how == "deadline" else 30.0)
        held = -(-(40 + len(tail)) // BLOCK_SIZE)
        await decode.until(lambda: decode.ledger.device_blocks == held or decode.last_of(id_))
        assert how == "refused" or both.handoff._requests[id_].have_blocks == 10
        if how == "abort":
            decode.role.abort(id_)
        elif how == "lost":
            both.cut()
        last = await decode.answer(id_)
        assert isinstance(last, Tokens if how == "abort" else Failed)
        both.prefill.engine.pause()
        await decode.until(lambda: both.handoff.peers._up)
        await both.idle()
        # What was cached still is.
        assert (await served(both, first)).decode_cached_tokens == 40

    drive(kind, scenario)


def test_device_blocks_are_not_given_ahead_of_a_request_that_waits_for_them(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        decode, first = both.decode, prompt(40)
        await served(both, first)
        decode.engine.pause("decode")
        long = decode.ask(prompt(60, seed=1))  # 15 of 32 blocks
        await decode.until(lambda: both.handoff._requests[long].resumed)
        large = decode.ask(prompt(100, seed=2))  # 25: lands, and waits
        await decode.until(lambda: decode.role.ledger().waiting == 1)
        late = decode.ask(first)
        await decode.until(lambda: both.handoff._requests[late].all_landed)
        assert both.handoff._requests[late].have_blocks == 0
        decode.engine.pause()
        for id_ in (long, large, late):
            assert isinstance(await decode.answer(id_), Tokens)
        assert decode.tokens_of(large) == expected(prompt(100, seed=2), 4)

    drive(kind, scenario, kv_cache_bytes=32 * BLOCK_BYTES)


def test_at_most_half_of_the_pool_waits_for_kv(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill")
        ids = [both.decode.ask(prompt(40, seed=n)) for n in range(3)]
        requests = [both.handoff._requests[id_] for id_ in ids]
        assert [r.pledged_blocks for r in requests] == [10, 0, 0]
        both.prefill.engine.pause()
        for n, id_ in enumerate(ids):
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(prompt(40, seed=n), 4)
        # One alone may take more.
        both.prefill.engine.pause("prefill")
        alone = both.decode.ask(prompt(100))
        assert both.handoff._requests[alone].pledged_blocks == 25
        both.prefill.engine.pause()
        await both.decode.answer(alone)

    drive(kind, scenario, kv_cache_bytes=32 * BLOCK_BYTES)


def test_without_a_prefix_cache_everything_moves(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        for _ in range(2):
            found = await served(both, prompt(16))
            assert (found.decode_cached_tokens, found.kv_bytes) == (0, 4 * BLOCK_BYTES)

    drive(kind, scenario, prefix_cache=False)


def test_many_that_share_a_prefix_and_leave(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        stem = prompt(32)
        await served(both, stem)
        asked = {}
        for n in range(40):
            tokens = (*stem[: n % 33], *prompt(n % 7 + 1, seed=n))
            id_ = both.decode.ask(tokens)
            if n % 4:
                asked[id_] = tokens
            else:
                both.decode.role.abort(id_)
            await asyncio.sleep(0.001)
        for id_, tokens in asked.items():
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(tokens, 4)

    drive(kind, scenario, buffer_blocks=20, kv_cache_bytes=48 * BLOCK_BYTES)

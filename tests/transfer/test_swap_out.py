"""Making room in the device pool: out to the buffer, back again, and every way out between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from fake_engine import expected
from handoff_lab import BLOCK_BYTES, Pair, drive, prompt

from runtime.errors import TransferError
from runtime.protocol import Failed, RequestId, Tokens


async def decoding(both: Pair, tokens: int = 40, **ask: float) -> RequestId:
    both.decode.engine.pause("decode")
    id_ = both.decode.ask(prompt(tokens), deadline_s=ask.get("deadline_s", 30.0))
    await both.decode.until(lambda: both.handoff._requests[id_].resumed)
    return id_


async def away(both: Pair, **ask: float) -> RequestId:
    """Swapped out, and the engine gives it no blocks to come back to."""
    id_ = await decoding(both, **ask)
    both.decode.engine.pause("decode", "adopt")
    both.swap_out(id_)
    await both.decode.until(lambda: both.handoff._requests[id_].away_since)
    return id_


async def answers(both: Pair, id_: RequestId, tokens: int = 40) -> None:
    both.decode.engine.pause()
    assert isinstance(await both.decode.answer(id_), Tokens)
    assert both.decode.tokens_of(id_) == expected(prompt(tokens), 4)


def test_what_makes_room_comes_back_with_its_kv() -> None:
    async def scenario(both: Pair) -> None:
        id_ = await away(both)
        await both.decode.until(lambda: both.decode.ledger.device_blocks == 0)
        assert both.decode.ledger.buffer_blocks == 10
        counters = both.decode.role.counters()
        assert (counters["swap_outs"], counters["swap_out_bytes"]) == (1, 10 * BLOCK_BYTES)
        await answers(both, id_)
        assert counters["swap_backs"] == 1
        assert counters["swapped_seconds"] >= counters["swap_out_seconds"] > 0

    drive("shm", scenario, prefix_cache=False)


def test_without_room_it_is_computed_again() -> None:
    async def scenario(both: Pair) -> None:
        id_ = await decoding(both)
        both.prefill.engine.pause("prefill")
        other = both.decode.ask(prompt(40, seed=1))  # 10 of 16 blocks of the buffer
        both.swap_out(id_)
        counters = both.decode.role.counters()
        await both.decode.until(lambda: counters["swap_outs_without_room"])
        await answers(both, id_)
        assert not counters["swap_outs"]
        both.decode.role.abort(other)
        both.prefill.engine.pause()

    drive("shm", scenario, buffer_blocks=16)


def test_it_takes_no_blocks_that_a_request_waits_for() -> None:
    async def scenario(both: Pair) -> None:
        id_ = await decoding(both, tokens=8)
        both.prefill.engine.pause("prefill")
        first = both.decode.ask(prompt(40, seed=1))
        large = both.decode.ask(prompt(40, seed=2))  # waits: 6 blocks are free
        both.swap_out(id_)
        counters = both.decode.role.counters()
        await both.decode.until(lambda: counters["swap_outs_without_room"])
        both.decode.role.abort(first)
        both.prefill.engine.pause()
        await answers(both, id_, tokens=8)
        await both.decode.answer(large)
        assert both.decode.tokens_of(large) == expected(prompt(40, seed=2), 4)

    drive("shm", scenario, buffer_blocks=16)


def test_a_request_waits_for_what_is_away_and_is_served() -> None:
    async def scenario(both: Pair) -> None:
        id_ = await away(both)
        late = both.decode.ask(prompt(64, seed=1))  # the whole buffer
        await asyncio.sleep(0.02)
        assert both.handoff._requests[late].landing is None
        await answers(both, id_)
        await both.decode.answer(late)
        assert both.decode.tokens_of(late) == expected(prompt(64, seed=1), 4)

    drive("shm", scenario, buffer_blocks=16)


@pytest.mark.parametrize("how", ["abort", "deadline", "peer lost"])
def test_every_way_out_while_away(how: str) -> None:
    async def scenario(both: Pair) -> None:
        id_ = await away(both, deadline_s=0.5 if how == "deadline" else 30.0)
        if how == "peer lost":  # it needs the peer no more
            both.cut()
            await answers(both, id_)
            return
        if how == "abort":
            both.decode.role.abort(id_)
        last = await both.decode.answer(id_)
        assert isinstance(last, Failed) == (how == "deadline")
        both.decode.engine.pause()

    drive("shm", scenario)


def swap_copies(both: Pair, change: Callable[[], None]) -> None:
    """Run `change` on the lane before the copy out of the pool."""
    lane = both.handoff._swap_outs._lane
    submit = lane.submit

    def changed(copy: object) -> None:
        pieces = copy._pieces  # type: ignore[attr-defined]
        copy._pieces = [change, *pieces]  # type: ignore[attr-defined]
        submit(copy)

    lane.submit = changed


def test_abort_while_it_is_copied_frees_the_blocks_when_the_copy_has_ended() -> None:
    async def scenario(both: Pair) -> None:
        id_ = await decoding(both)
        loop = asyncio.get_running_loop()
        seen: list[tuple[int, int]] = []

        def abort() -> None:
            def now() -> None:
                both.decode.role.abort(id_)
                held = both.decode.ledger
                seen.append((held.device_blocks, held.buffer_blocks))

            asyncio.run_coroutine_threadsafe(_call(now), loop).result(5)

        swap_copies(both, abort)
        both.swap_out(id_)
        await both.decode.answer(id_)
        both.decode.engine.pause()
        await both.idle()
        assert seen == [(10, 10)]

    drive("shm", scenario)


async def _call(what: Callable[[], None]) -> None:
    what()


def test_a_copy_that_fails_costs_no_request() -> None:
    def fail() -> None:
        raise TransferError("a bad copy")

    async def scenario(both: Pair) -> None:
        id_ = await decoding(both)
        swap_copies(both, fail)
        both.swap_out(id_)
        await both.decode.until(lambda: not both.decode.ledger.copies)
        await answers(both, id_)
        assert not both.decode.role.counters()["swap_outs"]

    drive("shm", scenario)


@pytest.mark.parametrize("seed", range(3))
def test_random_swaps_beside_hand_overs(seed: int) -> None:
    async def scenario(both: Pair) -> None:
        rng = random.Random(seed)
        asked = {}
        for n in range(40):
            tokens = prompt(rng.randrange(1, 60), seed=100 * seed + n)
            id_ = both.decode.ask(tokens, max_tokens=rng.randrange(2, 30))
            asked[id_] = (tokens, both.handoff._requests[id_].message.params.max_tokens)
            await asyncio.sleep(rng.random() * 0.01)
            for victim in rng.sample(list(asked), min(3, len(asked))):
                both.swap_out(victim)
            if rng.random() < 0.2:
                gone = rng.choice(list(asked))
                if both.decode.last_of(gone) is None:
                    both.decode.role.abort(gone)
                    del asked[gone]
        for id_, (tokens, limit) in asked.items():
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(tokens, limit)
        assert both.decode.role.counters()["swap_outs"] > 0

    drive("shm", scenario, buffer_blocks=40)

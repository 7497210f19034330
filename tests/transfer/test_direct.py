"""KV put straight into a device pool that prefill reaches, and when its blocks are free."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fake_engine import expected
from handoff_lab import BLOCK_BYTES, BLOCK_SIZE, Pair, config, drive, held, prompt, segments
from rdma_lab import KINDS, on_gpus

from runtime.engine.segment import Segment
from runtime.kv.layout import KvLayout, PoolMap
from runtime.protocol import Failed, RequestId, Tokens


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


WRITES_ITSELF = ("cuda_ipc", "shm")


def place(kind: str) -> dict[str, str]:
    """Where the device pool is, so that puts of this kind reach it."""
    return {} if on_gpus(kind) else {"device": "cpu"}


async def answered(both: Pair, id_: RequestId, tokens: tuple[int, ...]) -> Tokens:
    last = await both.decode.answer(id_)
    assert isinstance(last, Tokens), last
    assert both.decode.tokens_of(id_) == expected(tokens, 4)
    return last


def test_it_takes_no_block_of_the_buffer_and_no_copy(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill_after_first")
        id_ = both.decode.ask(prompt(40))
        request = both.handoff._requests[id_]
        await both.decode.until(lambda: request.landing.copied == 2)
        ledger = both.decode.ledger
        assert (ledger.device_blocks, ledger.buffer_blocks, ledger.copies) == (10, 0, 0)
        both.prefill.engine.pause()
        last = await answered(both, id_, prompt(40))
        assert last.served is not None and last.served.kv_bytes == 10 * BLOCK_BYTES
        again = both.decode.ask((*prompt(40), *prompt(9, seed=1)))
        last = await answered(both, again, (*prompt(40), *prompt(9, seed=1)))
        assert last.served is not None and last.served.kv_bytes == 3 * BLOCK_BYTES

    drive(kind, scenario, **place(kind), buffer_blocks=16)


def test_without_device_blocks_it_goes_through_the_buffer(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.decode.engine.pause("adopt")
        id_ = both.decode.ask(prompt(40))
        await both.decode.until(lambda: both.handoff._requests[id_].all_landed)
        assert both.decode.ledger.buffer_blocks == 10
        both.decode.engine.pause()
        await answered(both, id_, prompt(40))

    drive(kind, scenario, **place(kind))


def test_device_blocks_of_an_aborted_request_are_not_free_while_prefill_writes() -> None:
    async def scenario(both: Pair) -> None:
        [session] = both.prefill.role._handoff._sessions.values()  # type: ignore[attr-defined]
        with held(session.lane) as begun:
            id_ = both.decode.ask(prompt(40))
            blocks = set(both.handoff._requests[id_].landing.device)
            await both.decode.until(begun.is_set)
            both.decode.role.abort(id_)
            ledger = both.decode.ledger
            assert (ledger.device_blocks, ledger.quarantined_blocks) == (10, 10)
            other = both.decode.ask(prompt(40, seed=1))  # there are 10 more blocks
            assert not blocks & set(both.handoff._requests[other].landing.device)
            late = both.decode.ask(prompt(40, seed=2))
            assert both.handoff._requests[late].landing.device is None
        await answered(both, other, prompt(40, seed=1))
        await answered(both, late, prompt(40, seed=2))

    drive("shm", scenario, device="cpu", kv_cache_bytes=20 * BLOCK_BYTES)


def test_an_id_is_tried_again_while_a_writer_keeps_blocks_of_the_first_try() -> None:
    """The router does so when prefill was lost: a lost writer keeps them for a while."""

    async def scenario(both: Pair) -> None:
        [session] = both.prefill.role._handoff._sessions.values()  # type: ignore[attr-defined]
        with held(session.lane) as begun:
            id_ = both.decode.ask(prompt(40))
            await both.decode.until(begun.is_set)
            both.decode.role.abort(id_)
            both.decode.events.clear()
            assert both.decode.ask(prompt(40), id_=id_) == id_
            assert both.decode.ledger.quarantined_blocks == 10
        await answered(both, id_, prompt(40))

    drive("shm", scenario, device="cpu")


def test_device_blocks_of_a_lost_session_are_quarantined_until_a_fence(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        both.prefill.engine.pause("prefill_after_first")
        id_ = both.decode.ask(prompt(40))
        await both.decode.until(lambda: both.handoff._requests[id_].landing.copied)
        both.handoff.session_down(both.handoff.peers._up["prefill-0"], "cut")
        assert isinstance(both.decode.last_of(id_), Failed)
        # The writer lives. tcp: its connection's end is the fence.
        ledger = both.decode.ledger
        assert bool(ledger.quarantined_blocks) == (kind in WRITES_ITSELF)
        if kind in WRITES_ITSELF:
            assert (ledger.device_blocks, ledger.quarantined_blocks) == (10, 10)
        both.cut()
        both.prefill.engine.pause()
        await both.decode.until(lambda: both.handoff.peers._up)
        await both.idle()
        await answered(both, both.decode.ask(prompt(40)), prompt(40))

    drive(kind, scenario, **place(kind))


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cpu", "kv_cache_bytes": 1 << 50}, False),
        ({"device": "cuda:0"}, False),
        ({"device": "cpu", "tp_size": 2}, False),
    ],
)
def test_the_pool_is_shared_on_a_cpu_where_there_is_room(
    changes: dict[str, Any], shared: bool
) -> None:
    settings = config("d", "decode", cpu_buffer_bytes=4 * BLOCK_BYTES, **changes)
    layout = KvLayout(2, 2, 4, BLOCK_SIZE, "float32")
    pools = PoolMap(layout, settings.kv_cache_bytes // BLOCK_BYTES, settings.tp_size)
    segment = Segment(settings, "incarnation")
    region = segment.make(pools)
    try:
        assert segment.buffer is not None and segment.buffer.num_blocks == 4
        assert segment.buffer.pool_blocks == (pools.num_blocks if shared else 0)
        assert (region is not None) == shared
        reservation = segment.buffer.reserve(1, 4)
        assert reservation is not None and min(reservation.blocks) == segment.buffer.pool_blocks
    finally:
        segment.close(quiet=True)
    assert not segments(settings.shm_prefix)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_in_a_small_pool(kind: str, seed: int) -> None:
    async def scenario(both: Pair) -> None:
        rng = random.Random(seed)
        asked = {}
        for n in range(60):
            tokens = prompt(rng.randrange(1, 60), seed=100 * seed + n % 7)
            id_ = both.decode.ask(tokens)
            asked[id_] = tokens
            await asyncio.sleep(rng.random() * 0.005)
            victim = rng.choice(list(asked))
            if rng.random() < 0.2:
                both.swap_out(victim)
            elif rng.random() < 0.3 and both.decode.last_of(victim) is None:
                both.decode.role.abort(victim)
                del asked[victim]
        for id_, tokens in asked.items():
            await answered(both, id_, tokens)

    drive(kind, scenario, **place(kind), kv_cache_bytes=40 * BLOCK_BYTES, buffer_blocks=24)


@pytest.mark.parametrize("end", ["finish", "abort", "fail"])
def test_who_waits_for_room_is_served_when_device_blocks_come_free(end: str) -> None:
    """The buffer is taken for longer, and nothing of it comes free."""

    async def scenario(both: Pair) -> None:
        decode, requests = both.decode, both.handoff._requests
        decode.engine.pause("decode")
        first = decode.ask(prompt(96), max_tokens=2)  # 24 of 32 blocks of the device
        await decode.until(lambda: requests[first].resumed)
        both.prefill.engine.pause("prefill")
        slow = decode.ask(prompt(96, seed=1))  # all 24 of the buffer
        waits = decode.ask(prompt(48, seed=2))
        assert (requests[slow].landing.direct, requests[waits].landing) == (False, None)
        if end == "finish":
            decode.engine.pause()
        elif end == "abort":
            decode.role.abort(first)
        else:
            decode.engine.fail(requests[first].engine_id)
        await decode.until(lambda: requests[waits].landing)
        assert requests[waits].landing.direct
        assert decode.ledger.buffer_blocks == 24
        both.prefill.engine.pause()
        decode.engine.pause()
        for seed, id_ in enumerate((slow, waits), start=1):
            await answered(both, id_, prompt(96 if id_ == slow else 48, seed=seed))

    drive("shm", scenario, device="cpu", buffer_blocks=24, kv_cache_bytes=32 * BLOCK_BYTES)


@pytest.mark.parametrize("end", ["resume", "abort"])
def test_who_waits_for_room_is_served_when_less_of_the_pool_only_waits_for_kv(end: str) -> None:
    async def scenario(both: Pair) -> None:
        decode, requests = both.decode, both.handoff._requests
        [session] = both.prefill.role._handoff._sessions.values()  # type: ignore[attr-defined]
        with held(session.lane):
            first = decode.ask(prompt(56))  # 14 of 64: half may wait for KV
            await decode.until(lambda: requests[first].first)
            both.prefill.engine.pause("prefill")
            pledged = decode.ask(prompt(56, seed=1))
            slow = decode.ask(prompt(56, seed=2))  # all of the buffer
            waits = decode.ask(prompt(56, seed=3))
            assert requests[first].landing.direct and requests[pledged].landing.direct
            assert (requests[slow].landing.direct, requests[waits].landing) == (False, None)
            decode.engine.pause("decode")
            if end == "abort":
                decode.role.abort(first)
                assert requests[waits].landing.direct
        await decode.until(lambda: requests[waits].landing)
        assert requests[waits].landing.direct
        both.prefill.engine.pause()
        decode.engine.pause()
        for seed, id_ in enumerate((pledged, slow, waits), start=1):
            await answered(both, id_, prompt(56, seed=seed))

    drive("shm", scenario, device="cpu", buffer_blocks=14, kv_cache_bytes=64 * BLOCK_BYTES)

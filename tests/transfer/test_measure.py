"""Measuring a path: real puts into spare blocks, which are given back, whatever happens."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, Literal

import pytest
from fake_engine import expected
from handoff_lab import BLOCK_BYTES, Pair, held, pair

from runtime.engine.roles import PrefillRole
from runtime.protocol import Measure, Measured
from runtime.transfer import measure, path_test

KINDS = ["shm", "tcp"]
BLOCKS = 16


async def measured(
    both: Pair,
    what: Literal["path", "socket", "memcpy"],
    peer: str = "prefill-0",
    blocks: int = BLOCKS,
    run: int = 1,
) -> Measured:
    ask = Measure(what=what, peer=peer, blocks=blocks, run=run, seq=7)
    async with asyncio.timeout(30):
        found = await both.decode.role.measure(ask)
    assert found.seq == 7
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_is_measured_and_nothing_is_kept(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as both:
            for what in ("path", "socket", "memcpy"):
                for run in (1, 4, BLOCKS):
                    found = await measured(both, what, run=run)  # type: ignore[arg-type]
                    assert not found.error
                    assert found.nbytes == BLOCKS * BLOCK_BYTES and found.seconds > 0
                    assert found.path == (kind if what == "path" else "")
            await both.idle()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_requests_beside_it_get_the_right_tokens(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as both:
            ids = [both.decode.ask((1, 2, 3, n), max_tokens=4) for n in range(8)]
            for _ in range(8):
                await measured(both, "path", blocks=4)
            for n, id_ in enumerate(ids):
                await both.decode.answer(id_)
                assert both.decode.tokens_of(id_) == expected((1, 2, 3, n), 4)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"what": "path", "blocks": 65}, 503, "65 blocks of the CPU buffer"),
        ({"what": "memcpy", "blocks": 65}, 503, "requests come first"),
        ({"what": "path", "peer": "prefill-9"}, 400, "prefill-9"),
        ({"what": "socket", "peer": "prefill-9"}, 400, "prefill-9"),
        ({"what": "path", "blocks": 0}, 400, "at least 1"),
        ({"what": "socket", "run": 0}, 400, "at least 1"),
        ({"what": "socket", "blocks": 1 << 40}, 400, "more than"),
    ],
)
def test_what_cannot_be_measured_is_said(change: dict[str, Any], status: int, word: str) -> None:
    async def main() -> None:
        async with pair("shm", buffer_blocks=64) as both:
            found = await measured(both, **change)
            assert (found.status, found.nbytes) == (status, 0)
            assert word in found.error

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_peer_ends_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair(kind) as both:
            monkeypatch.setattr(
                "runtime.transfer.handoff_prefill.test_fits",
                lambda *_: both.cut() or False,  # type: ignore[func-returns-value]
            )
            found = await measured(both, "path")
            monkeypatch.undo()
            assert found.status == 502 and "prefill-0 was lost" in found.error
            await both.decode.until(lambda: both.handoff.peers._up)

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_comes_too_late_gives_the_blocks_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "DEADLINE_S", 0.1)

    async def main() -> None:
        async with pair(kind) as both:
            assert isinstance(both.prefill.role, PrefillRole)
            session = both.handoff.peers._up["prefill-0"]
            [prefills] = both.prefill.role._handoff._sessions.values()
            with held(prefills.lane):
                assert (await measured(both, "path")).status == 504
            await both.idle()
            assert not session.writer.lost and not session.answers

    asyncio.run(main())


def test_a_prefill_instance_measures_nothing() -> None:
    async def main() -> None:
        async with pair("shm") as both:
            ask = Measure(what="memcpy", peer="", blocks=1)
            assert (await both.prefill.role.measure(ask)).status == 400

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "run", "room"), [(10, 1, 10), (10, 4, 100), (12, 5, 7), (3, 9, 9)]
)
def test_scattered_blocks_come_in_runs(count: int, run: int, room: int) -> None:
    found = path_test.scattered(count, run, room)
    assert len(found) == count and all(0 <= b < room for b in found)
    if room >= count:
        assert sorted(found) == list(range(count))
        breaks = sum(b != a + 1 for a, b in pairwise(found))
        assert breaks <= -(-count // run)

"""Where the bytes of a path test leave from."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from handoff_lab import BLOCK_BYTES, config

from runtime.kv.region import Region
from runtime.protocol import PathTest
from runtime.transfer.base import Runs
from runtime.transfer.path_test import PathTestPut
from runtime.transfer.spare_block import take_block

PATTERN = bytes(range(64))


class Taking:
    """A sender that keeps what it is given."""

    reads_gpu = True

    def __init__(self) -> None:
        self.took: list[tuple[Region, bytes, int, int]] = []

    def put(self, nonce: int, source: Region, runs: Runs, whole: int) -> int:
        for at, to, size in runs.tolist():
            self.took.append((source, ctypes.string_at(source.address + at, size), to, whole))
        return int(runs[:, 2].sum())


@pytest.fixture(params=[True, False], ids=["gpu", "cpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    made = FakeEngine(config("p", "prefill"), lambda _: None, gpu=request.param)
    yield made
    made.close()


def put(engine: FakeEngine, **more: Any) -> tuple[Taking, PathTestPut]:
    sender = Taking()
    test = PathTest(nonce=7, blocks=(3, 1), **{"pattern": PATTERN, **more})
    made = PathTestPut(test, sender, engine)  # type: ignore[arg-type]
    for piece in made.pieces:
        piece()
    return sender, made


def test_a_pattern_leaves_from_the_device_pool_where_that_is_on_a_gpu(engine: FakeEngine) -> None:
    on_gpu = engine.copies.engine is not None
    sender, made = put(engine)
    block = (PATTERN * BLOCK_BYTES)[:BLOCK_BYTES]
    assert b"".join(data for _, data, _, _ in sender.took) == block * 2
    assert {source == engine.pool for source, *_ in sender.took} == {on_gpu}
    assert [(to, whole) for _, _, to, whole in sender.took] == [
        (3 * BLOCK_BYTES, 2),
        (1 * BLOCK_BYTES, 2),
    ]
    assert engine._cache.held == int(on_gpu)
    made.end()
    while engine._commands:
        engine._commands.popleft()()
    assert engine._cache.held == 0


def test_requests_come_first(engine: FakeEngine) -> None:
    engine.pause("adopt")
    sender, made = put(engine)
    assert all(source != engine.pool for source, *_ in sender.took) and len(sender.took) == 2
    made.end()


def test_a_block_that_holds_a_prefix_is_never_taken() -> None:
    """With blocks of one token every one-token prompt is a block."""
    engine = FakeEngine(config("d", "decode", block_size=1), lambda _: None)
    cached = engine._cache.claim([], 3)
    assert cached is not None
    engine._cache.index((engine._hashes((t,))[0], block) for t, block in enumerate(cached.blocks))
    engine._cache.release(cached.blocks)
    for _ in range(engine.num_blocks - 3):
        taken = take_block(engine)
        assert taken is not None and taken[1] not in cached.blocks


def test_without_a_pattern_it_is_whatever_is_in_the_pool(engine: FakeEngine) -> None:
    sender, made = put(engine, pattern=b"")
    assert all(source == engine.pool for source, *_ in sender.took)
    assert engine._cache.held == 0
    made.end()


def test_tests_of_peers_that_count_alike_are_told_apart() -> None:
    """Each incarnation of a peer counts its sessions from 1, each session its nonces."""
    engine = FakeEngine(config("d", "decode"), lambda _: None, gpu=True)
    puts = [put(engine)[1] for _ in range(2)]
    first, second = take_block(engine), take_block(engine)
    assert first and second and first[0] != second[0]
    while engine._commands:
        engine._commands.popleft()()  # raises for an id that it knows already
    assert engine._cache.held == 4
    for made in puts:
        made.end()
    engine.drop(first[0])
    engine.drop(second[0])
    while engine._commands:
        engine._commands.popleft()()
    assert engine._cache.held == 0
    engine.close()

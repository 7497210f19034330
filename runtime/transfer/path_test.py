"""What prefill puts for a PathTest: a pattern that decode looks for, or the device pool's own bytes
to measure the path.

Owns where such puts read. Knows no session. For the asyncio thread, but for the pieces.
"""

from __future__ import annotations

import ctypes
import random
from functools import partial

from runtime.engine.contract import EngineControl
from runtime.kv.region import Region
from runtime.kv.swap import Piece, split_blocks
from runtime.protocol import PathTest
from runtime.transfer.base import Sender
from runtime.transfer.pool_put import pool_put
from runtime.transfer.spare_block import take_block


def test_fits(test: PathTest, room: int) -> bool:
    """Whether its blocks are different ones of a buffer of `room` blocks."""
    blocks = test.blocks
    inside = all(0 <= block < room for block in blocks)
    return bool(blocks) and inside and len(set(blocks)) == len(blocks) and test.run > 0


class PathTestPut:
    """The puts, in pieces as KV is put. A pattern leaves from a block of the device pool where that
    is on a GPU: so the test is also of whatever reads there.
    """

    def __init__(self, test: PathTest, sender: Sender, engine: EngineControl) -> None:
        self._test = test
        self._sender = sender
        self._engine = engine
        size = engine.layout.block_bytes
        repeats = -(-size // len(test.pattern)) if test.pattern else 0
        self._data = ctypes.create_string_buffer((test.pattern * repeats)[:size], size)
        self._host = Region(ctypes.addressof(self._data), size)
        on_gpu = bool(test.pattern) and engine.copies.engine is not None
        self._taken = take_block(engine) if on_gpu else None
        count = len(test.blocks)
        self._source = scattered(count, test.run, engine.pool_map.num_blocks)
        put = self._pool_bytes
        if self._taken:
            self._source = [self._taken[1]] * count
        elif test.pattern:
            put = self._host_bytes
        cuts = split_blocks(0, count, size)
        self.pieces: list[Piece] = [partial(put, start, stop) for start, stop in cuts]
        if self._taken:
            self.pieces.insert(0, self._fill)

    def end(self) -> None:
        """No piece runs any more."""
        if self._taken:
            self._engine.drop(self._taken[0])

    def _fill(self) -> None:
        runs = self._engine.pool_map.scatter([0], self._source[:1])
        self._engine.copies.into(self._host, runs)

    def _pool_bytes(self, start: int, stop: int) -> None:
        runs = self._engine.pool_map.gather(self._source[start:stop], self._test.blocks[start:stop])
        pool_put(self._sender, self._engine.copies, self._test.nonce, runs, stop)

    def _host_bytes(self, start: int, stop: int) -> None:
        some = self._test.blocks[start:stop]
        runs = self._engine.layout.block_runs([0] * len(some), some)
        self._sender.put(self._test.nonce, self._host, runs, stop)


def scattered(count: int, run: int, room: int) -> list[int]:
    """`count` of `room` blocks, `run` neighbours at a time in no order; the same for equal
    arguments.
    """
    starts = list(range(0, count, run))
    random.Random(count).shuffle(starts)
    return [number % room for start in starts for number in range(start, min(start + run, count))]

"""What prefill puts for a PathTest: a pattern that decode looks for, or the device pool's own bytes
to measure the path.

Owns where such puts read. Knows no session.
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


def test_fits(test: PathTest, room: int) -> bool:
    """Whether its blocks are different ones of a buffer of `room` blocks."""
    blocks = test.blocks
    inside = all(0 <= block < room for block in blocks)
    return bool(blocks) and inside and len(set(blocks)) == len(blocks) and test.run > 0


def test_pieces(test: PathTest, sender: Sender, engine: EngineControl) -> list[Piece]:
    """The puts, in pieces as KV is put."""
    layout, blocks = engine.layout, test.blocks
    source = scattered(len(blocks), test.run, engine.pool_map.num_blocks)
    size = layout.block_bytes
    repeats = -(-size // len(test.pattern)) if test.pattern else 0
    data = ctypes.create_string_buffer((test.pattern * repeats)[:size], size)

    def piece(start: int, stop: int) -> None:
        some = blocks[start:stop]
        if test.pattern:
            memory = Region(ctypes.addressof(data), size)
            sender.put(test.nonce, memory, layout.block_runs([0] * len(some), some), stop)
        else:
            runs = engine.pool_map.gather(source[start:stop], some)
            pool_put(sender, engine.copies, test.nonce, runs, stop)

    cuts = split_blocks(0, len(blocks), layout.block_bytes)
    return [partial(piece, start, stop) for start, stop in cuts]


def scattered(count: int, run: int, room: int) -> list[int]:
    """`count` of `room` blocks, `run` neighbours at a time in no order; the same for equal
    arguments.
    """
    starts = list(range(0, count, run))
    random.Random(count).shuffle(starts)
    return [number % room for start in starts for number in range(start, min(start + run, count))]

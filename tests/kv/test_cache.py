"""Blocks and prefixes behind one lock: claims are all or nothing, also with two threads at it."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.cache import BlockCache, Claim
from runtime.kv.prefix import block_hashes

SIZE = 4


def fill(cache: BlockCache, tokens: list[int]) -> None:
    """Leave this prompt's full blocks in the cache, held by nobody."""
    hashes = block_hashes(tokens, SIZE, [])
    claim = cache.claim(hashes, len(hashes))
    assert claim is not None
    cache.index(zip(hashes, claim.blocks, strict=True))
    cache.release(claim.blocks)


@given(
    have=st.integers(0, 10),
    count=st.integers(1, 12),
    spare=st.integers(0, 6),
    most_new=st.none() | st.integers(0, 12),
)
def test_a_claim_is_all_or_nothing(have: int, count: int, spare: int, most_new: int | None) -> None:
    cache = BlockCache(12)
    tokens = list(range(48))
    fill(cache, tokens[: have * SIZE])
    claim = cache.claim(block_hashes(tokens, SIZE, []), count, spare=spare, most_new=most_new)
    shared = min(have, count)
    possible = count + spare <= 12 and (most_new is None or count - shared <= most_new)
    assert (claim is not None) == possible
    assert cache.held == (count if possible else 0)
    if claim is None:
        assert cache.cached == have  # nothing was evicted in vain
    else:
        assert (len(set(claim.blocks)), claim.cached) == (count, shared)
        cache.release(claim.blocks)
        assert (cache.held, cache.available) == (0, 12)


def test_what_is_claimed_is_not_evicted() -> None:
    cache = BlockCache(4)
    hashes = block_hashes(range(8), SIZE, [])
    fill(cache, list(range(8)))
    claim = cache.claim(hashes, 2)
    assert claim is not None and claim.cached == 2
    assert cache.claim([], 3) is None
    assert cache.allocate() is not None and cache.allocate() is not None
    assert cache.allocate() is None
    cache.release(claim.blocks)
    assert cache.allocate() == claim.blocks[1]  # the first is reused last
    again = cache.claim(hashes, 1)
    assert again == Claim((claim.blocks[0],), 1)


def test_two_threads_never_get_the_same_block_to_write() -> None:
    """Each writes its name into the blocks that are its own; a prefix's blocks keep their hash."""
    cache = BlockCache(24)
    content: list[object] = [None] * 24
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for _ in range(3000):
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 8))]
            hashes = block_hashes(tokens, SIZE, [])
            claim = cache.claim(hashes, len(hashes))
            if claim is None:
                continue
            for number, block in enumerate(claim.blocks):
                if number < claim.cached:
                    assert content[block] == hashes[number]
                else:
                    content[block] = hashes[number]
            cache.index(zip(hashes, claim.blocks, strict=True))
            for number, block in enumerate(claim.blocks):
                assert content[block] == hashes[number]
            cache.release(claim.blocks)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, seed) for seed in (1, 2)]:
            done.result()
    assert (cache.held, cache.available) == (0, 24)

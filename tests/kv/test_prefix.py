"""The prefix index: matches are exactly common prefixes of full blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.prefix import PrefixIndex, block_hashes

TOKENS = st.lists(st.integers(0, 2), max_size=24)


@given(a=TOKENS, b=TOKENS, size=st.integers(1, 5))
def test_a_match_is_the_common_prefix_in_full_blocks(a: list[int], b: list[int], size: int) -> None:
    index = PrefixIndex()
    for block, digest in enumerate(block_hashes(a, size, [])):
        assert index.insert(digest, block)
    common = 0
    while (common + 1) * size <= min(len(a), len(b)) and (
        a[: (common + 1) * size] == b[: (common + 1) * size]
    ):
        common += 1
    assert index.match(block_hashes(b, size, [])) == list(range(common))


@given(tokens=TOKENS, cut=st.integers(0, 24), size=st.integers(1, 5))
def test_hashes_extend_what_is_known(tokens: list[int], cut: int, size: int) -> None:
    known = block_hashes(tokens[:cut], size, [])
    assert block_hashes(tokens, size, known) == block_hashes(tokens, size, [])
    assert len(known) == len(tokens) // size


def test_large_token_ids_are_told_apart() -> None:
    assert block_hashes([1, 0], 2, []) != block_hashes([0, 1], 2, [])
    assert block_hashes([256], 1, []) != block_hashes([1], 1, [])


def test_the_first_block_with_a_content_stays() -> None:
    index = PrefixIndex()
    (digest,) = block_hashes([1, 2], 2, [])
    assert index.insert(digest, 5)
    assert not index.insert(digest, 6)
    assert index.match([digest]) == [5]
    index.remove(6)
    assert index.match([digest]) == [5]
    index.remove(5)
    assert index.match([digest]) == []
    assert index.insert(digest, 6), "both of its entries are gone"


def test_a_hole_ends_the_match() -> None:
    index = PrefixIndex()
    hashes = block_hashes(range(6), 2, [])
    for block, digest in enumerate(hashes):
        index.insert(digest, block)
    index.remove(1)
    assert index.match(hashes) == [0]

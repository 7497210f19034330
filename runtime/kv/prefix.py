"""The prefix index: which block holds the KV of which tokens after which prefix.

Owns the chained hashes of full blocks and the map from hash to block. Knows no reference counts and
no eviction order: the allocator says when a block's content is gone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_ROOT = b"pdctl-kv"


def block_hashes(tokens: Sequence[int], block_size: int, known: list[bytes]) -> list[bytes]:
    """Extends `known`, hashes of the first full blocks, to all full blocks of `tokens`.

    A hash covers its block's tokens and everything before. It is a cryptographic one: tokens come
    from clients, and a collision would show one client another's text.
    """
    for number in range(len(known), len(tokens) // block_size):
        parent = known[-1] if known else _ROOT
        block = array("i", tokens[number * block_size : (number + 1) * block_size])
        known.append(hashlib.sha256(parent + block.tobytes()).digest())
    return known


class PrefixIndex:
    """Not for two threads at once: BlockCache has the lock."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix, in order."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, digest: bytes, block: int) -> bool:
        """False, and nothing changes, when another block has this content or this one another's."""
        if digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    def remove(self, block: int) -> None:
        """The block's content is gone. Blocks that were not inserted are ignored."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

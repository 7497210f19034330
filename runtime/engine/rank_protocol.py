"""Messages between rank 0 and the other ranks of a tensor-parallel instance.

Frames of `runtime.link` over one inherited socket pair per rank; ToRank one way, FromRank back.
"""

from __future__ import annotations

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one sequence, to be computed in one step."""

    start: int
    """Position of the first of them."""
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    """Device blocks of the sequence, up to the last of these tokens."""
    samples: bool
    """The logits after the last token are wanted."""


class RankUp(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has started."""


class RankStart(msgspec.Struct, frozen=True, tag=True):
    """Join the others and load."""


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has its part of the model."""


class Step(msgspec.Struct, frozen=True, tag=True):
    chunks: tuple[Chunk, ...]


ToRank = RankStart | Step
FromRank = RankUp | RankLoaded

"""A runner without a model that checks the blocks the scheduler gives it to read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.engine.sequence import Work

VOCAB = 11
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """What the fake model says after these tokens; every tenth time or so the end."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


@dataclass
class FakeRunner:
    """Keeps (token, position) where the model would keep K and V, and checks it like attention."""

    block_size: int
    budget: int = 1 << 30
    num_layers: int = 1
    cells: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    """Ids whose work raises."""
    nan: set[str] = field(default_factory=set)
    """Ids whose logits are not finite."""

    def put(self, blocks: Sequence[int], tokens: Sequence[int], positions: Iterable[int]) -> None:
        for position in positions:
            cell = (blocks[position // self.block_size], position % self.block_size)
            self.cells[cell] = (tokens[position], position)

    def save(self, blocks: Sequence[int]) -> list[tuple[int, int] | None]:
        """What the cells of these blocks hold, in order."""
        return [self.cells.get((block, s)) for block in blocks for s in range(self.block_size)]

    def restore(
        self, blocks: Sequence[int], cached: int, saved: Sequence[tuple[int, int] | None]
    ) -> None:
        """Put back what `save` found, but for the first `cached` blocks."""
        for at in range(cached * self.block_size, len(saved)):
            cell = (blocks[at // self.block_size], at % self.block_size)
            if (value := saved[at]) is not None:
                self.cells[cell] = value

    def check(self, blocks: Sequence[int], tokens: Sequence[int], count: int) -> None:
        for position in range(count):
            cell = (blocks[position // self.block_size], position % self.block_size)
            assert self.cells[cell] == (tokens[position], position)

    def run(self, work: list[Work], on_layers: Callable[[int], None]) -> Tensor:
        assert work and sum(item.count for item in work) <= self.budget
        assert len({item.sequence.id for item in work}) == len(work)
        rows = []
        for item in work:
            sequence = item.sequence
            if sequence.id in self.fails:
                raise RuntimeError("this one breaks the model")
            end = sequence.num_computed + item.count
            assert item.count >= 1 and end <= len(sequence.tokens)
            self.put(sequence.blocks, sequence.tokens, range(sequence.num_computed, end))
            self.check(sequence.blocks, sequence.tokens, end)
            if item.samples:
                row = torch.zeros(VOCAB)
                row[next_token(sequence.tokens)] = torch.nan if sequence.id in self.nan else 1.0
                rows.append(row)
        for n in range(1, self.num_layers):
            on_layers(n)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

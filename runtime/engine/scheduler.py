"""Continuous batching: who computes how many tokens in the next step, and who holds blocks.

First come, first served. Decodes go first, then prompt chunks, within one budget of tokens. Out of
blocks, the latest sequence makes room: one of mode decode leaves, and its KV may be kept elsewhere;
others are put back and computed again. Knows no model, events or clock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from runtime.engine.sequence import Sequence, State, Work
from runtime.kv.cache import BlockCache
from runtime.kv.prefix import block_hashes
from runtime.protocol import RequestId


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_queued: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does."""

    work: list[Work] = field(default_factory=list)
    adopted: list[Sequence] = field(default_factory=list)
    """Mode decode: just got their blocks."""
    leaving: list[Sequence] = field(default_factory=list)
    """Mode decode: just lost the right to theirs."""
    cached: list[Sequence] = field(default_factory=list)
    """Just admitted with part of their tokens found in the prefix cache."""


class Scheduler:
    def __init__(self, cache: BlockCache, limits: Limits, prefix_cache: bool) -> None:
        self._limits = limits
        self._prefix_cache = prefix_cache
        self._cache = cache
        self.preemptions = 0
        self.eased = False
        """Set when less waits, less runs, or more blocks are free or cached than before."""
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: deque[Sequence] = deque()  # in order of arrival
        self._running: list[Sequence] = []  # in order of arrival
        self._leaving: list[Sequence] = []
        self._promised = 0
        """Of the blocks that come free, those that this step's sequences wait for."""

    @property
    def num_waiting(self) -> int:
        """Those on their way out are on their way into the queue."""
        return len(self._waiting) + len(self._leaving)

    @property
    def num_active(self) -> int:
        return len(self._sequences) - self.num_waiting

    @property
    def queue_full(self) -> bool:
        return len(self._waiting) >= self._limits.max_queued

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        assert sequence.id not in self._sequences, f"request {sequence.id} is already here"
        self._sequences[sequence.id] = sequence
        self._waiting.append(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """It comes with all blocks of its prompt, claimed by whoever fills them."""
        assert sequence.id not in self._sequences, f"request {sequence.id} is already here"
        self._sequences[sequence.id] = sequence
        sequence.state = State.ADOPTED

    def resume(self, sequence: Sequence, first: int) -> None:
        """The KV of an adopted sequence's prompt is in place; `first` is its output token 0."""
        assert sequence.state is State.ADOPTED, f"request {sequence.id} is {sequence.state.name}"
        sequence.num_computed = sequence.prompt_len
        sequence.tokens.append(first)
        sequence.resumed = True
        self.eased = True
        self._run(sequence)
        self._index_blocks(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget it, in any state, and give its blocks back."""
        del self._sequences[sequence.id]
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self._running.remove(sequence)
        elif sequence.state is State.LEAVING:
            self._leaving.remove(sequence)
        self._free(sequence)

    def swapped_out(self, sequence: Sequence, kept: bool) -> None:
        """Nobody reads its blocks any more. `kept`: it need not be computed again."""
        assert sequence.state is State.LEAVING, f"request {sequence.id} is {sequence.state.name}"
        self._leaving.remove(sequence)
        sequence.kept = sequence.num_computed if kept else 0
        self._requeue(sequence)

    def swapped_in(self, sequence: Sequence) -> None:
        """What was kept is in its blocks."""
        assert sequence.state is State.ADOPTED, f"request {sequence.id} is {sequence.state.name}"
        cached = sequence.num_indexed * self._limits.block_size
        sequence.num_computed, sequence.kept = max(sequence.kept, cached), 0
        self._run(sequence)
        self._index_blocks(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Mode prefill, computed: it runs no more and keeps its blocks."""
        self._running.remove(sequence)
        sequence.state = State.HELD

    def schedule(self) -> Plan:
        plan = Plan()
        self._promised = 0
        budget = self._schedule_decodes(plan, self._limits.max_num_batched_tokens)
        budget = self._schedule_chunks(plan, budget)
        self._admit(plan, budget)
        return plan

    def computed(self, work: Work) -> None:
        """The work was done: its tokens' KV is final."""
        work.sequence.num_computed += work.count
        self._index_blocks(work.sequence)

    # ---- the three parts of a step ----------------------------------------------------------

    def _schedule_decodes(self, plan: Plan, budget: int) -> int:
        for sequence in [s for s in self._running if s.remaining == 1 and s.num_output]:
            if budget == 0 or sequence.state is not State.RUNNING:
                continue  # made room just now, for an earlier one
            if self._grow(sequence, plan):
                plan.work.append(Work(sequence, 1))
                budget -= 1
        return budget

    def _schedule_chunks(self, plan: Plan, budget: int) -> int:
        for sequence in self._running:
            if sequence.remaining == 1 and sequence.num_output:
                continue
            if budget == 0:
                break
            count = min(sequence.remaining, budget)
            plan.work.append(Work(sequence, count))
            budget -= count
        return budget

    def _admit(self, plan: Plan, budget: int) -> None:
        while self._waiting and self._num_scheduled() < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            handed_over = sequence.adopts and not sequence.kept
            if not (sequence.adopts or budget) or not self._claim(sequence, share=not handed_over):
                break
            self._waiting.popleft()
            self.eased = True
            if sequence.adopts:
                sequence.state = State.ADOPTED
                plan.adopted.append(sequence)
                continue
            self._run(sequence)
            if sequence.num_computed:
                plan.cached.append(sequence)
            count = min(sequence.remaining, budget)
            plan.work.append(Work(sequence, count))
            budget -= count

    # ---- blocks -----------------------------------------------------------------------------

    def _claim(self, sequence: Sequence, share: bool) -> bool:
        """Blocks for all tokens it has, leading ones from the prefix cache if it may share."""
        needed = -(-len(sequence.tokens) // self._limits.block_size)
        # Each growing sequence keeps a block to grow into, else this one would soon be put back.
        growing = sum(s.mode != "prefill" for s in self._sequences.values() if s.blocks)
        hashes = self._reusable(sequence) if share else []
        claim = self._cache.claim(hashes, needed, spare=growing)
        if claim is None:
            return False
        sequence.blocks = list(claim.blocks)
        sequence.num_computed = claim.cached * self._limits.block_size
        sequence.num_indexed = claim.cached
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.num_computed
        return True

    def _reusable(self, sequence: Sequence) -> list[bytes]:
        """Hashes of all but its last token, so that at least one token is computed."""
        if not self._prefix_cache:
            return []
        size = self._limits.block_size
        hashes = block_hashes(sequence.tokens, size, sequence.hashes)
        return hashes[: (len(sequence.tokens) - 1) // size]

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """A block for its next token. False: later sequences, or last this one itself, had to make
        room, and their blocks are not free yet.
        """
        if sequence.num_computed < len(sequence.blocks) * self._limits.block_size:
            return True
        while (block := self._cache.allocate()) is None:
            if self._promised < sum(len(s.blocks) for s in self._leaving):
                self._promised += 1
                return False
            victim = next(s for s in reversed(self._running) if s.preemptible)
            self._make_room(victim, plan)
            if victim is sequence:
                return False
        sequence.blocks.append(block)
        return True

    def _make_room(self, sequence: Sequence, plan: Plan) -> None:
        self._running.remove(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        if sequence.mode == "decode" and sequence.num_computed:
            sequence.state = State.LEAVING
            self._leaving.append(sequence)
            plan.leaving.append(sequence)
        else:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.state = State.WAITING
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _index_blocks(self, sequence: Sequence) -> None:
        """Offers blocks that became full to the prefix index."""
        if not self._prefix_cache:
            return
        full = sequence.num_computed // self._limits.block_size
        if full == sequence.num_indexed:
            return
        hashes = block_hashes(sequence.tokens, self._limits.block_size, sequence.hashes)
        new = slice(sequence.num_indexed, full)
        self._cache.index(zip(hashes[new], sequence.blocks[new], strict=True))
        sequence.num_indexed = full

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=lambda s: s.order)

    def _free(self, sequence: Sequence) -> None:
        self.eased = True
        self._cache.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_indexed = 0

    def _num_scheduled(self) -> int:
        """Sequences that run or soon will: all but the waiting and the held ones."""
        return sum(s.state in (State.RUNNING, State.ADOPTED) for s in self._sequences.values())

"""One request inside the engine, and one piece of work on it.

Plain state: the scheduler changes it, the runner and the core read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from runtime.engine.contract import EngineRequest, Mode
from runtime.protocol import RequestId, SamplingParams


class State(Enum):
    WAITING = auto()
    """In the queue, holds no blocks."""
    ADOPTED = auto()
    """Mode decode: holds blocks that someone else fills; waits for resume."""
    RUNNING = auto()
    LEAVING = auto()
    """Mode decode: runs no more; its blocks are being saved and then free."""
    HELD = auto()
    """Mode prefill: computed; holds its blocks until dropped."""


@dataclass(slots=True, eq=False)
class Sequence:
    """KV of the first `num_computed` of `tokens` is final, in `blocks`."""

    id: RequestId
    mode: Mode
    params: SamplingParams
    prompt_len: int
    tokens: list[int]
    """The prompt, then the output so far."""
    hashes: list[bytes]
    """Of its first full blocks, as far as somebody needed them."""
    order: int
    """Of arrival: earlier ones are served first and preempted last."""
    limit: int
    """Tokens, prompt and output, after which it must end."""
    submitted: float

    # Set by the scheduler.
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_indexed: int = 0
    """Leading blocks that were offered to the prefix index."""
    cached_tokens: int = 0
    preemptions: int = 0
    resumed: bool = False
    """Mode decode: its prompt's KV was handed over once."""
    kept: int = 0
    """Mode decode, swapped out: tokens whose KV someone else keeps."""

    # Set by the core, for the timings.
    started: float | None = None

    @classmethod
    def of(cls, request: EngineRequest, order: int, limit: int, now: float) -> Sequence:
        return cls(
            id=request.id,
            mode=request.mode,
            params=request.params,
            prompt_len=len(request.prompt),
            tokens=list(request.prompt),
            hashes=request.hashes,
            order=order,
            limit=limit,
            submitted=now,
        )

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def adopts(self) -> bool:
        """Someone else fills the blocks that it gets next."""
        return self.mode == "decode" and (not self.resumed or self.kept > 0)

    @property
    def preemptible(self) -> bool:
        """Nobody else reads or writes its blocks, so they can be taken and computed again."""
        return self.state is State.RUNNING and self.mode != "prefill"


@dataclass(frozen=True, slots=True)
class Work:
    """Compute KV of the next `count` tokens of a sequence; sample when they are the last it has."""

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        return self.count == self.sequence.remaining

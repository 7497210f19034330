"""What the engine core is to the rest of its process: requests in, events out.

The engine runs on its own thread and owns the device pool. Everything else in the process (front
link, hand-over) runs on the asyncio thread and talks to it through `EngineControl` (thread-safe,
never blocks) and the `emit` callback it was built with (called on the engine thread; must return at
once).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtime.kv.copies import PoolCopies
from runtime.kv.layout import KvLayout, PoolMap
from runtime.kv.region import Region
from runtime.protocol import FinishReason, OutputToken, RequestId, SamplingParams

Mode = Literal["generate", "prefill", "decode"]
"""
generate  compute the prompt here and decode here (mixed instances)
prefill   compute the prompt, sample one token, then hold the blocks until dropped
decode    allocate device blocks for a prompt whose KV someone else puts there, wait for `resume`,
          then decode
"""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    mode: Mode
    hashes: list[bytes] = field(default_factory=list, repr=False, compare=False)
    """Of the prompt's first full blocks (kv.prefix.block_hashes), as far as somebody needed them.
    The engine's from `submit`, or an `adopt` that gave blocks, on."""


@dataclass(frozen=True, slots=True)
class Produced:
    """New tokens. In mode `prefill` exactly one token, emitted before the last Computed.

    With `finish` in mode generate and decode, the request's blocks are already free and the id
    forgotten. In mode prefill they stay held until `drop`. The timings are set with a request's
    first tokens.
    """

    id: RequestId
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None
    cached_tokens: int = 0
    queue_s: float = 0.0
    """Submission to the start of the first chunk."""
    prefill_s: float = 0.0
    """Start of the first chunk to the first token."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Mode prefill: KV of the prompt's first `num_tokens` positions is final in the model's first
    `layers` layers, in `blocks` (in prompt order).

    With fewer layers than the model has, the step is still under way; the same again with more
    layers follows. Steps before it are final in all layers.
    """

    id: RequestId
    num_tokens: int
    blocks: tuple[int, ...]
    layers: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """Mode decode: these device blocks, one per prompt block, are the request's; put its KV there,
    then `resume`; after a SwapOut that was kept, put back what was saved, then `swapped_in`. The
    first `cached` hold theirs already: other requests may read them, nobody may write them."""

    id: RequestId
    blocks: tuple[int, ...]
    cached: int = 0


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Mode decode: the engine is out of device blocks and this request has to make room. Save what
    these blocks hold, if there is a place for it, then call `swapped_out`; nobody writes them
    meanwhile."""

    id: RequestId
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The request cannot be served; the engine has forgotten it and holds nothing for it."""

    id: RequestId
    message: str
    status: int
    code: str | None = None
    """As in `protocol.Failed`."""


@dataclass(frozen=True, slots=True)
class Freed:
    """`adopt` was refused, last for this request; what it lacked may be there now. Once after a
    refusal: who still wants blocks asks again."""

    id: RequestId


EngineEvent = Produced | Computed | Adopted | SwapOut | EngineFailed | Freed


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int
    running: int
    device_blocks_total: int
    device_blocks_held: int
    device_blocks_cached: int
    counters: dict[str, float]


class EngineControl(Protocol):
    """The engine as other threads see it. No method blocks; each takes effect at the next engine
    step."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def layout(self) -> KvLayout:
        """Of whole blocks: all KV heads of the model, as the CPU buffer and the peers have them."""

    @property
    def pool(self) -> Region:
        """The device pools' memory, of all ranks."""

    @property
    def copies(self) -> PoolCopies:
        """Between `pool` and host memory."""

    @property
    def pool_map(self) -> PoolMap:
        """Where in `pool` the parts of a block lie."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Its first event may be EngineFailed (queue full: 503; can never fit:
        400)."""

    def adopt(self, request: EngineRequest, most_new: int) -> Adopted | None:
        """Mode decode: device blocks for the prompt at once, leading ones from the prefix cache,
        when it could run soon and at most `most_new` of them are not cached. As after `submit` and
        its Adopted from then on. None: the engine knows nothing of it, and emits Freed when it is
        worth another try.

        For the thread that calls the other methods, and all-or-nothing: a request never holds some
        device blocks while it waits for others."""

    def resume(self, request_id: RequestId, first: OutputToken) -> None:
        """Mode decode: the KV of the whole prompt is in place; `first` is output token 0 (already
        streamed)."""

    def swapped_out(self, request_id: RequestId, kept: bool) -> None:
        """Answers SwapOut: its blocks are not read any more. Not `kept`: the engine computes the KV
        again. Kept: an Adopted follows when there are blocks again."""

    def swapped_in(self, request_id: RequestId) -> None:
        """What was kept is in the blocks of the last Adopted: decoding goes on."""

    def drop(self, request_id: RequestId) -> None:
        """Stop the request in any mode and state and free its blocks; no event follows. Unknown ids
        are ignored.

        The caller has stopped all copies into and out of the request's blocks before it calls this.
        """

    def stats(self) -> EngineStats: ...

"""One engine step: schedule, run, postprocess; and what requests do between steps.

Owns the life of a request inside the engine and the events it gives rise to. Single-threaded:
knows no locks and no loop (core.py), no model (runner.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.engine.contract import (
    Adopted,
    Computed,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    EngineStats,
    Produced,
    SwapOut,
)
from runtime.engine.early import leaves_after
from runtime.engine.finish import finish_reason
from runtime.engine.sampler import is_plain, sample, unusable
from runtime.engine.scheduler import Limits, Plan, Scheduler
from runtime.engine.sequence import Sequence, Work
from runtime.errors import TOO_LONG, RankError, RequestError
from runtime.kv.cache import BlockCache, Claim
from runtime.kv.layout import KvLayout
from runtime.kv.prefix import block_hashes
from runtime.protocol import FinishReason, OutputToken, RequestId

log = logging.getLogger(__name__)


class ModelRunner(Protocol):
    """What a step needs of the model; tests put a small fake here."""

    def run(self, work: list[Work], on_layers: Callable[[int], None]) -> Tensor:
        """Computes the work's KV. Logits [n, vocab]: a row for each work that samples, in order.

        May call `on_layers(n)`, for n below the model's layers and rising, once the work's KV is
        final in the first n layers.
        """


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must keep to."""

    context: int
    """Tokens, prompt and output, that the model and the configuration allow."""
    capacity: int
    """Tokens whose KV the pool holds."""
    vocab: int
    eos_token_ids: tuple[int, ...]


class Stepper:
    def __init__(
        self,
        num_blocks: int,
        limits: Limits,
        prefix_cache: bool,
        bounds: Bounds,
        layout: KvLayout,
        runner: ModelRunner,
    ) -> None:
        self._cache = BlockCache(num_blocks)
        self._scheduler = Scheduler(self._cache, limits, prefix_cache)
        self._prefix_cache = prefix_cache
        self._block_size = limits.block_size
        self._bounds = bounds
        self._layout = layout
        self._eos: Collection[int] = frozenset(bounds.eos_token_ids)
        self._runner = runner
        self._arrivals = 0
        self._events: list[EngineEvent] = []
        self._counters = dict.fromkeys(
            ("requests_finished", "prompt_tokens", "cached_tokens", "output_tokens", "steps"), 0.0
        )

    # ---- any thread, any time ---------------------------------------------------------------

    def hash_prompt(self, request: EngineRequest) -> list[bytes]:
        """Of all its full blocks, for the prefix cache: milliseconds for a long one, but once."""
        if not self._prefix_cache:
            return []
        return block_hashes(request.prompt, self._block_size, request.hashes)

    def claim(self, request: EngineRequest, spare: int, most_new: int) -> Claim | None:
        """Blocks of the prompt for `adopt`, which must follow, if there are `spare` more. Cached
        ones count from its first full block to its last: prefill samples the first token."""
        count = -(-len(request.prompt) // self._block_size)
        return self._cache.claim(self.hash_prompt(request), count, spare=spare, most_new=most_new)

    # ---- between steps ----------------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        self._scheduler.eased = True  # there is one less that only arrives
        if self._scheduler.get(request.id) is not None:
            log.error("request %s: a second request with this id is ignored", request.id)
            return
        if why := self._impossible(request):
            self._events.append(EngineFailed(request.id, str(why), why.status, why.code))
        elif self._scheduler.queue_full:
            self._events.append(EngineFailed(request.id, "the queue of the engine is full", 503))
        else:
            self._arrivals += 1
            limit = self._limit(request)
            self._scheduler.add(Sequence.of(request, self._arrivals, limit, now))

    def adopt(self, request: EngineRequest, claim: Claim, now: float) -> None:
        """A request of mode decode that was admitted, with its blocks."""
        assert self._scheduler.get(request.id) is None, f"request {request.id} is already here"
        self._arrivals += 1
        sequence = Sequence.of(request, self._arrivals, self._limit(request), now)
        sequence.blocks = list(claim.blocks)
        sequence.num_indexed = claim.cached
        sequence.cached_tokens = claim.cached * self._block_size
        self._scheduler.adopt(sequence)

    def resume(self, request_id: RequestId, first: OutputToken) -> None:
        sequence = self._scheduler.get(request_id)
        if sequence is None:
            return  # dropped meanwhile
        self._scheduler.resume(sequence, first.token)
        # Prefill checked this already, but this instance's pool may allow less.
        if reason := self._finish_reason(sequence, first.token):
            self._events.append(Produced(request_id, (), reason))
            self._end(sequence)

    def swapped_out(self, request_id: RequestId, kept: bool) -> None:
        if sequence := self._scheduler.get(request_id):
            self._scheduler.swapped_out(sequence, kept)

    def swapped_in(self, request_id: RequestId) -> None:
        if sequence := self._scheduler.get(request_id):
            self._scheduler.swapped_in(sequence)

    def drop(self, request_id: RequestId) -> None:
        sequence = self._scheduler.get(request_id)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            waiting=scheduler.num_waiting,
            running=scheduler.num_active,
            device_blocks_total=self._cache.num_blocks,
            device_blocks_held=self._cache.held,
            device_blocks_cached=self._cache.cached,
            counters={**self._counters, "preemptions": float(scheduler.preemptions)},
        )

    def take_events(self) -> list[EngineEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_eased(self) -> bool:
        """Whether `Engine.adopt` may give since the last call what it refused before."""
        eased, self._scheduler.eased = self._scheduler.eased, False
        return eased

    # ---- a step -----------------------------------------------------------------------------

    def step(self, flush: Callable[[], None]) -> bool:
        """False when there was nothing to do. `flush` lets events out before the long part."""
        plan = self._scheduler.schedule()
        self._announce(plan)
        flush()
        if plan.work:
            self._postprocess(self._run(plan.work, flush))
            self._counters["steps"] += 1
        return bool(plan.work or plan.adopted or plan.leaving)

    def _announce(self, plan: Plan) -> None:
        now = time.monotonic()
        for work in plan.work:
            if work.sequence.started is None:
                work.sequence.started = now
        for sequence in plan.adopted:
            blocks = self._blocks_of(sequence, sequence.kept or sequence.prompt_len)
            cached = min(sequence.num_indexed, len(blocks))
            self._events.append(Adopted(sequence.id, blocks, cached))
        for sequence in plan.leaving:
            blocks = self._blocks_of(sequence, sequence.num_computed)
            self._events.append(SwapOut(sequence.id, blocks))
        for sequence in plan.cached:
            self._tell_computed(sequence)

    def _run(
        self, works: list[Work], flush: Callable[[], None]
    ) -> list[tuple[Work, Tensor | None]]:
        """The work that was done, with its row of logits if it samples."""
        try:
            rows = iter(self._runner.run(works, lambda n: self._tell_layers(works, n, flush)))
            return [(work, next(rows) if work.samples else None) for work in works]
        except RankError:
            raise
        # The per-request boundary: one request's failure is not the others'.
        except Exception as e:
            if len(works) > 1:
                log.warning("a step of %d requests failed (%s): trying each alone", len(works), e)
                return [done for work in works for done in self._run([work], flush)]
            log.exception("request %s: the model failed", works[0].sequence.id)
            self._fail(works[0].sequence, f"the model failed: {type(e).__name__}")
            return []

    def _postprocess(self, done: list[tuple[Work, Tensor | None]]) -> None:
        for work, row in done:
            sequence = work.sequence
            self._scheduler.computed(work)
            if row is None:
                self._tell_computed(sequence)
                continue
            try:
                token = self._sample(sequence, row)
            # The per-request boundary, as in `_run`.
            except Exception as e:
                log.exception("request %s: sampling failed", sequence.id)
                self._fail(sequence, f"sampling failed: {type(e).__name__}")
                continue
            if token is None:
                self._fail(sequence, "the model's logits are not finite")
                continue
            sequence.tokens.append(token.token)
            self._produced(sequence, token, self._finish_reason(sequence, token.token))

    def _sample(self, sequence: Sequence, row: Tensor) -> OutputToken | None:
        best = row.max(-1)
        if not best.values.isfinite():
            return None
        if is_plain(sequence.params):
            return OutputToken(int(best.indices))
        prompt_len = sequence.prompt_len
        tokens = sequence.tokens
        return sample(row, sequence.params, tokens[:prompt_len], tokens[prompt_len:])

    def _produced(
        self, sequence: Sequence, token: OutputToken, finish: FinishReason | None
    ) -> None:
        self._counters["output_tokens"] += 1
        self._events.append(
            self._first(sequence, token, finish) or Produced(sequence.id, (token,), finish)
        )
        if sequence.mode == "prefill":
            self._tell_computed(sequence)
            self._scheduler.hold(sequence)
            self._counters["requests_finished"] += 1
        elif finish:
            self._end(sequence)

    def _first(
        self, sequence: Sequence, token: OutputToken, finish: FinishReason | None
    ) -> Produced | None:
        """The Produced of output token 0, with the timings of its computation."""
        if sequence.num_output != 1:
            return None
        assert sequence.started is not None
        self._counters["prompt_tokens"] += sequence.prompt_len
        self._counters["cached_tokens"] += sequence.cached_tokens
        return Produced(
            sequence.id,
            (token,),
            finish,
            cached_tokens=sequence.cached_tokens,
            queue_s=sequence.started - sequence.submitted,
            prefill_s=time.monotonic() - sequence.started,
        )

    # ---- small parts ------------------------------------------------------------------------

    def _tell_computed(self, sequence: Sequence) -> None:
        if sequence.mode == "prefill":
            tokens = sequence.num_computed
            blocks = self._blocks_of(sequence, tokens)
            self._events.append(Computed(sequence.id, tokens, blocks, self._layout.num_layers))

    def _tell_layers(self, works: list[Work], layers: int, flush: Callable[[], None]) -> None:
        """In the middle of a step: what may leave already."""
        layer_bytes = self._layout.token_bytes // self._layout.num_layers
        for work in works:
            sequence = work.sequence
            if sequence.mode == "prefill" and leaves_after(
                layers, self._layout.num_layers, work.count * layer_bytes
            ):
                tokens = sequence.num_computed + work.count
                blocks = self._blocks_of(sequence, tokens)
                self._events.append(Computed(sequence.id, tokens, blocks, layers))
        if self._events:
            flush()

    def _blocks_of(self, sequence: Sequence, tokens: int) -> tuple[int, ...]:
        return tuple(sequence.blocks[: -(-tokens // self._block_size)])

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._counters["requests_finished"] += 1

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._scheduler.remove(sequence)
        self._events.append(EngineFailed(sequence.id, message, 500))

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        return finish_reason(
            sequence.params,
            token,
            sequence.num_output,
            len(sequence.tokens),
            sequence.limit,
            self._eos,
        )

    def _limit(self, request: EngineRequest) -> int:
        """A prefill instance's small pool must not end what decode could continue."""
        context = self._bounds.context
        return context if request.mode == "prefill" else min(context, self._bounds.capacity)

    def _impossible(self, request: EngineRequest) -> RequestError | None:
        """Why this request can never be served."""
        count, limit = len(request.prompt), self._limit(request)
        if count == 0:
            return RequestError("the prompt is empty")
        if request.params.max_tokens < 1:
            most = request.params.max_tokens
            return RequestError(f"max_tokens is {most}, and must be at least 1")
        if why := unusable(request.params):
            return RequestError(why)
        if count >= self._bounds.context:
            return RequestError(
                f"the prompt has {count} tokens, but the context holds {self._bounds.context} "
                "and at least one is for the output",
                code=TOO_LONG,
            )
        if count > self._bounds.capacity or count >= limit:
            return RequestError(
                f"the prompt has {count} tokens, but the KV cache of this instance holds "
                f"{self._bounds.capacity}",
                code=TOO_LONG,
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._bounds.vocab:
            return RequestError(f"the prompt has token ids outside 0..{self._bounds.vocab - 1}")
        return None

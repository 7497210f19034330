"""A Stepper on a fake model, and what that model generates by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtime.engine.contract import Adopted, EngineEvent, EngineRequest, Mode, Produced, SwapOut
from runtime.engine.finish import finish_reason
from runtime.engine.scheduler import Limits
from runtime.engine.stepper import Bounds, Stepper
from runtime.kv.layout import KvLayout
from runtime.protocol import FinishReason, RequestId, SamplingParams
from tests.engine.fake_runner import EOS, VOCAB, FakeRunner, next_token

CONTEXT = 40


@dataclass
class Bench:
    """A Stepper on the fake model, with its events by request."""

    num_blocks: int = 16
    block_size: int = 4
    budget: int = 8
    max_num_seqs: int = 8
    max_queued: int = 100
    prefix_cache: bool = True
    num_layers: int = 1
    events: list[EngineEvent] = field(default_factory=list)
    saved: dict[RequestId, list[tuple[int, int] | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.block_size, self.budget, self.num_layers)
        bounds = Bounds(CONTEXT, self.num_blocks * self.block_size, VOCAB, (EOS,))
        limits = Limits(self.block_size, self.budget, self.max_num_seqs, self.max_queued)
        layout = KvLayout(self.num_layers, 1, 1, self.block_size, "float32")
        self.stepper = Stepper(
            self.num_blocks, limits, self.prefix_cache, bounds, layout, self.runner
        )

    def submit(
        self, name: str, prompt: list[int], mode: Mode = "generate", **params: Any
    ) -> EngineRequest:
        chosen = SamplingParams(**{"max_tokens": 6, "temperature": 0, **params})
        request = EngineRequest(RequestId(name), tuple(prompt), chosen, mode)
        self.stepper.submit(request, 0.0)
        return request

    def step(self) -> bool:
        worked = self.stepper.step(lambda: None)
        events = self.stepper.take_events()
        self.events += events
        self.new = len(events)
        return worked

    def finish(self, keep: bool = True) -> None:
        """Step until nothing happens, saving what has to make room if told to keep it."""
        while self.step():
            for event in self.events[len(self.events) - self.new :]:
                self.swap(event, keep)

    def swap(self, event: EngineEvent, keep: bool) -> None:
        if isinstance(event, SwapOut):
            if keep:
                self.saved[event.id] = self.runner.save(event.blocks)
            self.stepper.swapped_out(event.id, keep)
        elif isinstance(event, Adopted) and event.id in self.saved:
            self.runner.restore(event.blocks, event.cached, self.saved.pop(event.id))
            self.stepper.swapped_in(event.id)

    def of(self, name: str) -> list[EngineEvent]:
        return [event for event in self.events if event.id == name]

    def tokens(self, name: str) -> list[int]:
        produced = [event for event in self.of(name) if isinstance(event, Produced)]
        return [output.token for event in produced for output in event.tokens]

    def idle(self) -> bool:
        stats = self.stepper.stats()
        return (stats.waiting, stats.running, stats.device_blocks_held) == (0, 0, 0)


def oracle(request: EngineRequest, limit: int) -> tuple[list[int], FinishReason]:
    """What the fake model generates, with nothing of the engine but the finish rule."""
    tokens = list(request.prompt)
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - len(request.prompt)
        reason = finish_reason(request.params, tokens[-1], num_output, len(tokens), limit, (EOS,))
        if reason:
            return tokens[-num_output:], reason

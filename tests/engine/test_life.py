"""Random lives of many requests over a fake model that checks every block it is given to read."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.engine.contract import (
    Adopted,
    Computed,
    EngineFailed,
    EngineRequest,
    Mode,
    Produced,
    SwapOut,
)
from runtime.protocol import OutputToken, RequestId
from tests.engine.fake_runner import VOCAB, next_token
from tests.engine.stepper_bench import CONTEXT, Bench, oracle


class Life(RuleBasedStateMachine):
    """Random arrivals, resumes and drops: nothing leaks and every output is the oracle's."""

    @initialize(
        num_blocks=st.integers(6, 14),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        prefix_cache=st.booleans(),
    )
    def start(self, num_blocks: int, budget: int, max_num_seqs: int, prefix_cache: bool) -> None:
        self.bench = Bench(num_blocks, 4, budget, max_num_seqs, prefix_cache=prefix_cache)
        self.limit = min(CONTEXT, num_blocks * 4)
        self.requests: dict[RequestId, EngineRequest] = {}
        self.adopted: dict[RequestId, tuple[int, ...]] = {}
        self.held: dict[RequestId, Computed] = {}
        self.dropped: set[RequestId] = set()
        self.leaving: dict[RequestId, SwapOut] = {}
        self.seen = 0

    @rule(
        shared=st.integers(0, 14),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        mode=st.sampled_from(["generate", "generate", "prefill", "decode"]),
        max_tokens=st.integers(1, 20),
    )
    def submit(self, shared: int, own: list[int], mode: Mode, max_tokens: int) -> None:
        prompt = [i % VOCAB for i in range(shared)] + own
        prompt = prompt[: self.limit - 1]
        name = f"r{len(self.requests)}"
        request = self.bench.submit(name, prompt, mode, max_tokens=max_tokens)
        self.requests[request.id] = request

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.bench.step()
        self.look()

    @precondition(lambda self: self.adopted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.resume_now(data.draw(st.sampled_from(sorted(self.adopted))))

    def resume_now(self, name: RequestId) -> None:
        blocks = self.adopted.pop(name)
        prompt = self.requests[name].prompt
        self.bench.runner.put(blocks, prompt, range(len(prompt)))
        first = next_token(prompt)
        if oracle(self.requests[name], self.limit)[0] == [first]:
            # Prefill saw that it ends with its first token: decode drops it instead.
            self.drop_now(name)
        else:
            self.bench.stepper.resume(name, OutputToken(first))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), keep=st.booleans())
    def save(self, data: st.DataObject, keep: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        self.bench.swap(self.leaving.pop(name), keep)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.drop_now(data.draw(st.sampled_from(sorted(self.requests))))

    def drop_now(self, name: RequestId) -> None:
        self.bench.stepper.drop(name)
        self.dropped.add(name)
        self.adopted.pop(name, None)
        self.held.pop(name, None)
        self.leaving.pop(name, None)

    def look(self) -> None:
        for event in self.bench.events[self.seen :]:
            if isinstance(event, Adopted) and event.id in self.bench.saved:
                self.bench.swap(event, keep=True)
            elif isinstance(event, Adopted):
                self.adopted[event.id] = event.blocks
            if isinstance(event, SwapOut) and event.id not in self.dropped:
                self.leaving[event.id] = event
            if isinstance(event, Computed) and event.id not in self.dropped:
                self.held[event.id] = event
            assert not isinstance(event, EngineFailed), event.message
        self.seen = len(self.bench.events)

    @invariant()
    def blocks_in_others_hands_are_theirs_alone(self) -> None:
        if hasattr(self, "bench"):
            filling = [block for blocks in self.adopted.values() for block in blocks]
            reading = {block for event in self.held.values() for block in event.blocks}
            assert len(filling) == len(set(filling))
            assert not reading & set(filling)
            assert self.bench.stepper.stats().device_blocks_held >= len(filling) + len(reading)
            for name, event in self.held.items():
                prompt = self.requests[name].prompt
                self.bench.runner.check(event.blocks, prompt, event.num_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(10_000):
            worked = self.bench.step()
            self.look()
            for name in [n for n in self.held if self.finished_prefill(n)]:
                self.drop_now(name)
            for name in list(self.adopted):
                self.resume_now(name)
            for name in list(self.leaving):
                self.bench.swap(self.leaving.pop(name), keep=True)
            if not worked and self.bench.idle():
                break
        assert self.bench.idle()
        for name, request in self.requests.items():
            self.check_output(name, request)

    def finished_prefill(self, name: RequestId) -> bool:
        return bool(self.bench.tokens(name))

    def check_output(self, name: RequestId, request: EngineRequest) -> None:
        tokens = self.bench.tokens(name)
        expected, reason = oracle(request, self.limit)
        if request.mode == "decode":
            expected = expected[1:]
        if request.mode == "prefill":
            expected = expected[:1]
        if name in self.dropped:
            assert tokens == expected[: len(tokens)]
            return
        assert tokens == expected
        produced = [event for event in self.bench.of(name) if isinstance(event, Produced)]
        assert produced[-1].finish == reason


# Shrinking takes minutes here, and a failing run is readable as it is.
Life.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, phases=(Phase.explicit, Phase.generate)
)
TestLife = Life.TestCase

"""The life of requests over a fake model that checks every block it is given to read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.engine.contract import (
    Adopted,
    Computed,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Mode,
    Produced,
    SwapOut,
)
from runtime.engine.finish import finish_reason
from runtime.engine.scheduler import Limits
from runtime.engine.stepper import Bounds, Stepper
from runtime.protocol import FinishReason, OutputToken, RequestId, SamplingParams
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
    events: list[EngineEvent] = field(default_factory=list)
    saved: dict[RequestId, list[tuple[int, int] | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.block_size, self.budget)
        bounds = Bounds(CONTEXT, self.num_blocks * self.block_size, VOCAB, (EOS,))
        limits = Limits(self.block_size, self.budget, self.max_num_seqs, self.max_queued)
        self.stepper = Stepper(self.num_blocks, limits, self.prefix_cache, bounds, self.runner)

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


def test_generate_equals_the_oracle() -> None:
    bench = Bench()
    request = bench.submit("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], ignore_eos=True)
    bench.finish()
    assert bench.tokens("a") == oracle(request, CONTEXT)[0]
    assert [type(event) for event in bench.of("a")] == [Produced] * 6
    assert bench.of("a")[-1].finish == "length"
    assert bench.idle()


def test_prefill_emits_each_chunk_and_the_token_before_the_last() -> None:
    bench = Bench()
    prompt = [i % VOCAB for i in range(19)]
    bench.submit("p", prompt, "prefill")
    bench.finish()
    kinds = [type(event) for event in bench.of("p")]
    assert kinds == [Computed, Computed, Produced, Computed]
    computed = [event for event in bench.of("p") if isinstance(event, Computed)]
    assert [event.num_tokens for event in computed] == [8, 16, 19]
    assert [len(event.blocks) for event in computed] == [2, 4, 5]
    bench.runner.check(computed[-1].blocks, prompt, 19)
    assert bench.tokens("p") == [next_token(prompt)]
    assert bench.stepper.stats().device_blocks_held == 5
    bench.stepper.drop(RequestId("p"))
    assert bench.idle()


def test_prefill_with_a_cached_prefix_covers_it_at_once() -> None:
    bench = Bench()
    prompt = [i % VOCAB for i in range(18)]
    bench.submit("a", prompt, "prefill")
    bench.finish()
    bench.stepper.drop(RequestId("a"))
    bench.submit("b", [*prompt[:17], 9], "prefill")
    bench.finish()
    computed = [event for event in bench.of("b") if isinstance(event, Computed)]
    assert [event.num_tokens for event in computed] == [16, 18]
    (produced,) = (event for event in bench.of("b") if isinstance(event, Produced))
    assert produced.cached_tokens == 16
    counters = bench.stepper.stats().counters
    assert (counters["prompt_tokens"], counters["cached_tokens"]) == (36, 16)


def test_a_prompt_found_whole_still_computes_its_last_block() -> None:
    bench = Bench()
    prompt = [i % VOCAB for i in range(16)]
    for name in ("a", "b"):
        bench.submit(name, prompt, max_tokens=1)
        bench.finish()
    assert bench.tokens("a") == bench.tokens("b")
    assert bench.of("b")[0].cached_tokens == 12


def test_without_prefix_cache_nothing_is_shared() -> None:
    bench = Bench(prefix_cache=False)
    for name in ("a", "b"):
        bench.submit(name, [1] * 16, max_tokens=1)
        bench.finish()
    assert bench.of("b")[0].cached_tokens == 0
    assert bench.stepper.stats().device_blocks_cached == 0


def test_decode_continues_what_prefill_began() -> None:
    bench = Bench()
    prompt = [i % VOCAB for i in range(10)]
    request = bench.submit("d", prompt, "decode", ignore_eos=True)
    bench.finish()
    (adopted,) = bench.of("d")
    assert isinstance(adopted, Adopted) and len(adopted.blocks) == 3
    assert not bench.step()
    bench.runner.put(adopted.blocks, prompt, range(10))
    first = next_token(prompt)
    bench.stepper.resume(RequestId("d"), OutputToken(first))
    bench.finish()
    assert [first, *bench.tokens("d")] == oracle(request, CONTEXT)[0]
    assert bench.idle()


def test_a_claim_ahead_of_its_kv_shares_what_is_cached() -> None:
    bench = Bench()
    prompt = [i % VOCAB for i in range(16)]
    bench.submit("a", prompt, max_tokens=1)
    bench.finish()
    claim = bench.stepper.claim(tuple(prompt), 0, 0)
    assert claim is not None and claim.cached == 4
    assert bench.stepper.claim((9, *prompt), 0, 3) is None  # 5 new ones
    request = EngineRequest(
        RequestId("d"),
        tuple(prompt),
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
        "decode",
    )
    bench.stepper.adopt(request, claim, 0.0)
    assert not bench.step()
    first = next_token(prompt)
    bench.stepper.resume(RequestId("d"), OutputToken(first))
    bench.finish()
    assert [first, *bench.tokens("d")] == oracle(request, CONTEXT)[0]
    assert bench.idle()


def test_resume_after_drop_is_ignored() -> None:
    bench = Bench()
    bench.submit("d", [1, 2, 3], "decode")
    bench.step()
    bench.stepper.drop(RequestId("d"))
    bench.stepper.resume(RequestId("d"), OutputToken(4))
    assert not bench.step()
    assert bench.idle()


def test_the_latest_is_put_back_and_loses_nothing() -> None:
    bench = Bench(num_blocks=6, prefix_cache=False)
    requests = [
        bench.submit(name, [number] * 8, max_tokens=10, ignore_eos=True)
        for number, name in enumerate("ab")
    ]
    bench.finish()
    assert bench.stepper.stats().counters["preemptions"] > 0
    for request in requests:
        assert bench.tokens(request.id) == oracle(request, 24)[0]
    ends = [event.id for event in bench.events if isinstance(event, Produced) and event.finish]
    assert ends == ["a", "b"]


def decode_two(bench: Bench) -> tuple[EngineRequest, EngineRequest]:
    """Two handed-over requests that need more blocks than there are."""
    requests = [
        bench.submit(name, [number + 1] * 8, "decode", max_tokens=12, ignore_eos=True)
        for number, name in enumerate("ab")
    ]
    bench.step()
    for request in requests:
        (adopted,) = bench.of(request.id)
        assert isinstance(adopted, Adopted)
        bench.runner.put(adopted.blocks, request.prompt, range(8))
        first = next_token(list(request.prompt))
        bench.stepper.resume(request.id, OutputToken(first))
    return requests[0], requests[1]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_makes_room_comes_back_and_its_output_is_the_same(
    keep: bool, prefix_cache: bool
) -> None:
    bench = Bench(num_blocks=6, prefix_cache=prefix_cache)
    requests = decode_two(bench)
    bench.finish(keep)
    for request in requests:
        assert bench.tokens(request.id) == oracle(request, 24)[0][1:]
    assert [type(event) for event in bench.of("a")].count(SwapOut) == 0, "the earlier one stays"
    kinds = [type(event) for event in bench.of("b") if not isinstance(event, Produced)]
    assert kinds == ([Adopted, SwapOut, Adopted] if keep else [Adopted, SwapOut])
    computed = bench.stepper.stats().counters
    assert computed["preemptions"] == 1
    assert bench.idle()


def test_blocks_are_not_reused_before_they_are_saved() -> None:
    bench = Bench(num_blocks=6, prefix_cache=False)
    a, b = decode_two(bench)
    while not any(isinstance(event, SwapOut) for event in bench.events):
        bench.step()
    (event,) = (event for event in bench.events if isinstance(event, SwapOut))
    before = bench.runner.save(event.blocks)
    tokens = len(bench.tokens("a"))
    for _ in range(3):
        bench.step()
    # a waits for the blocks of b; nobody else is asked to make room for it, and none writes there.
    assert len(bench.tokens("a")) == tokens
    assert bench.runner.save(event.blocks) == before
    stats = bench.stepper.stats()
    assert (stats.waiting, stats.counters["preemptions"]) == (1, 1)
    bench.swap(event, keep=True)
    bench.finish()
    for request in (a, b):
        assert bench.tokens(request.id) == oracle(request, 24)[0][1:]


@pytest.mark.parametrize("after", ["SwapOut", "kept", "Adopted"])
def test_drop_in_every_state_of_a_swap(after: str) -> None:
    bench = Bench(num_blocks=6, prefix_cache=False)
    a, b = decode_two(bench)
    while not any(isinstance(event, SwapOut) for event in bench.events):
        bench.step()
    if after != "SwapOut":
        bench.swap(bench.of("b")[-1], keep=True)
    if after == "Adopted":
        while not isinstance(bench.of("b")[-1], Adopted):
            bench.step()
    bench.stepper.drop(b.id)
    bench.finish()
    assert bench.tokens("a") == oracle(a, 24)[0][1:]
    assert bench.idle()


def test_blocks_that_others_use_are_never_taken() -> None:
    bench = Bench(num_blocks=6)
    bench.submit("p", [1] * 8, "prefill")
    bench.submit("d", [2] * 8, "decode")
    bench.submit("g", [3] * 7, max_tokens=8, ignore_eos=True)
    bench.finish()
    (adopted,) = bench.of("d")
    computed = [event for event in bench.of("p") if isinstance(event, Computed)]
    assert isinstance(adopted, Adopted)
    held = set(adopted.blocks) | set(computed[-1].blocks)
    assert len(held) == 4
    # g fills the two blocks left, then waits: neither of the others may lose a block to it.
    assert len(bench.tokens("g")) < 8
    assert bench.stepper.stats().waiting == 1
    bench.stepper.drop(RequestId("p"))
    bench.finish()
    assert len(bench.tokens("g")) == 8


def test_a_prefill_under_way_is_never_put_back() -> None:
    bench = Bench(num_blocks=6, budget=3, prefix_cache=False)
    generated = bench.submit("g", [1] * 3, max_tokens=12, ignore_eos=True)
    bench.step()
    prompt = [2] * 16
    bench.submit("p", prompt, "prefill")
    while not bench.tokens("p"):
        assert bench.step()
    # g could not grow and had to wait, although p came later.
    assert bench.stepper.stats().counters["preemptions"] == 1
    computed = [event for event in bench.of("p") if isinstance(event, Computed)]
    assert [event.blocks for event in computed] == [
        computed[-1].blocks[: len(event.blocks)] for event in computed
    ]
    bench.runner.check(computed[-1].blocks, prompt, 16)
    bench.stepper.drop(RequestId("p"))
    bench.finish()
    assert bench.tokens("g") == oracle(generated, 24)[0]


def test_first_come_first_served() -> None:
    bench = Bench(max_num_seqs=2)
    for name in "abcde":
        bench.submit(name, [1, 2, 3], max_tokens=3, ignore_eos=True)
    bench.finish()
    firsts: list[str] = list(dict.fromkeys(event.id for event in bench.events))
    assert firsts == list("abcde")


def test_decodes_go_before_chunks() -> None:
    bench = Bench(budget=4)
    bench.submit("a", [1, 2, 3], max_tokens=5, ignore_eos=True)
    bench.step()
    bench.submit("b", [4] * 12, max_tokens=1)
    for _ in range(4):
        bench.step()
    # Four decode steps of a, beside four chunks of three tokens of b.
    assert len(bench.tokens("a")) == 5
    assert len(bench.tokens("b")) == 1


@pytest.mark.parametrize(
    ("prompt", "mode", "params", "message"),
    [
        ([], "generate", {}, "the prompt is empty"),
        ([1] * 40, "generate", {}, "the prompt has 40 tokens, but the context holds 40"),
        ([1] * 40, "prefill", {}, "the prompt has 40 tokens, but the context holds 40"),
        ([1] * 33, "prefill", {}, "the prompt has 33 tokens, but the KV cache .* holds 32"),
        ([1] * 32, "decode", {}, "the prompt has 32 tokens, but the KV cache .* holds 32"),
        ([1, VOCAB], "generate", {}, "token ids outside 0..10"),
        ([-1], "generate", {}, "token ids outside 0..10"),
        ([1], "generate", {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_impossible_requests_fail_at_once(
    prompt: list[int], mode: Mode, params: dict[str, Any], message: str
) -> None:
    bench = Bench(num_blocks=8)
    bench.submit("x", prompt, mode, **params)
    bench.finish()
    (failed,) = bench.of("x")
    assert isinstance(failed, EngineFailed) and failed.status == 400
    assert re.search(message, failed.message)
    assert bench.idle()


def test_the_largest_prompts_fit() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("p", [1] * 32, "prefill")
    bench.finish()
    assert bench.tokens("p")
    bench.stepper.drop(RequestId("p"))
    bench.submit("g", [2] * 31, max_tokens=9)
    bench.finish()
    assert bench.of("g")[-1].finish == "length"
    assert bench.idle()


def test_a_full_queue_answers_503() -> None:
    bench = Bench(max_queued=2)
    for name in "abc":
        bench.submit(name, [1])
    bench.finish()
    (failed,) = bench.of("c")
    assert isinstance(failed, EngineFailed) and failed.status == 503
    assert bench.tokens("a") and bench.tokens("b")


def test_one_failing_request_is_not_the_others() -> None:
    bench = Bench()
    requests = {name: bench.submit(name, [ord(name) % 7, 1]) for name in "abc"}
    bench.runner.fails.add("b")
    bench.runner.nan.add("c")
    bench.finish()
    assert bench.tokens("a") == oracle(requests["a"], CONTEXT)[0]
    for name, part in (("b", "the model failed: RuntimeError"), ("c", "not finite")):
        (failed,) = bench.of(name)
        assert isinstance(failed, EngineFailed)
        assert failed.status == 500 and part in failed.message
    assert bench.idle()


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

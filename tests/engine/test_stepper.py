"""The life of requests over a fake model that checks every block it is given to read."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from runtime.engine import stepper
from runtime.engine.contract import (
    Adopted,
    Computed,
    EngineFailed,
    EngineRequest,
    Mode,
    Produced,
)
from runtime.errors import TOO_LONG
from runtime.protocol import OutputToken, RequestId, SamplingParams
from tests.engine.fake_runner import VOCAB, next_token
from tests.engine.stepper_bench import CONTEXT, Bench, oracle


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
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    request = EngineRequest(RequestId("d"), tuple(prompt), params, "decode")
    other = EngineRequest(RequestId("e"), (9, *prompt), params, "decode")
    claim = bench.stepper.claim(request, 0, 0)
    assert claim is not None and claim.cached == 4
    assert bench.stepper.claim(other, 0, 3) is None  # 5 new ones
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
        ([1], "prefill", {"logprobs": -1}, "logprobs is -1"),
        ([1], "prefill", {"temperature": math.nan}, "temperature is nan"),
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
    assert failed.code == (TOO_LONG if "tokens, but" in message else None)
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


def test_sampling_that_fails_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> OutputToken:
        raise IndexError("in a sampler")

    monkeypatch.setattr(stepper, "sample", broken)
    bench = Bench()
    request = bench.submit("a", [1, 2, 3])
    bench.submit("b", [3, 2, 1], temperature=1.0)
    bench.finish()
    assert bench.tokens("a") == oracle(request, CONTEXT)[0]
    (failed,) = bench.of("b")
    assert isinstance(failed, EngineFailed)
    assert (failed.status, failed.message) == (500, "sampling failed: IndexError")
    assert bench.idle()


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

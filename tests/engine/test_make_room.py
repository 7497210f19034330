"""Out of device blocks: the KV of a decoding request leaves and comes back; the output stays."""

from __future__ import annotations

import pytest

from runtime.engine.contract import Adopted, EngineRequest, Produced, SwapOut
from runtime.protocol import OutputToken
from tests.engine.fake_runner import next_token
from tests.engine.stepper_bench import Bench, oracle


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

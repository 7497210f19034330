"""KV leaves layer by layer while its step is under way."""

from __future__ import annotations

import pytest

from runtime.engine import early
from runtime.engine.contract import Computed, EngineEvent, Produced
from runtime.engine.early import leaves_after
from runtime.kv.swap import PIECE_BYTES
from tests.engine.fake_runner import VOCAB
from tests.engine.stepper_bench import Bench


def cuts(num_layers: int, layer_bytes: int) -> list[int]:
    return [n for n in range(1, num_layers) if leaves_after(n, num_layers, layer_bytes)]


def test_about_a_piece_leaves_at_a_time_and_next_to_nothing_is_left() -> None:
    assert cuts(30, PIECE_BYTES // 6) == [6, 12, 18, 24, 29]
    assert cuts(30, 2 * PIECE_BYTES) == list(range(1, 30))
    assert cuts(4, PIECE_BYTES // 3) == [3]


@pytest.mark.parametrize("layers", [1, 2, 30])
def test_less_than_a_piece_leaves_at_the_end(layers: int) -> None:
    assert cuts(layers, PIECE_BYTES // layers) == []


def test_layers_are_told_while_the_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "PIECE_BYTES", 1)
    bench = Bench(num_layers=3)
    prompt = [i % VOCAB for i in range(12)]
    bench.submit("p", prompt, "prefill")
    early_events: list[EngineEvent] = []
    while bench.stepper.step(lambda: early_events.extend(bench.stepper.take_events())):
        bench.events += early_events + bench.stepper.take_events()
        told = [event.layers for event in early_events if isinstance(event, Computed)]
        assert told == [1, 2]
        early_events.clear()
    kinds = [e.layers if isinstance(e, Computed) else type(e) for e in bench.of("p")]
    assert kinds == [1, 2, 3, 1, 2, Produced, 3]
    computed = [event for event in bench.of("p") if isinstance(event, Computed)]
    assert [event.num_tokens for event in computed] == [8, 8, 8, 12, 12, 12]
    assert [len(event.blocks) for event in computed] == [2, 2, 2, 3, 3, 3]


def test_what_is_not_for_another_instance_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "PIECE_BYTES", 1)
    bench = Bench(num_layers=3)
    bench.submit("g", [1, 2, 3])
    bench.finish()
    assert not any(isinstance(event, Computed) for event in bench.events)

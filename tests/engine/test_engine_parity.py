"""Greedy tokens on the real model equal Hugging Face transformers' on the same weights."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from reference import Greedy

from runtime.config import Address, ModelConfig, WorkerConfig
from runtime.engine.contract import EngineEvent, EngineRequest, Produced
from runtime.engine.core import Engine
from runtime.front.tokenizer import load_tokenizer
from runtime.protocol import RequestId, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

LENGTHS = (1, 15, 16, 17, 100, 513)
OUTPUT = 12


@dataclass
class Serving:
    engine: Engine
    events: queue.Queue[EngineEvent]
    served: int = 0
    cached: list[int] = field(default_factory=list)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """All at once."""
        params = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
        outputs: dict[str, list[int]] = {}
        for prompt in prompts:
            name = RequestId(f"r{self.served}")
            self.served += 1
            outputs[name] = []
            self.engine.submit(EngineRequest(name, tuple(prompt), params, "generate"))
        while any(len(tokens) < OUTPUT for tokens in outputs.values()):
            event = self.events.get(timeout=120)
            assert isinstance(event, Produced), event
            if not outputs[event.id]:
                self.cached.append(event.cached_tokens)
            outputs[event.id] += [output.token for output in event.tokens]
        return list(outputs.values())


@pytest.fixture(scope="module")
def serving(model_path: Path) -> Iterator[Serving]:
    config = WorkerConfig(
        deployment="test",
        name="mixed-0",
        role="mixed",
        token_file="unused",
        listen=Address("127.0.0.1", 1),
        advertise="127.0.0.1",
        model=ModelConfig(str(model_path), "smollm2"),
        kv_cache_bytes=256 << 20,
        max_num_batched_tokens=192,
        shm_prefix="unused",
    )
    events: queue.Queue[EngineEvent] = queue.Queue()
    engine = Engine(config, events.put)
    engine.self_test()
    thread = threading.Thread(target=engine.run)
    thread.start()
    yield Serving(engine, events)
    engine.stop()
    thread.join(30)


@pytest.fixture(scope="module")
def prompts(model_path: Path) -> list[list[int]]:
    text = (
        "The harbour town lived by its tides. Every boat had a name, 1871 was painted on the old "
        "lighthouse, and nobody agreed on why. What follows is the keeper's own account. "
    )
    tokens = load_tokenizer(model_path).encode(text * 60)
    return [tokens[3 * i : 3 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], transformers_greedy: Greedy) -> list[list[int]]:
    return transformers_greedy(prompts, OUTPUT)


def test_tokens_equal_transformers_alone_together_and_from_the_cache(
    serving: Serving, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    serving.cached.clear()
    assert serving.generate(prompts) == expected
    assert serving.generate(prompts) == expected
    assert max(serving.cached[len(prompts) :]) >= 512
    for prompt, tokens in list(zip(prompts, expected, strict=True))[:-2]:
        # One at a time.
        assert serving.generate([prompt]) == [tokens]

"""The Engine on its own thread, with a tiny real model: the contract as other threads see it."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import Address, ModelConfig, WorkerConfig
from runtime.engine.contract import (
    Adopted,
    Computed,
    EngineControl,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Freed,
    Mode,
    Produced,
)
from runtime.engine.core import Engine
from runtime.errors import ConfigError, ModelError
from runtime.kv import prefix
from runtime.kv.region import Region
from runtime.protocol import OutputToken, RequestId, SamplingParams

_native = pytest.importorskip("runtime._native", reason="the native extension is not built")
DEADLINE_S = 20.0


def config(model: Path, **changes: Any) -> WorkerConfig:
    model_changes = {key: changes.pop(key) for key in ("dtype", "max_model_len") if key in changes}
    fields: dict[str, Any] = {
        "deployment": "test",
        "name": "mixed-0",
        "role": "mixed",
        "token_file": "unused",
        "listen": Address("127.0.0.1", 1),
        "advertise": "127.0.0.1",
        "model": ModelConfig(str(model), "tiny", **model_changes),
        "block_size": 8,
        "kv_cache_bytes": 1 << 20,
        "threads": 1,
        "max_num_batched_tokens": 16,
        "shm_prefix": "unused",
    }
    return WorkerConfig(**{**fields, **changes})


class Served:
    """A running engine and its events."""

    def __init__(self, worker: WorkerConfig) -> None:
        self._events: queue.Queue[EngineEvent] = queue.Queue()
        self.engine = Engine(worker, self._events.put)
        self._thread = threading.Thread(target=self.engine.run, name="engine")
        self._thread.start()

    def submit(self, name: str, prompt: list[int], mode: Mode = "generate", **params: Any) -> None:
        chosen = SamplingParams(
            **{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **params}
        )
        self.engine.submit(EngineRequest(RequestId(name), tuple(prompt), chosen, mode))

    def event(self) -> EngineEvent:
        return self._events.get(timeout=DEADLINE_S)

    def tokens(self, count: int) -> list[int]:
        """The next `count` output tokens, whatever else happens."""
        tokens: list[int] = []
        while len(tokens) < count:
            event = self.event()
            if isinstance(event, Produced):
                tokens += [output.token for output in event.tokens]
        return tokens

    def quiet(self) -> bool:
        return self._events.empty()

    def idle(self) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if (stats.waiting, stats.running, stats.device_blocks_held) == (0, 0, 0):
                return True
            time.sleep(0.002)
        return False

    def close(self) -> None:
        self.engine.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tiny_model: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def start(**changes: Any) -> Served:
        started.append(Served(config(tiny_model, **changes)))
        return started[-1]

    yield start
    for served in started:
        served.close()


def copy_blocks(
    source: Region, target: Region, sources: tuple[int, ...], targets: tuple[int, ...], size: int
) -> None:
    runs = [(s * size, t * size, size) for s, t in zip(sources, targets, strict=True)]
    _native.copy_runs(
        target.address, target.nbytes, source.address, source.nbytes,
        torch.tensor(runs, dtype=torch.int64).numpy(),
    )  # fmt: skip


PROMPT = [i * 7 % 96 for i in range(50)]


def test_generate_and_the_first_tokens_timings(serve: Serve) -> None:
    served = serve()
    served.submit("a", PROMPT)
    first = served.event()
    assert isinstance(first, Produced)
    assert first.queue_s >= 0 and first.prefill_s > 0
    rest = served.tokens(11)
    assert len(rest) == 11
    assert served.idle()
    assert served.quiet()
    counters = served.engine.stats().counters
    assert counters["requests_finished"] == 1
    assert counters["prompt_tokens"] == 50
    assert counters["output_tokens"] == 12


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 0.9, "seed": 12, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.5, "seed": 3, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"logprobs": 3, "frequency_penalty": 0.7},
    ],
)
def test_prefill_then_decode_equals_generate(serve: Serve, params: dict[str, Any]) -> None:
    mixed, prefill, decode = serve(), serve(), serve()
    mixed.submit("m", PROMPT, **params)
    expected = mixed.tokens(12)

    prefill.submit("r", PROMPT, "prefill", **params)
    decode.submit("r", PROMPT, "decode", **params)
    adopted = decode.event()
    assert isinstance(adopted, Adopted)
    first: OutputToken | None = None
    num_tokens = 0
    while num_tokens < len(PROMPT):
        event = prefill.event()
        if isinstance(event, Produced):
            (first,) = event.tokens
            continue
        assert isinstance(event, Computed)
        num_tokens = event.num_tokens
        copy_blocks(
            prefill.engine.pool, decode.engine.pool,
            event.blocks, adopted.blocks[: len(event.blocks)], decode.engine.layout.block_bytes,
        )  # fmt: skip
    assert first is not None
    assert prefill.engine.stats().device_blocks_held == 7
    prefill.engine.drop(RequestId("r"))
    decode.engine.resume(RequestId("r"), first)
    assert [first.token, *decode.tokens(11)] == expected
    assert prefill.idle() and decode.idle()


def test_adopt_gives_what_is_cached_and_the_output_stays_the_same(serve: Serve) -> None:
    served = serve()
    prompt = PROMPT[:48]
    served.submit("m", prompt)
    expected = served.tokens(12)
    assert served.idle()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    request = EngineRequest(RequestId("d"), tuple(prompt), params, "decode")
    adopted = served.engine.adopt(request, 0)
    assert adopted is not None
    assert (len(adopted.blocks), adopted.cached) == (6, 6)
    stats = served.engine.stats()
    assert (stats.running, stats.waiting) == (1, 0)
    served.engine.resume(request.id, OutputToken(expected[0]))
    assert served.tokens(11) == expected[1:]
    assert served.idle()
    other = EngineRequest(RequestId("e"), tuple(reversed(prompt)), params, "decode")
    assert served.engine.adopt(other, 5) is None
    taken = served.engine.adopt(other, 6)
    assert taken is not None and taken.cached == 0
    served.engine.drop(other.id)
    assert served.idle()


def test_adopt_never_overtakes_who_waits(serve: Serve) -> None:
    served = serve(max_num_seqs=1)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    one, two = (EngineRequest(RequestId(n), (1, 2, 3), params, "decode") for n in "ab")
    assert served.engine.adopt(one, 9) is not None
    assert served.engine.adopt(two, 9) is None  # as many as may run
    served.submit("c", [1, 2, 3], "decode")
    served.engine.drop(one.id)
    while isinstance(event := served.event(), Freed):
        assert served.engine.adopt(two, 9) is None
    assert isinstance(event, Adopted) and event.id == "c"
    served.engine.drop(event.id)
    assert served.idle()


def decoding(name: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return EngineRequest(RequestId(name), tuple(prompt), params, "decode")


def until_given(served: Served, wanted: EngineRequest, most_new: int = 99) -> None:
    """Ask for blocks, and again only when told that it is worth it."""
    while served.engine.adopt(wanted, most_new) is None:
        while not isinstance(event := served.event(), Freed):
            pass
        assert event.id == wanted.id


@pytest.mark.parametrize("how", ["finish", "drop", "fail"])
def test_who_was_refused_hears_of_blocks_that_come_free(serve: Serve, how: str) -> None:
    served = serve(kv_cache_bytes=9 * 4096)
    holder, wanted = decoding("a", PROMPT), decoding("b", PROMPT[::-1])
    assert served.engine.adopt(holder, 9) is not None
    assert served.engine.adopt(wanted, 9) is None
    if how == "drop":
        served.engine.drop(holder.id)
    else:
        if how == "fail":
            runner: Any = served.engine._runner
            runner._decoder.weights.layers[1].down.fill_(torch.nan)
        served.engine.resume(holder.id, OutputToken(1))
    until_given(served, wanted)
    served.engine.drop(wanted.id)
    assert served.idle()


def test_who_was_refused_hears_that_fewer_run(serve: Serve) -> None:
    served = serve(max_num_seqs=1)
    holder, wanted = decoding("a", [1, 2, 3]), decoding("b", [1, 2, 3])
    assert served.engine.adopt(holder, 9) is not None
    assert served.engine.adopt(wanted, 9) is None
    served.engine.resume(holder.id, OutputToken(1))
    until_given(served, wanted)
    served.engine.drop(wanted.id)
    assert served.idle()


@pytest.mark.parametrize("how", ["drop", "admit", "refuse"])
def test_who_was_refused_hears_that_fewer_wait(serve: Serve, how: str) -> None:
    served = serve(kv_cache_bytes=12 * 4096)
    holder, wanted = decoding("a", PROMPT), decoding("b", [1, 2, 3])
    assert served.engine.adopt(holder, 9) is not None
    with served.engine._wake:  # its thread does not see the next one before the other has asked
        served.submit("c", [] if how == "refuse" else PROMPT[::-1], "decode")
        assert served.engine.adopt(wanted, 9) is None
    if how == "drop":
        served.engine.drop(RequestId("c"))
    elif how == "admit":
        served.engine.drop(holder.id)
    until_given(served, wanted)
    for name in "abc":
        served.engine.drop(RequestId(name))
    assert served.idle()


def test_who_was_refused_hears_of_a_prefix_that_is_cached(serve: Serve) -> None:
    served = serve()
    holder, wanted = decoding("a", PROMPT[:48], 400), decoding("b", PROMPT[:48])
    assert served.engine.adopt(holder, 9) is not None
    assert served.engine.adopt(wanted, 0) is None
    served.engine.resume(holder.id, OutputToken(1))
    until_given(served, wanted, most_new=0)
    for name in "ab":
        served.engine.drop(RequestId(name))
    assert served.idle()


def test_a_prompt_is_hashed_once_and_holds_up_no_step(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(kv_cache_bytes=9 * 4096)
    hashed: list[bool] = []

    class Counting:
        @staticmethod
        def sha256(data: bytes) -> Any:
            hashed.append(served.engine._wake._is_owned())  # type: ignore[attr-defined]
            return hashlib.sha256(data)

    monkeypatch.setattr(prefix, "hashlib", Counting)
    holder, wanted = decoding("a", PROMPT), decoding("b", PROMPT[::-1])
    assert served.engine.adopt(holder, 9) is not None
    for _ in range(3):
        assert served.engine.adopt(wanted, 9) is None
    served.engine.drop(holder.id)
    until_given(served, wanted)
    served.engine.resume(wanted.id, OutputToken(1))
    served.tokens(3)
    assert served.idle()
    assert hashed == [False] * 12  # 6 full blocks each


def test_who_was_given_blocks_hears_nothing(serve: Serve) -> None:
    served = serve()
    request = decoding("a", PROMPT)
    assert served.engine.adopt(request, 9) is not None
    served.engine.drop(request.id)
    assert served.idle() and served.quiet()


def test_concurrent_requests_equal_those_alone(serve: Serve) -> None:
    alone, together = serve(prefix_cache=False), serve(kv_cache_bytes=26 * 4096)
    prompts = {f"r{i}": PROMPT[: 5 + 4 * i] for i in range(8)}
    expected = {}
    for name, prompt in prompts.items():
        alone.submit(name, prompt, temperature=0.8, seed=5, max_tokens=20)
        expected[name] = alone.tokens(20)
    for name, prompt in prompts.items():
        together.submit(name, prompt, temperature=0.8, seed=5, max_tokens=20)
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    while any(len(tokens) < 20 for tokens in outputs.values()):
        event = together.event()
        assert isinstance(event, Produced)
        outputs[event.id] += [output.token for output in event.tokens]
    assert outputs == expected
    assert together.engine.stats().counters["preemptions"] > 0
    assert together.idle()


def test_drop_in_every_state_leaves_nothing(serve: Serve) -> None:
    served = serve(max_num_seqs=2)
    served.submit("running", PROMPT, max_tokens=400)
    served.submit("adopted", PROMPT, "decode")
    served.submit("waiting", PROMPT)
    served.tokens(1)
    for name in ("waiting", "adopted", "running", "unknown"):
        served.engine.drop(RequestId(name))
    assert served.idle()
    served.submit("held", PROMPT, "prefill")
    served.tokens(1)
    served.engine.drop(RequestId("held"))
    assert served.idle()


def test_stats_know_a_request_from_its_submission_on(serve: Serve) -> None:
    served = serve()
    for i in range(20):
        served.submit(f"r{i}", PROMPT, max_tokens=1)
        stats = served.engine.stats()
        assert stats.waiting + stats.running > 0 or not served.quiet()
    served.tokens(20)
    assert served.idle()


def test_impossible_requests_name_both_numbers(serve: Serve) -> None:
    served = serve(max_model_len=64)
    served.submit("long", [1] * 64)
    event = served.event()
    assert isinstance(event, EngineFailed)
    assert event.status == 400
    assert "64 tokens" in event.message and "holds 64" in event.message


def test_an_idle_engine_does_not_run(serve: Serve) -> None:
    served = serve()
    served.submit("a", PROMPT)
    served.tokens(12)
    assert served.idle()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_self_test_leaves_nothing_behind(tiny_model: Path) -> None:
    events: list[EngineEvent] = []
    engine = Engine(config(tiny_model), events.append)
    before = engine.stats()
    engine.self_test()
    assert engine.stats() == before
    assert not events
    assert not any(before.counters.values())


def test_self_test_refuses_damaged_weights(tiny_model: Path) -> None:
    engine = Engine(config(tiny_model), lambda _: None)
    engine._runner._decoder.weights.layers[1].down.fill_(torch.nan)
    with pytest.raises(ModelError, match="cannot generate: the model's logits are not finite"):
        engine.self_test()


def test_attributes_and_fingerprint(tiny_model: Path) -> None:
    engine = Engine(config(tiny_model, max_model_len=100), lambda _: None)
    control: EngineControl = engine
    assert control.pool.nbytes == engine.num_blocks * control.layout.block_bytes
    assert engine.max_model_len == 100
    assert engine.vocab_size == 96
    assert engine.eos_token_ids == (2,)
    assert engine.fingerprint["num_layers"] == 2
    assert engine.fingerprint["block_size"] == 8
    assert Engine(config(tiny_model), lambda _: None).fingerprint == engine.fingerprint
    half = Engine(config(tiny_model, dtype="bfloat16"), lambda _: None).fingerprint
    assert half["kv_dtype"] == "bfloat16" and half != engine.fingerprint


def test_bfloat16_generates(serve: Serve) -> None:
    served = serve(dtype="bfloat16")
    served.engine.self_test()
    served.submit("a", PROMPT)
    assert len(served.tokens(12)) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_bytes": 1000}, "kv_cache of 1,000 bytes holds 0 blocks"),
        ({"max_model_len": 513}, r"max_model_len 513 is not in 2\.\.512"),
        ({"block_size": 0}, "block_size"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tp_size": 3}, "tp_size 3 does not split this model of 4 attention heads, 2 KV heads"),
        ({"device": "abacus"}, "device 'abacus' is unknown"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
    ],
)
def test_an_impossible_config_is_one_clear_line(
    tiny_model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Engine(config(tiny_model, **changes), lambda _: None)
    assert "\n" not in str(caught.value)

"""Greedy tokens on the real model equal Hugging Face transformers' on the same weights."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import Address, ModelConfig, WorkerConfig
from runtime.engine.contract import EngineEvent, EngineRequest, Produced
from runtime.engine.core import Engine
from runtime.front.tokenizer import load_tokenizer
from runtime.models.config import ModelSpec
from runtime.models.decoder import Weights
from runtime.models.loader import load_model
from runtime.protocol import RequestId, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

LENGTHS = (1, 2, 15, 16, 17, 100, 513, 1500)
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
def expected(model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    reference = transformers_model(model_path)
    outputs = []
    for prompt in prompts:
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=OUTPUT,
                min_new_tokens=OUTPUT,
                do_sample=False,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def transformers_model(path: Path) -> Any:
    """transformers' own decoder on our dequantized weights (reading the GGUF takes it a minute)."""
    import transformers

    decoder = load_model(path, torch.float32, torch.device("cpu"))
    spec = decoder.spec
    config = transformers.LlamaConfig(
        num_hidden_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        intermediate_size=spec.intermediate,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state_dict(spec, decoder.weights), strict=True)
    return model


def state_dict(spec: ModelSpec, weights: Weights) -> dict[str, torch.Tensor]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "lm_head.weight": weights.head,
        "model.norm.weight": weights.norm,
    }
    for number, layer in enumerate(weights.layers):
        prefix = f"model.layers.{number}"
        q, k, v = layer.qkv.split([q_rows, kv_rows, kv_rows])
        gate, up = layer.gate_up.chunk(2)
        state |= {
            f"{prefix}.input_layernorm.weight": layer.attention_norm,
            f"{prefix}.post_attention_layernorm.weight": layer.mlp_norm,
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.o_proj.weight": layer.output,
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": layer.down,
        }
    return state


def test_the_model_knows_something(serving: Serving, model_path: Path) -> None:
    """Swapped rows of q and k would go unnoticed against a reference built from our own weights."""
    tokenizer = load_tokenizer(model_path)
    (output,) = serving.generate([tokenizer.encode("The capital of France is")])
    assert tokenizer.decode(output).startswith(" Paris")


def test_tokens_equal_transformers_alone_together_and_from_the_cache(
    serving: Serving, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    serving.cached.clear()
    assert serving.generate(prompts) == expected
    assert serving.generate(prompts) == expected
    assert max(serving.cached[len(prompts) :]) >= 1488
    for prompt, tokens in list(zip(prompts, expected, strict=True))[:-2]:
        # One at a time.
        assert serving.generate([prompt]) == [tokens]

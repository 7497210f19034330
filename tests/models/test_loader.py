"""Hugging Face folders: logits equal transformers' on random tiny models of each kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from runtime.errors import ModelError
from runtime.models.decoder import Decoder
from runtime.models.loader import half_split, load_model, model_digest

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Kind:
    config: Callable[..., Any]
    model: Callable[[Any], Any]
    settings: dict[str, Any]


KINDS = {
    "llama": Kind(transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama-tied": Kind(
        transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}
    ),
    "llama-biased": Kind(
        transformers.LlamaConfig, transformers.LlamaForCausalLM, {"attention_bias": True}
    ),
    "llama3-rope": Kind(
        transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}
    ),
    "qwen2": Kind(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": Kind(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "ernie4_5": Kind(
        transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM, {"head_dim": 32}
    ),
}


def make(kind: str, folder: Path, **save: Any) -> Any:
    torch.manual_seed(0)
    entry = KINDS[kind]
    model = entry.model(entry.config(**COMMON, **entry.settings)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Random norms and biases, or a swap of two of them would go unnoticed.
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.15)
    model.save_pretrained(folder, **save)
    return model


def whole_prompt_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits of every position, with plain causal attention over the batch itself."""

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, *kv.unbind(1)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(tokens), -1)

    with torch.inference_mode():
        every = torch.arange(len(tokens))
        return decoder.logits(torch.tensor(tokens), every, attend, every)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, tmp_path: Path) -> None:
    reference = make(kind, tmp_path)
    tokens = torch.randint(0, 128, (200,), generator=torch.manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    logits = whole_prompt_logits(load_model(tmp_path, torch.float32, CPU), tokens)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    make("qwen2", tmp_path / "one")
    make("qwen2", tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    one = load_model(tmp_path / "one", torch.float32, CPU)
    many = load_model(tmp_path / "many", torch.float32, CPU)
    assert model_digest(one) == model_digest(many)
    assert torch.equal(one.weights.layers[1].qkv, many.weights.layers[1].qkv)


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    make("llama", tmp_path)
    before = load_model(tmp_path, torch.float32, CPU)
    digest = model_digest(before)
    before.weights.layers[1].down.mul_(1.01)
    assert model_digest(before) != digest


def test_config_and_generation_config_give_the_eos_ids(tmp_path: Path) -> None:
    make("llama", tmp_path)
    assert load_model(tmp_path, torch.float32, CPU).spec.eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model(tmp_path, torch.float32, CPU).spec.eos_token_ids == (2, 7)


def test_weights_take_the_wanted_dtype(tmp_path: Path) -> None:
    make("qwen2", tmp_path)
    decoder = load_model(tmp_path, torch.bfloat16, CPU)
    assert decoder.weights.layers[0].qkv.dtype == torch.bfloat16
    assert whole_prompt_logits(decoder, [5, 6, 7]).dtype == torch.float32


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "models of kind 'mamba' are not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing, not a positive integer"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a positive integer"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3 kv heads"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE scaling 'yarn' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors are not supported"),
        ({"mlp_bias": True}, "biases in the MLP are not supported"),
        ({"intermediate_size": 80}, r"gate_proj\.weight has shape \(96, 64\), not \(80, 64\)"),
        ({"num_hidden_layers": 3}, r"has no tensor model\.layers\.2\."),
    ],
)
def test_a_wrong_config_is_one_clear_line(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    make("llama", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(tmp_path, torch.float32, CPU)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.hint


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load_model(tmp_path, torch.float32, CPU)
    make("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        load_model(tmp_path, torch.float32, CPU)


def test_broken_json_is_named(tmp_path: Path) -> None:
    make("llama", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: is not JSON"):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize("size", [0, 5, 2000, 100_000])
def test_truncated_safetensors_are_named(tmp_path: Path, size: int) -> None:
    make("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make("llama", tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}: No such file"):
        load_model(tmp_path, torch.float32, CPU)


def test_half_split_moves_pairs() -> None:
    rows = torch.arange(16).view(16, 1)
    assert half_split(rows, 8).view(-1).tolist() == [
        0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15,
    ]  # fmt: skip

"""Hugging Face folders: logits equal transformers' on random tiny models of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import CPU, KINDS, make, whole_prompt_logits
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.loader import half_split, load_model


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
    assert one.weights.digest == many.weights.digest
    assert torch.equal(one.weights.layers[1].qkv, many.weights.layers[1].qkv)


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    make("llama", tmp_path)
    before = load_model(tmp_path, torch.float32, CPU).weights.digest
    path = tmp_path / "model.safetensors"
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"):
        tensors = load_file(path)
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, path)
        after = load_model(tmp_path, torch.float32, CPU).weights.digest
        assert after != before
        before = after


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

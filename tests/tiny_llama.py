"""A tiny random Llama folder, for tests that want a model and not its sense."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_tiny_llama(folder: Path) -> Path:
    """A random Llama: 2 layers, 4 heads over 2 KV heads, 96 tokens of vocabulary.

    Attention weighs so much in it, and the head is so unlike the embedding, that what it says
    depends on all of the KV: without that it would repeat a token for ever, whatever came before.
    """
    hidden, ffn, vocab, kv = 64, 96, 96, 32
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) / shape[-1] ** 0.5

    tensors = {"model.embed_tokens.weight": torch.randn((vocab, hidden), generator=random)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = weight(vocab, hidden)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": weight(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": weight(kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": weight(kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": weight(hidden, hidden) * 4,
            f"{prefix}.mlp.gate_proj.weight": weight(ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": weight(ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": weight(hidden, ffn),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder

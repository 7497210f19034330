"""Tiny random models of every kind, saved by transformers, and their logits without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from runtime.models.decoder import Decoder

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

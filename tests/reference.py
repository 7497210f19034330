"""What Hugging Face transformers generates of a model, read by its own code: ours must equal it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Greedy = Callable[[list[list[int]], int], list[list[int]]]
"""Of each prompt so many tokens, in float32, one prompt at a time."""


def greedy_of(gguf: Path) -> Greedy:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None

    def generate(prompt: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    return lambda prompts, count: [generate(prompt, count) for prompt in prompts]

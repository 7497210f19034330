"""Tiny models: a GGUF writer's output and random Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 2, 64, 4, 2, 96, 128

WriteGguf = Callable[..., Path]


def _shapes() -> dict[str, tuple[int, ...]]:
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for n in range(LAYERS):
        shapes |= {
            f"blk.{n}.attn_norm.weight": (HIDDEN,),
            f"blk.{n}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{n}.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{n}.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
            f"blk.{n}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{n}.ffn_norm.weight": (HIDDEN,),
            f"blk.{n}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{n}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{n}.ffn_down.weight": (HIDDEN, FFN),
        }
    return shapes


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Writes a tiny Llama, named as llama.cpp's conversion would; the arguments vary it."""

    def write(
        arch: str = "llama", without: str = "", quantize: gguf.GGMLQuantizationType | None = None
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(LAYERS)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_token_list([f"token {i}" for i in range(VOCAB)])
        writer.add_eos_token_id(2)
        random = np.random.default_rng(0)
        for name, shape in _shapes().items():
            values = random.standard_normal(shape).astype(np.float32) / 8
            if name == without:
                continue
            if quantize is not None and len(shape) == 2:
                raw = gguf.quants.quantize(values, quantize)
                writer.add_tensor(name, raw, raw_dtype=quantize)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def tiny_gguf(write_gguf: WriteGguf) -> bytes:
    """The bytes of the plain tiny Llama."""
    return write_gguf().read_bytes()

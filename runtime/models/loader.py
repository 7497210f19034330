"""Loads a model from a .gguf file or a Hugging Face folder into a Decoder, and names its identity.

Owns tensor names of both formats, fusing (q, k, v and gate, up), RoPE row order and shape checks.
Every problem with the files is a ModelError with one line: path, what, what to do.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.errors import ModelError
from runtime.models.config import ModelSpec, spec_from_gguf, spec_from_hf
from runtime.models.decoder import Decoder, LayerWeights, Weights
from runtime.models.gguf_file import GgufFile

_AGAIN = "the model is damaged or incomplete: fetch it again"
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class _Source(Protocol):
    """Tensors of one model by their Hugging Face names."""

    where: str

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor:
        """Any floating dtype, on the CPU. Only called for names that are there."""


class _GgufSource:
    def __init__(self, file: GgufFile) -> None:
        self.where = str(file.path)
        self._file = file

    @staticmethod
    def _translate(name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("model.layers."):
            return f"{_GGUF_NAMES[stem]}.{kind}"
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_GGUF_NAMES[part]}.{kind}"

    def has(self, name: str) -> bool:
        return self._translate(name) in self._file.tensors

    def read(self, name: str) -> Tensor:
        return self._file.tensor(self._translate(name))


class _FolderSource:
    """One model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.exists():
            shards = [single]
        elif index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict):
                raise ModelError(f"{index}: weight_map is missing", hint=_AGAIN)
            shards = [folder / str(name) for name in sorted(set(names.values()))]
        else:
            raise ModelError(
                f"{folder}: has neither model.safetensors nor model.safetensors.index.json",
                hint="give a Hugging Face folder with safetensors, or a .gguf file",
            )
        self._files: dict[str, Any] = {}
        for shard in shards:
            try:
                opened: Any = safe_open(str(shard), framework="pt")
            except FileNotFoundError as e:
                raise ModelError(f"{shard}: No such file", hint=_AGAIN) from e
            except (SafetensorError, OSError) as e:
                raise ModelError(f"{shard}: {e}", hint=_AGAIN) from e
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise ModelError(f"{path}: {e.strerror}", hint=_AGAIN) from e
    except ValueError as e:
        raise ModelError(f"{path}: is not JSON: {e}", hint=_AGAIN) from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object", hint=_AGAIN)
    return value


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Reads, dequantizes and fuses the weights. Raises ModelError."""
    path = Path(path)
    if path.is_dir():
        generation = path / "generation_config.json"
        spec = spec_from_hf(
            str(path / "config.json"),
            read_json(path / "config.json"),
            read_json(generation) if generation.exists() else {},
        )
        return Decoder(spec, _Fuser(spec, _FolderSource(path), dtype, device).weights())
    with GgufFile(path) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
        spec = spec_from_gguf(str(path), file.metadata, shapes)
        return Decoder(spec, _Fuser(spec, _GgufSource(file), dtype, device).weights())


def model_digest(decoder: Decoder) -> str:
    """Identity of a model whatever file it came from: its shape, and samples of every weight."""
    spec = asdict(decoder.spec)
    del spec["rope_interleaved"]  # how the file orders rows, not what the model is
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode())
    weights = decoder.weights
    tensors = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        tensors += [layer.qkv, layer.output, layer.gate_up, layer.down, layer.attention_norm]
    for tensor in tensors:
        flat = tensor.view(-1)
        samples = flat[:: max(1, len(flat) // 64)].float().cpu()
        digest.update(samples.numpy().tobytes())
    return digest.hexdigest()[:16]


class _Fuser:
    """Builds Weights from a source, one tensor at a time, straight into its fused place."""

    def __init__(
        self, spec: ModelSpec, source: _Source, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._source = source
        self._dtype = dtype
        self._device = device

    def weights(self) -> Weights:
        spec = self._spec
        embedding = self._one("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(number) for number in range(spec.layers)),
            norm=self._one("model.norm.weight", (spec.hidden,)),
            head=embedding
            if spec.tie_embeddings
            else self._one("lm_head.weight", (spec.vocab, spec.hidden)),
            rope_factors=self._source.read("rope_freqs.weight")
            if self._source.has("rope_freqs.weight")
            else None,
        )

    def _layer(self, number: int) -> LayerWeights:
        spec, prefix = self._spec, f"model.layers.{number}"
        q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        attention = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        qkv = {f"{prefix}.self_attn.{part}_proj": rows for part, rows in attention.items()}
        gate_up = {f"{prefix}.mlp.{part}_proj": spec.intermediate for part in ("gate", "up")}
        output = f"{prefix}.self_attn.o_proj"
        return LayerWeights(
            attention_norm=self._one(f"{prefix}.input_layernorm.weight", (spec.hidden,)),
            qkv=self._stack(qkv, "weight", (spec.hidden,)),
            qkv_bias=self._stack(qkv, "bias", ()) if spec.qkv_bias else None,
            q_norm=self._head_norm(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{prefix}.self_attn.k_norm.weight"),
            output=self._one(f"{output}.weight", (spec.hidden, q_rows)),
            output_bias=self._one(f"{output}.bias", (spec.hidden,)) if spec.output_bias else None,
            mlp_norm=self._one(f"{prefix}.post_attention_layernorm.weight", (spec.hidden,)),
            gate_up=self._stack(gate_up, "weight", (spec.hidden,)),
            down=self._one(f"{prefix}.mlp.down_proj.weight", (spec.hidden, spec.intermediate)),
        )

    def _head_norm(self, name: str) -> Tensor | None:
        return self._one(name, (self._spec.head_dim,)) if self._spec.qk_norm else None

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self._source.has(name):
            raise ModelError(f"{self._source.where}: has no tensor {name}", hint=_AGAIN)
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._source.where}: tensor {name} has shape {tuple(tensor.shape)}, not {shape}",
                hint=_AGAIN,
            )
        return tensor

    def _one(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._read(name, shape).to(device=self._device, dtype=self._dtype)

    def _stack(self, parts: dict[str, int], kind: str, columns: tuple[int, ...]) -> Tensor:
        """The named tensors one below the other."""
        fused = torch.empty((sum(parts.values()), *columns), dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts.items():
            tensor = self._read(f"{name}.{kind}", (rows, *columns))
            if self._spec.rope_interleaved and name.endswith(("q_proj", "k_proj")):
                tensor = half_split(tensor, self._spec.head_dim)
            fused[start : start + rows] = tensor
            start += rows
        return fused


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders each head's rows from RoPE pairs (2i, 2i+1) to pairs (i, i + head_dim / 2)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)

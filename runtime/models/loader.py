"""Loads a model from a .gguf file or a Hugging Face folder into a Decoder, and names its identity.

Owns fusing (q, k, v and gate, up), RoPE row order and shape checks. Names in the files are
sources.py's; what a tensor-parallel rank keeps of each tensor is shard.py's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.kv.layout import Shard
from runtime.models.config import ModelSpec, spec_from_gguf, spec_from_hf
from runtime.models.decoder import Decoder, LayerWeights, Ranks, Weights
from runtime.models.gguf_file import GgufFile
from runtime.models.shard import ModelShard, shard_model
from runtime.models.sources import AGAIN, FolderSource, GgufSource, Source, read_json

_ALL = slice(None)


def read_spec(path: str | Path) -> ModelSpec:
    """The model's shapes, without its weights. Raises ModelError."""
    path = Path(path)
    if path.is_dir():
        return _folder_spec(path)
    with GgufFile(path) as file:
        return _gguf_spec(file)


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Decoder:
    """Reads, dequantizes and fuses the weights: this rank's, when there are `ranks`.

    Raises ModelError, and ConfigError when the model does not split into so many.
    """
    path = Path(path)
    if path.is_dir():
        spec = _folder_spec(path)
        return _fused(spec, FolderSource(path), _Target(dtype, device, ranks))
    with GgufFile(path) as file:
        spec = _gguf_spec(file)
        return _fused(spec, GgufSource(file), _Target(dtype, device, ranks))


def _folder_spec(folder: Path) -> ModelSpec:
    generation = folder / "generation_config.json"
    return spec_from_hf(
        str(folder / "config.json"),
        read_json(folder / "config.json"),
        read_json(generation) if generation.exists() else {},
    )


def _gguf_spec(file: GgufFile) -> ModelSpec:
    shapes = {name: info.shape for name, info in file.tensors.items()}
    return spec_from_gguf(str(file.path), file.metadata, shapes)


def _fused(spec: ModelSpec, source: Source, target: _Target) -> Decoder:
    ranks = target.ranks
    part = shard_model(spec, ranks.shard if ranks else Shard(0, 1))
    return Decoder(part.spec, _Fuser(spec, part, source, target).weights(), ranks)


@dataclass(frozen=True, slots=True)
class _Target:
    """What the weights become."""

    dtype: torch.dtype
    device: torch.device
    ranks: Ranks | None


class _Digest:
    """Identity of a model whatever file it came from: its shape, and samples of every weight."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        shape = asdict(spec)
        del shape["rope_interleaved"]  # how the file orders rows, not what the model is
        self._dtype = dtype
        self._hash = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())

    def add(self, tensor: Tensor) -> None:
        """A whole tensor, in the order of rows that the decoder wants."""
        flat = tensor.reshape(-1)
        samples = flat[:: max(1, len(flat) // 64)].to(self._dtype).float()
        self._hash.update(samples.numpy().tobytes())

    def text(self) -> str:
        return self._hash.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Rows:
    """`keep` of `all` rows of a tensor."""

    all: int
    keep: slice

    @property
    def count(self) -> int:
        return int(self.keep.stop - self.keep.start)


class _Fuser:
    """Builds Weights from a source, one tensor at a time, straight into its fused place."""

    def __init__(self, spec: ModelSpec, part: ModelShard, source: Source, target: _Target) -> None:
        """`spec` is the whole model's; `part` is what is kept of it."""
        self._spec = spec
        self._part = part
        self._source = source
        self._dtype = target.dtype
        self._device = target.device
        self._digest = _Digest(spec, target.dtype)

    def weights(self) -> Weights:
        spec, vocab = self._spec, self._part.vocab
        embedding = self._one("model.embed_tokens.weight", (spec.vocab, spec.hidden))
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(number) for number in range(spec.layers)),
            norm=self._one("model.norm.weight", (spec.hidden,)),
            head=embedding[vocab]
            if spec.tie_embeddings
            else self._one("lm_head.weight", (spec.vocab, spec.hidden), (vocab,)),
            rope_factors=self._source.read("rope_freqs.weight")
            if self._source.has("rope_freqs.weight")
            else None,
            digest=self._digest.text(),
        )

    def _layer(self, number: int) -> LayerWeights:
        spec, part, prefix = self._spec, self._part, f"model.layers.{number}"
        q = _Rows(spec.heads * spec.head_dim, part.q)
        kv = _Rows(spec.kv_heads * spec.head_dim, part.kv)
        mlp = _Rows(spec.intermediate, part.mlp)
        attention = {"q": q, "k": kv, "v": kv}
        qkv = {f"{prefix}.self_attn.{name}_proj": rows for name, rows in attention.items()}
        gate_up = {f"{prefix}.mlp.{name}_proj": mlp for name in ("gate", "up")}
        output = f"{prefix}.self_attn.o_proj"
        return LayerWeights(
            attention_norm=self._one(f"{prefix}.input_layernorm.weight", (spec.hidden,)),
            qkv=self._stack(qkv, "weight", (spec.hidden,)),
            qkv_bias=self._stack(qkv, "bias", ()) if spec.qkv_bias else None,
            q_norm=self._head_norm(f"{prefix}.self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{prefix}.self_attn.k_norm.weight"),
            output=self._one(f"{output}.weight", (spec.hidden, q.all), (_ALL, part.q)),
            output_bias=self._one(f"{output}.bias", (spec.hidden,)) if spec.output_bias else None,
            mlp_norm=self._one(f"{prefix}.post_attention_layernorm.weight", (spec.hidden,)),
            gate_up=self._stack(gate_up, "weight", (spec.hidden,)),
            down=self._one(
                f"{prefix}.mlp.down_proj.weight", (spec.hidden, mlp.all), (_ALL, part.mlp)
            ),
        )

    def _head_norm(self, name: str) -> Tensor | None:
        return self._one(name, (self._spec.head_dim,)) if self._spec.qk_norm else None

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if not self._source.has(name):
            raise ModelError(f"{self._source.where}: has no tensor {name}", hint=AGAIN)
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._source.where}: tensor {name} has shape {tuple(tensor.shape)}, not {shape}",
                hint=AGAIN,
            )
        if self._spec.rope_interleaved and name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = half_split(tensor, self._spec.head_dim)
        self._digest.add(tensor)
        return tensor

    def _one(self, name: str, shape: tuple[int, ...], keep: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or the part of it that is to be kept."""
        tensor = self._read(name, shape)
        if not keep:
            return tensor.to(device=self._device, dtype=self._dtype)
        # A copy: a view would keep the whole tensor in memory.
        kept = tensor[keep]
        return torch.empty(kept.shape, dtype=self._dtype, device=self._device).copy_(kept)

    def _stack(self, parts: dict[str, _Rows], kind: str, columns: tuple[int, ...]) -> Tensor:
        """The kept rows of the named tensors one below the other."""
        count = sum(rows.count for rows in parts.values())
        fused = torch.empty((count, *columns), dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts.items():
            tensor = self._read(f"{name}.{kind}", (rows.all, *columns))
            fused[start : start + rows.count] = tensor[rows.keep]
            start += rows.count
        return fused


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders each head's rows from RoPE pairs (2i, 2i+1) to pairs (i, i + head_dim / 2)."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)

"""Which part of a model one tensor-parallel rank computes: whole attention heads, columns of the
MLP and rows of the output matrix, as slices of the whole model's weights.

Owns the rule what tp_size a model allows. Knows no files and no processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.errors import ConfigError
from runtime.kv.layout import Shard
from runtime.models.config import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Slices are rows of the tensors as the files have them: [out, in]."""

    spec: ModelSpec
    """As this rank computes it: its own numbers of heads and MLP columns, the model's otherwise."""
    q: slice
    """Of q_proj; and columns of o_proj."""
    kv: slice
    """Of k_proj and v_proj. Several ranks have the same one when there are more ranks than KV
    heads.
    """
    mlp: slice
    """Of gate_proj and up_proj; and columns of down_proj."""
    vocab: slice
    """Of the output matrix."""


def allowed_sizes(spec: ModelSpec) -> list[int]:
    """Every tp_size that splits the model evenly."""
    return [
        size
        for size in range(1, spec.heads + 1)
        if spec.heads % size == 0
        and spec.intermediate % size == 0
        and (spec.kv_heads % size == 0 or size % spec.kv_heads == 0)
    ]


def shard_model(spec: ModelSpec, shard: Shard) -> ModelShard:
    """Raises ConfigError when the model does not split so."""
    size, rank = shard.size, shard.rank
    if size not in (allowed := allowed_sizes(spec)):
        raise ConfigError(
            f"tp_size {size} does not split this model of {spec.heads} attention heads, "
            f"{spec.kv_heads} KV heads and {spec.intermediate} MLP columns evenly",
            hint=f"use tp_size {_either(allowed)}",
        )
    heads, mlp, kv = spec.heads // size, spec.intermediate // size, shard.heads(spec.kv_heads)
    vocab = vocab_share(spec.vocab, size)
    return ModelShard(
        spec=replace(spec, heads=heads, kv_heads=len(kv), intermediate=mlp),
        q=slice(rank * heads * spec.head_dim, (rank + 1) * heads * spec.head_dim),
        kv=slice(kv.start * spec.head_dim, kv.stop * spec.head_dim),
        mlp=slice(rank * mlp, (rank + 1) * mlp),
        vocab=slice(rank * vocab, min(spec.vocab, (rank + 1) * vocab)),
    )


def vocab_share(vocab: int, size: int) -> int:
    """Rows of the output matrix on each rank; the last ones may have fewer."""
    return -(-vocab // size)


def _either(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last

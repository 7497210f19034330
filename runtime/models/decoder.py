"""One decoder for the Llama family: Llama, Qwen2, Qwen3, ERNIE-4.5, told apart by their weights.

Owns the arithmetic between token ids and logits. Knows no cache: attention over past tokens is the
caller's function. q and k are in half-split RoPE order (the loader sees to it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kv.layout import Shard
from runtime.models.config import ModelSpec, RopeScaling
from runtime.models.shard import vocab_share

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, head_dim], k and v [T, 2, kv_heads, head_dim]) -> [T, heads * head_dim].

It also stores k and v: later tokens attend to them.
"""


class Ranks(Protocol):
    """The ranks that compute one model together; each calls the same methods in the same order."""

    @property
    def shard(self) -> Shard:
        """Which of them this is."""

    def sum_(self, x: Tensor) -> None:
        """Replace x by the sum of all ranks' x."""

    def meet(self) -> None:
        """Wait until every rank is here."""

    def gather(self, part: Tensor) -> Tensor:
        """Rank 0: all ranks' parts, of one shape, side by side along the last axis, in order of
        rank. Elsewhere: something that nobody should look at.
        """


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of a tensor-parallel rank: its heads and its MLP columns."""

    attention_norm: Tensor
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Tensor  # [hidden, heads * head_dim]
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor  # [vocab, hidden]; the embedding itself when tied; of a rank: its rows
    rope_factors: Tensor | None
    """Divisors of the RoPE frequencies that came with the file, [head_dim / 2]."""
    digest: str
    """Identity of the whole model, whatever file it came from and whichever part of it this is."""


class Decoder:
    """Stateless but for its weights; `logits` may be called from one thread at a time."""

    def __init__(self, spec: ModelSpec, weights: Weights, ranks: Ranks | None = None) -> None:
        """`spec` and `weights` are this rank's, if `ranks` are given: then its sums and its logits
        are put together with theirs.
        """
        self.spec = spec
        self.weights = weights
        self._ranks = ranks
        self._head_rows = vocab_share(spec.vocab, ranks.shard.size) if ranks else spec.vocab
        self._inv_freq = rope_frequencies(spec, weights.rope_factors).to(weights.norm.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.norm.device

    def logits(self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Float32 logits [len(rows), vocab] of the chosen rows of this batch of tokens [T].

        When it returns, every rank has done its part. Only rank 0 has the logits.
        """
        spec, weights = self.spec, self.weights
        angles = positions[:, None].float() * self._inv_freq  # [T, head_dim / 2]
        cos = angles.cos().to(self.dtype)[:, None]
        sin = angles.sin().to(self.dtype)[:, None]
        x = F.embedding(tokens, weights.embedding)  # [T, hidden]
        last = len(weights.layers) - 1
        for number, layer in enumerate(weights.layers):
            q, kv = self._qkv(layer, _norm(x, layer.attention_norm, spec.norm_eps), cos, sin)
            attended = attend(number, q, kv)
            if number == last:
                # Only these rows are asked for, and nothing after attention mixes rows.
                x, attended = x[rows], attended[rows]
            self._add_product(x, attended, layer.output)
            if layer.output_bias is not None:
                x += layer.output_bias
            self._add_product(x, _mlp(layer, _norm(x, layer.mlp_norm, spec.norm_eps)), layer.down)
        return self._head(_norm(x, weights.norm, spec.norm_eps)).float()

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """x += y @ weight^T, where each rank has some of y's and weight's columns."""
        if self._ranks is None:
            x.addmm_(y, weight.t())
            return
        if len(x):
            part = F.linear(y, weight)
            self._ranks.sum_(part)
            x += part

    def _head(self, x: Tensor) -> Tensor:
        head, vocab = self.weights.head, self.spec.vocab
        if self._ranks is None:
            return F.linear(x, head)
        if not len(x):
            # Nothing was summed in the last layer, but its KV must be on all ranks before rank 0
            # says so.
            self._ranks.meet()
            return x.new_empty((0, vocab))
        # The last rank's part may be narrower, and parts are gathered in one shape.
        part = x.new_zeros((len(x), self._head_rows))
        torch.mm(x, head.t(), out=part[:, : len(head)])
        return self._ranks.gather(part)[:, :vocab]

    def _qkv(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        qk, q = qkv[:, : spec.heads + spec.kv_heads], qkv[:, : spec.heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            k = qk[:, spec.heads :]
            q.copy_(_norm(q, layer.q_norm, spec.norm_eps))
            k.copy_(_norm(k, layer.k_norm, spec.norm_eps))
        _rotate_(qk, cos, sin)
        return q, qkv[:, spec.heads :].view(len(x), 2, spec.kv_heads, spec.head_dim)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).mul_(weight)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Half-split RoPE, in place: dimension i turns with dimension i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    turned = low * sin
    low.mul_(cos).addcmul_(high, sin, value=-1)
    high.mul_(cos).add_(turned)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_frequencies(spec: ModelSpec, factors: Tensor | None) -> Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if factors is not None:
        return frequencies / factors.float().cpu()
    return frequencies if spec.rope_scaling is None else _scaled(frequencies, spec.rope_scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    spread = scaling.high_freq_factor - scaling.low_freq_factor
    turns = scaling.original_max_positions / wavelengths
    blend = ((turns - scaling.low_freq_factor) / spread).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / scaling.factor)

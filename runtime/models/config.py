"""What a decoder-only model is made of: one ModelSpec, from GGUF metadata or config.json.

Knows the names both formats use and which features this runtime serves. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "ernie4_5")
_AGAIN = "fetch the model again"
_USE = "use a model of one of these kinds: " + ", ".join(ARCHITECTURES)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's: low frequencies are divided by `factor`, high ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and switches of one decoder.

    `rope_interleaved` tells how the files order q's and k's rows; the loader makes them half-split.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleaved: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    norm_eps: float
    eos_token_ids: tuple[int, ...]
    max_positions: int


class _Fields:
    """Typed reads of one mapping; every complaint names the file and the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def wrong(self, key: str, wanted: str, value: object) -> ModelError:
        state = "is missing" if value is None else f"is {value!r}"
        return ModelError(f"{self.where}: {key} {state}, not {wanted}", hint=_AGAIN)


def _architecture(where: str, name: object) -> str:
    if name not in ARCHITECTURES:
        raise ModelError(f"{where}: models of kind {name!r} are not supported", hint=_USE)
    return str(name)


def _checked(spec: ModelSpec, where: str) -> ModelSpec:
    if spec.heads % spec.kv_heads:
        raise ModelError(
            f"{where}: {spec.heads} attention heads are not a multiple of {spec.kv_heads} kv heads",
            hint=_AGAIN,
        )
    if spec.head_dim < 2 or spec.head_dim % 2:
        raise ModelError(
            f"{where}: head_dim {spec.head_dim} is not an even, positive number", hint=_AGAIN
        )
    return spec


def spec_from_gguf(
    where: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> ModelSpec:
    """`tensors` maps names to shapes: which are there tells biases and a separate output matrix."""
    arch = _architecture(where, metadata.get("general.architecture"))
    fields = _Fields(where, metadata)
    heads = fields.integer(f"{arch}.attention.head_count")
    hidden = fields.integer(f"{arch}.embedding_length")
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden // heads)
    rotated = fields.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{where}: RoPE over {rotated} of {head_dim} dimensions is not supported", hint=_USE
        )
    scaling = metadata.get(f"{arch}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelError(f"{where}: RoPE scaling {scaling!r} is not supported", hint=_USE)
    eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{where}: has no tensor token_embd.weight", hint=_AGAIN)
    return _checked(
        ModelSpec(
            architecture=arch,
            layers=fields.integer(f"{arch}.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.integer(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=fields.integer(f"{arch}.feed_forward_length"),
            vocab=tensors["token_embd.weight"][0],
            rope_theta=fields.number(f"{arch}.rope.freq_base", 10000.0),
            # Llama 3's scaling comes as factors in the tensor rope_freqs.weight.
            rope_scaling=None,
            # llama.cpp's conversion interleaves Llama's q and k; ERNIE's are by nature.
            rope_interleaved=arch in ("llama", "ernie4_5"),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tie_embeddings="output.weight" not in tensors,
            norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
            eos_token_ids=_token_ids(where, [i for i in eos if i is not None]),
            max_positions=fields.integer(f"{arch}.context_length"),
        ),
        where,
    )


def spec_from_hf(where: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """From config.json and generation_config.json (or empty), whose list of eos ids wins."""
    arch = _architecture(where, config.get("model_type"))
    fields = _Fields(where, config)
    _refuse_unsupported(where, config)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    rope = _Fields(where, {**config, **(config.get("rope_parameters") or {})})
    bias = arch == "qwen2" or fields.flag("attention_bias", False) or fields.flag("use_bias", False)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return _checked(
        ModelSpec(
            architecture=arch,
            layers=fields.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            intermediate=fields.integer("intermediate_size"),
            vocab=fields.integer("vocab_size"),
            rope_theta=rope.number("rope_theta", 500000.0 if arch == "ernie4_5" else 10000.0),
            rope_scaling=_hf_scaling(where, config),
            rope_interleaved=arch == "ernie4_5",
            qkv_bias=bias,
            output_bias=bias and arch != "qwen2",
            qk_norm=arch == "qwen3",
            tie_embeddings=fields.flag("tie_word_embeddings", arch == "ernie4_5"),
            norm_eps=fields.number("rms_norm_eps", 1e-5 if arch == "ernie4_5" else 1e-6),
            eos_token_ids=_token_ids(where, eos),
            max_positions=fields.integer("max_position_embeddings"),
        ),
        where,
    )


def _token_ids(where: str, value: object) -> tuple[int, ...]:
    """One id, a list of them, or none; without repetitions."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{where}: eos_token_id is {value!r}, not token ids", hint=_AGAIN)
    return tuple(dict.fromkeys(ids))


def _refuse_unsupported(where: str, config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: activation {activation!r} is not supported", hint=_USE)
    if config.get("use_sliding_window"):
        raise ModelError(f"{where}: sliding-window attention is not supported", hint=_USE)
    if config.get("mlp_bias"):
        raise ModelError(f"{where}: biases in the MLP are not supported", hint=_USE)
    if config.get("quantization_config"):
        raise ModelError(
            f"{where}: quantized safetensors are not supported", hint="use the unquantized model"
        )


def _hf_scaling(where: str, config: Mapping[str, Any]) -> RopeScaling | None:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{where}: RoPE scaling {kind!r} is not supported", hint=_USE)
    fields = _Fields(where, scaling)
    return RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_positions=fields.integer("original_max_position_embeddings"),
    )

"""A model's tensors by their Hugging Face names, from a .gguf file or a folder of safetensors.

Owns the tensor names of both formats. Every problem with the files is a ModelError with one line:
path, what, what to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.errors import ModelError
from runtime.models.gguf_file import GgufFile

AGAIN = "the model is damaged or incomplete: fetch it again"
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


class Source(Protocol):
    """Tensors of one model by their Hugging Face names."""

    where: str

    def has(self, name: str) -> bool: ...

    def read(self, name: str) -> Tensor:
        """Any floating dtype, on the CPU. Only called for names that are there."""


class GgufSource:
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


class FolderSource:
    """One model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.exists():
            shards = [single]
        elif index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict):
                raise ModelError(f"{index}: weight_map is missing", hint=AGAIN)
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
                raise ModelError(f"{shard}: No such file", hint=AGAIN) from e
            except (SafetensorError, OSError) as e:
                raise ModelError(f"{shard}: {e}", hint=AGAIN) from e
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
        raise ModelError(f"{path}: {e.strerror}", hint=AGAIN) from e
    except ValueError as e:
        raise ModelError(f"{path}: is not JSON: {e}", hint=AGAIN) from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object", hint=AGAIN)
    return value

"""Whether a file of weights can be whole, by its own header: before anything loads it for minutes.

Reads headers only, no weights, and needs no torch. What a runtime can do with the model is not
judged here; `shape` says what it goes by.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"GGUF"
_HEAD = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_WHOLE = (4, 5)
"""Whole numbers of 32 bits."""
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT = "general.alignment"
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    30: (1, 2),  # F32, F16, BF16
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),  # Q4_0 to Q8_0
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),  # Q2_K, ...
}
"""ggml's type of a tensor -> elements and bytes of a block. Of others only the start is checked."""
_MOST_HEADER = 100 << 20
"""As the safetensors library has it."""


def fault(path: Path) -> str:
    """What is wrong with a .gguf or .safetensors file; empty when nothing is. Raises OSError."""
    size = path.stat().st_size
    if size < _HEAD.size:  # mmap refuses an empty one
        return "is too short to be weights"
    check = _safetensors_bytes if path.suffix == ".safetensors" else _gguf_bytes
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            promised = check(data)
        except _NotIt as e:
            return str(e)
        except (struct.error, ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return "is truncated or damaged in its header"
    if promised > size:
        return f"is truncated: its header promises {promised:,} bytes, the file has {size:,}"
    return ""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, as far as it decides what may be asked of its runtime."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


def shape(model: Path) -> Shape | None:
    """Of a .gguf file or a model folder; None where its header does not say it: its runtime will
    tell why.
    """
    try:
        if model.is_dir():
            config = json.loads((model / "config.json").read_bytes())
            return _shape(_HF_KEYS, config.get)
        with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _gguf_values(data)
        kind = found.get("general.architecture", b"")
        assert isinstance(kind, bytes)
        return _shape(_GGUF_KEYS, lambda key: found.get(f"{kind.decode()}.{key}"))
    except (OSError, struct.error, ValueError, LookupError, TypeError, AttributeError):
        return None


_HF_KEYS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_size", "intermediate_size"),
)
_GGUF_KEYS = (
    *("block_count", "attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "embedding_length", "feed_forward_length"),
)


def _shape(keys: tuple[str, ...], read: Callable[[str], object]) -> Shape | None:
    """What is left out has the runtime's default."""
    layers, heads, kv_heads, head_dim, hidden, intermediate = map(read, keys)
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return None
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = hidden // heads if head_dim is None else head_dim
    numbers = (layers, heads, kv_heads, head_dim, intermediate)
    whole = [n for n in numbers if isinstance(n, int) and n > 0]
    return Shape(*whole) if len(whole) == len(numbers) else None


def _gguf_values(data: mmap.mmap) -> dict[str, int | bytes]:
    """Texts and 32-bit numbers of its metadata, by key."""
    magic, version, _, values = _HEAD.unpack_from(data)
    if magic != _MAGIC or version not in (2, 3):
        return {}
    cursor, found = _Cursor(data), dict[str, int | bytes]()
    for _ in range(values):
        key, kind = cursor.string().decode(), cursor.number(_U32)
        if kind == _STRING:
            found[key] = cursor.string()
        elif kind in _WHOLE:
            found[key] = cursor.number(_U32)
        else:
            cursor.skip(kind)
    return found


class _NotIt(Exception):
    """Says what it is instead."""


class _Cursor:
    """A position in the file; struct refuses to read past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = _HEAD.size

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return int(value)

    def string(self) -> bytes:
        size = self.number(_U64)
        self.at += size
        return self.data[self.at - size : self.at]

    def skip(self, kind: int) -> None:
        """A metadata value."""
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            element, count = self.number(_U32), self.number(_U64)
            if element in _SCALAR_BYTES:
                self.at += count * _SCALAR_BYTES[element]
            else:
                for _ in range(count):
                    self.skip(element)
        else:
            self.at += _SCALAR_BYTES[kind]


def _gguf_bytes(data: mmap.mmap) -> int:
    """Length of the whole file, as its header and its table of tensors say."""
    magic, version, tensors, values = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise _NotIt("is not a GGUF file")
    if version not in (2, 3):
        raise _NotIt(f"is of GGUF version {version}; 2 and 3 can be read")
    cursor, alignment, end = _Cursor(data), 32, 0
    for _ in range(values):
        key, kind = cursor.string().decode(), cursor.number(_U32)
        if key == _ALIGNMENT:
            (alignment,) = _U32.unpack_from(data, cursor.at)
        cursor.skip(kind)
    for _ in range(tensors):
        cursor.string()
        elements = 1
        for _ in range(cursor.number(_U32)):
            elements *= cursor.number(_U64)
        per_block, nbytes = _BLOCKS.get(cursor.number(_U32), (elements, 1))
        end = max(end, cursor.number(_U64) + elements // max(1, per_block) * nbytes)
    begin = -(-cursor.at // max(1, alignment)) * max(1, alignment)
    return begin + end if tensors else cursor.at


def _safetensors_bytes(data: mmap.mmap) -> int:
    size = int(_U64.unpack_from(data)[0])
    if size > _MOST_HEADER:
        raise _NotIt("is not a safetensors file")
    header = json.loads(data[_U64.size : _U64.size + size])
    if not isinstance(header, dict):
        raise _NotIt("is not a safetensors file")
    ends = (int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__")
    return _U64.size + size + max(ends, default=0)

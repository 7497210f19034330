"""Whether a file of weights can be whole, by its own header: before anything loads it for minutes.

Reads headers only, no weights, and needs no torch. What a runtime can do with the model is not
judged here.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_HEAD = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
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

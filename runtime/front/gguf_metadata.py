"""The metadata of a GGUF file, without its tensors: milliseconds, not the full reader's seconds.

Owns the key-value part of the format (versions 2 and 3, little endian). Knows no key's meaning.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from runtime.errors import ModelError

GgufValue = bool | int | float | str | list["GgufValue"]

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_HEADER = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class _Cursor:
    """A position in the file; every read is bounds-checked by struct or here."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return int(value)

    def string(self) -> str:
        size = self.number(_U64)
        end = self.at + size
        if end > len(self.data):
            raise struct.error("a string runs past the end of the file")
        text = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end
        return text

    def value(self, kind: int) -> GgufValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.number(_U32), self.number(_U64)
            if count > len(self.data):
                raise struct.error("an array runs past the end of the file")
            if element in _SCALARS:
                return list(self.scalars(element, count))
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} is not known")
        (value,) = self.scalars(kind, 1)
        return value

    def scalars(self, kind: int, count: int) -> tuple[bool | int | float, ...]:
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values


def read_gguf_metadata(path: Path) -> dict[str, GgufValue]:
    """All metadata of the file. Raises ModelError when it is missing, truncated or not GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except OSError as e:
        raise ModelError(f"model {path}: {e.strerror}") from e
    except ValueError as e:  # mmap refuses an empty file
        raise ModelError(f"model {path}: not a GGUF file: {e}") from e
    except (struct.error, RecursionError) as e:
        raise ModelError(
            f"model {path}: truncated or damaged in its metadata: {e}", hint="fetch the file again"
        ) from e


def _read(path: Path, cursor: _Cursor) -> dict[str, GgufValue]:
    magic, version, _tensors, count = _HEADER.unpack_from(cursor.data, 0)
    if magic != b"GGUF":
        raise ModelError(f"model {path}: not a GGUF file")
    if version not in (2, 3):
        raise ModelError(f"model {path}: GGUF version {version} is not supported (2 and 3 are)")
    cursor.at = _HEADER.size
    metadata: dict[str, GgufValue] = {}
    for _ in range(count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number(_U32))
    return metadata

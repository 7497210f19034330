"""Reads a GGUF file: metadata (without the tokenizer's long lists) and dequantized tensors.

Every offset and size is checked against the file's size before it is used, and bytes are read,
not mapped: a truncated or corrupt file is a ModelError, never a crash. Knows nothing of models.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from runtime.errors import ModelError

Value = int | float | bool | str | list[int | float | bool]

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_NAME = 1 << 16
_KEPT_ARRAY = 256
_AGAIN = "the file is damaged or incomplete: fetch the model again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is in torch's order (GGUF writes the fastest dimension first)."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


class GgufFile:
    """An open file. Use as a context manager, or call `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._size = path.stat().st_size
            self._file: io.BufferedReader = path.open("rb")
        except OSError as e:
            raise ModelError(
                f"{path}: {e.strerror}", hint="give the path of a .gguf file or of a model folder"
            ) from e
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in float32."""
        info = self.tensors[name]
        raw = np.empty(info.nbytes, dtype=np.uint8)
        self._file.seek(info.start)
        if self._file.readinto(raw.data) != info.nbytes:
            raise self._wrong(f"ends within tensor {name}")
        if info.kind == GGMLQuantizationType.F32:
            return torch.from_numpy(raw.view(np.float32)).view(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        try:
            # Damaged scales become inf or nan; the self-test of the engine catches those.
            with np.errstate(all="ignore"):
                return torch.from_numpy(dequantize(rows, info.kind)).view(info.shape)
        except NotImplementedError as e:
            raise ModelError(
                f"{self.path}: tensor {name} is of type {info.kind.name}, which is not supported",
                hint="use a Q4_0, Q4_1, Q8_0, K-quant, F16 or BF16 file",
            ) from e

    def _wrong(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}", hint=_AGAIN)

    def _take(self, size: int) -> bytes:
        if size > self._size or len(data := self._file.read(size)) != size:
            raise self._wrong(f"ends within its header (size {self._size:,} bytes)")
        return data

    def _unpack(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _text(self) -> str:
        return self._take(self._unpack("<Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Value | None:
        """One value; None for a list that is skipped (strings, or long)."""
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            form = _SCALARS[kind]
            value: int | float | bool = struct.unpack(form, self._take(struct.calcsize(form)))[0]
            return value
        if kind != _ARRAY:
            raise self._wrong(f"has a metadata value of unknown type {kind}")
        element, count = self._unpack("<I"), self._unpack("<Q")
        if element in _SCALARS:
            form = _SCALARS[element]
            data = self._take(count * struct.calcsize(form))
            if count > _KEPT_ARRAY:
                return None
            return [item[0] for item in struct.iter_unpack(form, data)]
        if element != _STRING:
            raise self._wrong(f"has a list of unknown type {element}")
        for _ in range(count):
            self._take(self._unpack("<Q"))
        return None

    def _read_header(self) -> None:
        if self._size < 24 or self._take(4) != b"GGUF":
            raise ModelError(
                f"{self.path}: is not a GGUF file ({self._size:,} bytes)",
                hint="give the path of a .gguf file or of a model folder",
            )
        version = self._unpack("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported",
                hint="convert it to version 3",
            )
        tensors, values = self._unpack("<Q"), self._unpack("<Q")
        for _ in range(values):
            key = self._text()
            value = self._value(self._unpack("<I"))
            if value is not None:
                self.metadata[key] = value
        found = [self._tensor_info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._wrong(f"has alignment {alignment!r}")
        base = -(-self._file.tell() // alignment) * alignment
        for name, info in found:
            end = base + info.start + info.nbytes
            if end > self._size:
                raise self._wrong(
                    f"is truncated: tensor {name} ends at byte {end:,}, the file at {self._size:,}"
                )
            self.tensors[name] = TensorInfo(info.shape, info.kind, base + info.start, info.nbytes)

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name = self._text()
        rank = self._unpack("<I")
        if len(name) > _MAX_NAME or not 1 <= rank <= 4:
            raise self._wrong(f"has a tensor of rank {rank}")
        shape = tuple(self._unpack("<Q") for _ in range(rank))[::-1]
        number, offset = self._unpack("<I"), self._unpack("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as e:
            raise self._wrong(f"has tensor {name} of unknown type {number}") from e
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        count = math.prod(shape)
        if count == 0 or shape[-1] % per_block:
            raise self._wrong(f"has tensor {name} of shape {shape}, impossible for {kind.name}")
        return name, TensorInfo(shape, kind, offset, count // per_block * block_bytes)

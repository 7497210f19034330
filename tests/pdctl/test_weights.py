"""Files of weights that are whole, cut off, or something else."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from pdctl import weights


@pytest.fixture(params=[32, 64])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Metadata of every shape, and tensors of two types."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(request.param)
    writer.add_uint8("a", 1)
    writer.add_float64("b", 1.0)
    writer.add_bool("c", True)
    writer.add_string("d", "text")
    writer.add_array("e", ["one", "two", "drei €"])
    writer.add_array("f", [1, 2, 3])
    writer.add_tensor("x", np.ones((3, 5), np.float32))
    quantized = np.zeros((2, 36), np.uint8)  # two rows of two blocks
    writer.add_tensor("y", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_cut_anywhere_is_found(model: Path) -> None:
    whole = model.read_bytes()
    assert weights.fault(model) == ""
    reader = gguf.GGUFReader(model)
    end = max(t.data_offset + t.n_bytes for t in reader.tensors)
    for size in range(end):
        model.write_bytes(whole[:size])
        assert weights.fault(model), f"cut to {size} of {end} bytes"
    model.write_bytes(whole[: end - 1])
    assert weights.fault(model) == (
        f"is truncated: its header promises {end} bytes, the file has {end - 1}"
    )


def test_the_blocks_are_those_of_ggml() -> None:
    for number, sizes in weights._BLOCKS.items():
        assert sizes == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]


def safetensors(path: Path, nbytes: int) -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "x": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]},
    }
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(nbytes)
    path.write_bytes(whole)
    return whole


def test_safetensors_cut_anywhere_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    whole = safetensors(path, 9)
    assert weights.fault(path) == ""
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert weights.fault(path), f"cut to {size} of {len(whole)} bytes"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("m.gguf", b"<html>not found</html>  ", "is not a GGUF file"),
        ("m.gguf", struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "is of GGUF version 1"),
        ("m.gguf", struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "damaged in its header"),
        ("m.gguf", struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "damaged in its header"),
        ("m.gguf", b"", "too short"),
        ("m.safetensors", struct.pack("<Q", 9) + b'{"x": {}}' + bytes(9), "damaged in its header"),
        ("m.safetensors", b"<html>not found</html>  ", "is not a safetensors file"),
        ("m.safetensors", struct.pack("<Q", 4) + b"[1] " + bytes(20), "is not a safetensors file"),
    ],
)
def test_what_is_something_else(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert says in weights.fault(tmp_path / name)

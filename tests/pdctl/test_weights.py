"""Files of weights that are whole, cut off, or something else."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl import topology_checks, weights
from pdctl.topology import Topology
from runtime.errors import ConfigError
from runtime.kv.layout import KvLayout, Shard
from runtime.kv.pool import pool_blocks
from runtime.models.config import ModelSpec, spec_from_hf
from runtime.models.shard import allowed_sizes


@pytest.fixture(params=[32, 64])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Metadata of every shape, and tensors of two types."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(30)
    writer.add_embedding_length(576)
    writer.add_feed_forward_length(1536)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
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


# ---- what a runtime goes by ----------------------------------------------------------------------

SHAPE = weights.Shape(layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
CONFIG = {
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "hidden_size": 576, "intermediate_size": 1536,
}  # fmt: skip


def test_the_shape_is_in_the_header(model: Path, tmp_path: Path) -> None:
    assert weights.shape(model) == SHAPE
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert weights.shape(tmp_path) == SHAPE
    wider = CONFIG | {"head_dim": 128, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(wider))
    assert weights.shape(tmp_path) == replace(SHAPE, head_dim=128, kv_heads=9)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hidden_size": 9}', "{"])
def test_a_header_that_does_not_say_it_has_no_shape(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert weights.shape(tmp_path) is None
    (tmp_path / "m.gguf").write_text(content)
    assert weights.shape(tmp_path / "m.gguf") is None


def spec_of(shape: weights.Shape) -> ModelSpec:
    config = CONFIG | {
        "model_type": "llama", "num_hidden_layers": shape.layers, "head_dim": shape.head_dim,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate, "vocab_size": 9, "max_position_embeddings": 9,
    }  # fmt: skip
    return spec_from_hf("config.json", config, {})


SHAPES = st.builds(
    lambda layers, kv_heads, group, head_dim, columns: weights.Shape(
        layers, kv_heads * group, kv_heads, 2 * head_dim, columns
    ),
    *(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64)),
    st.integers(1, 500),
)


@given(SHAPES, st.data())
def test_the_rules_are_those_of_the_runtime(shape: weights.Shape, data: st.DataObject) -> None:
    allowed = allowed_sizes(spec_of(shape))
    assert topology_checks.tp_sizes(shape) == allowed
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    size = data.draw(st.sampled_from(allowed))
    block_size = data.draw(st.integers(1, 64))
    layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, block_size, dtype)
    rank = Shard(0, size).layout(layout)

    def found(kv_cache: int) -> list[topology_checks.Finding]:
        group = {"tp_size": size, "kv_cache": kv_cache, "block_size": block_size}
        content = {"name": "t", "model": "m", "hosts": {"a": None}, "mixed": (group,)}
        topology = Topology.model_validate(content | {"dtype": dtype})
        return list(topology_checks.model_findings(topology, shape))

    least = 2 * rank.block_bytes * size
    assert pool_blocks(rank, least, size) == 2 and not found(least)
    with pytest.raises(ConfigError):
        pool_blocks(rank, least - 1, size)
    (small,) = found(least - 1)
    assert small.path == ("mixed", 0, "kv_cache") and small.what.endswith(" bytes")

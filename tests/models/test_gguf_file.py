"""GGUF files: what is read equals what was written; damage is one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import ModelError
from runtime.models.gguf_file import GgufFile
from runtime.models.loader import load_model

WriteGguf = Callable[..., Path]
CPU = torch.device("cpu")

SAME_FILE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_reads_metadata_and_skips_the_tokenizers_lists(write_gguf: WriteGguf) -> None:
    with GgufFile(write_gguf()) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.block_count"] == 2
        assert file.metadata["tokenizer.ggml.eos_token_id"] == 2
        assert "tokenizer.ggml.tokens" not in file.metadata


def test_reads_tensors_in_torchs_order_of_dimensions(write_gguf: WriteGguf) -> None:
    path = write_gguf()
    reference = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    with GgufFile(path) as file:
        assert file.tensors["token_embd.weight"].shape == (128, 64)
        for name, data in reference.items():
            assert np.array_equal(file.tensor(name).numpy(), data)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_dequantizes(write_gguf: WriteGguf, kind: str) -> None:
    plain = GgufFile(write_gguf()).tensor("token_embd.weight")
    quantized = write_gguf(quantize=gguf.GGMLQuantizationType[kind])
    with GgufFile(quantized) as file:
        error = (file.tensor("token_embd.weight") - plain).abs().max()
    assert error < (0.04 if kind.startswith("Q4") else 0.003)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere\.gguf: No such file"):
        load_model(tmp_path / "nowhere.gguf", torch.float32, CPU)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelError, match=r"model\.gguf: is not a GGUF file"):
        load_model(path, torch.float32, CPU)


def test_truncated_tensor_data_names_tensor_and_sizes(write_gguf: WriteGguf) -> None:
    path = write_gguf()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 1000])
    with pytest.raises(ModelError, match=rf"is truncated: tensor .* the file at {size - 1000:,}"):
        load_model(path, torch.float32, CPU)


@SAME_FILE
@given(fraction=st.floats(0, 0.999))
def test_truncation_anywhere_is_a_model_error(
    tmp_path: Path, tiny_gguf: bytes, fraction: float
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf[: int(len(tiny_gguf) * fraction)])
    with pytest.raises(ModelError) as caught:
        load_model(path, torch.float32, CPU)
    assert str(path) in str(caught.value)
    assert caught.value.hint


@SAME_FILE
@given(data=st.data())
def test_a_damaged_header_loads_or_is_a_model_error(
    tmp_path: Path, tiny_gguf: bytes, data: st.DataObject
) -> None:
    path = tmp_path / "damaged.gguf"
    content = bytearray(tiny_gguf)
    header = content.index(b"blk.1.ffn_down.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, header))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        load_model(path, torch.float32, CPU)
    except ModelError as e:
        assert str(path) in str(e)


def test_a_missing_tensor_is_named(write_gguf: WriteGguf) -> None:
    path = write_gguf(without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(path, torch.float32, CPU)


def test_another_architecture_is_refused_and_the_supported_ones_named(
    write_gguf: WriteGguf,
) -> None:
    with pytest.raises(ModelError, match="'gpt2' are not supported") as caught:
        load_model(write_gguf("gpt2"), torch.float32, CPU)
    assert "llama, qwen2" in caught.value.hint

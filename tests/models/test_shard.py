"""A model computed by several ranks, as threads, gives the logits of the whole model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from random_models import CPU, make, whole_prompt_logits
from torch import Tensor

from runtime.errors import ConfigError
from runtime.kv.layout import Shard
from runtime.models.config import ModelSpec
from runtime.models.loader import load_model, read_spec
from runtime.models.shard import allowed_sizes, shard_model


class ThreadRanks:
    """One rank of a group of threads."""

    def __init__(self, shard: Shard, parts: list[Tensor | None], meet: threading.Barrier) -> None:
        self.shard = shard
        self._parts = parts
        self._meet = meet

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.shard.rank] = x.clone()
        self._meet.wait(20)
        parts = [part for part in self._parts if part is not None]
        self._meet.wait(20)
        return parts

    def sum_(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def meet(self) -> None:
        self._meet.wait(20)

    def gather(self, part: Tensor) -> Tensor:
        parts = self._exchange(part)
        return torch.cat(parts, -1) if self.shard.rank == 0 else part


def logits_of_ranks(path: Path, size: int, tokens: list[int]) -> tuple[Tensor, set[str]]:
    parts: list[Tensor | None] = [None] * size
    meet = threading.Barrier(size)

    def rank(number: int) -> tuple[Tensor, str]:
        ranks = ThreadRanks(Shard(number, size), parts, meet)
        decoder = load_model(path, torch.float32, CPU, ranks)
        return whole_prompt_logits(decoder, tokens), decoder.weights.digest

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(rank, range(size)))
    return results[0][0], {digest for _, digest in results}


# 4 attention heads, 2 KV heads: with 4 ranks each KV head is on two of them.
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["llama-tied", "llama-biased", "qwen3", "ernie4_5"])
def test_logits_of_ranks_are_those_of_one(kind: str, size: int, tmp_path: Path) -> None:
    make(kind, tmp_path)
    tokens = torch.randint(0, 128, (40,), generator=torch.manual_seed(1)).tolist()
    whole = load_model(tmp_path, torch.float32, CPU)
    logits, digests = logits_of_ranks(tmp_path, size, tokens)
    torch.testing.assert_close(logits, whole_prompt_logits(whole, tokens), rtol=1e-4, atol=1e-4)
    # A rank holds only its part, and is still known as the same model.
    assert digests == {whole.weights.digest}


def test_each_weight_is_on_one_rank(tmp_path: Path) -> None:
    make("llama", tmp_path)
    whole = load_model(tmp_path, torch.float32, CPU)
    meet = threading.Barrier(2)
    for rank in range(2):
        ranks = ThreadRanks(Shard(rank, 2), [None, None], meet)
        part = load_model(tmp_path, torch.float32, CPU, ranks)
        for name in ("qkv", "output", "gate_up", "down"):
            ours, all_ = (getattr(d.weights.layers[0], name) for d in (part, whole))
            assert ours.untyped_storage().nbytes() * 2 == all_.untyped_storage().nbytes()


def test_a_step_ends_when_the_kv_of_every_rank_is_stored(tmp_path: Path) -> None:
    """Also one that nothing is sampled from: prefill sends its KV on at once."""
    make("llama", tmp_path)
    parts: list[Tensor | None] = [None, None]
    meet, stored = threading.Barrier(2), [0, 0]

    def rank(number: int) -> list[int]:
        ranks = ThreadRanks(Shard(number, 2), parts, meet)
        decoder = load_model(tmp_path, torch.float32, CPU, ranks)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            if number == 1:
                time.sleep(0.05)
            stored[number] += 1
            return q.reshape(len(q), -1)

        with torch.inference_mode():
            tokens, none = torch.arange(5), torch.empty(0, dtype=torch.int64)
            assert decoder.logits(tokens, tokens, attend, none).shape == (0, 128)
        return list(stored)

    with ThreadPoolExecutor(2) as pool:
        assert next(iter(pool.map(rank, range(2)))) == [2, 2]


def test_an_uneven_vocabulary_is_whole_again() -> None:
    spec = spec_of(heads=8, kv_heads=8, vocab=10)
    slices = [shard_model(spec, Shard(rank, 4)).vocab for rank in range(4)]
    assert [list(range(10))[part] for part in slices] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def spec_of(heads: int, kv_heads: int, vocab: int = 128, intermediate: int = 144) -> ModelSpec:
    values = dict.fromkeys(ModelSpec.__dataclass_fields__, 1) | {
        "heads": heads, "kv_heads": kv_heads, "head_dim": 8, "vocab": vocab,
        "intermediate": intermediate,
    }  # fmt: skip
    return ModelSpec(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [(9, 3, [1, 3, 9]), (8, 2, [1, 2, 4, 8]), (12, 4, [1, 2, 4, 12]), (4, 1, [1, 2, 4])],
)
def test_sizes_that_split_a_model(heads: int, kv_heads: int, sizes: list[int]) -> None:
    assert allowed_sizes(spec_of(heads, kv_heads)) == sizes


def test_other_sizes_are_refused_with_those_that_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size 2 .* 9 attention heads, 3 KV heads") as caught:
        shard_model(spec_of(9, 3), Shard(0, 2))
    assert caught.value.hint == "use tp_size 1, 3 or 9"


def test_the_spec_is_read_without_weights(tmp_path: Path) -> None:
    make("llama", tmp_path)
    whole = load_model(tmp_path, torch.float32, CPU).spec
    (tmp_path / "model.safetensors").unlink()
    assert read_spec(tmp_path) == whole

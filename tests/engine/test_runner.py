"""The runner on a tiny model: native and torch attention agree, and batching changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.engine.contract import EngineRequest
from runtime.engine.runner import Runner
from runtime.engine.sequence import Sequence, Work
from runtime.kv.layout import KvLayout
from runtime.kv.pool import KvPool
from runtime.models.decoder import Decoder
from runtime.models.loader import load_model
from runtime.protocol import RequestId, SamplingParams

CPU = torch.device("cpu")
BLOCK = 8


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_model(tiny_model, torch.float32, CPU)


@pytest.fixture(params=["native", "torch"])
def runner(request: pytest.FixtureRequest, decoder: Decoder) -> Iterator[Runner]:
    spec = decoder.spec
    layout = KvLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "float32")
    pool = KvPool(layout, 40, CPU)
    for layer in pool.layers:
        layer.fill_(torch.nan)  # reading what was never written shows
    yield Runner(decoder, pool, threads=1, native=request.param == "native")


def run(runner: Runner, work: list[Work]) -> Tensor:
    return runner.run(work, lambda _: None)


def sequence(tokens: list[int], first_block: int) -> Sequence:
    params = SamplingParams(max_tokens=1)
    made = Sequence.of(EngineRequest(RequestId("x"), tuple(tokens), params, "generate"), 0, 999, 0)
    count = -(-len(tokens) // BLOCK)
    # Scattered and descending: order in the pool means nothing.
    made.blocks = list(range(first_block + count - 1, first_block - 1, -1))
    return made


def tokens_of(length: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 96, (length,), generator=torch.manual_seed(seed)).tolist()
    return tokens


def expected(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits after the last token, without any cache."""

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, *kv.unbind(1)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(tokens), -1)

    with torch.inference_mode():
        last = torch.tensor([len(tokens) - 1])
        return decoder.logits(torch.tensor(tokens), torch.arange(len(tokens)), attend, last)[0]


@pytest.mark.parametrize("chunks", [[45], [8, 37], [1] * 45, [13, 1, 1, 24, 6], [44, 1]])
def test_chunks_make_no_difference(runner: Runner, decoder: Decoder, chunks: list[int]) -> None:
    tokens = tokens_of(45, seed=0)
    one = sequence(tokens, 3)
    for count in chunks:
        rows = run(runner, [Work(one, count)])
        one.num_computed += count
    torch.testing.assert_close(rows[0], expected(decoder, tokens), rtol=1e-4, atol=1e-4)


def test_a_mixed_batch_equals_each_alone(runner: Runner, decoder: Decoder) -> None:
    prompts = [tokens_of(n, seed=n) for n in (17, 30, 1, 24)]
    many = [sequence(prompt, 10 * i) for i, prompt in enumerate(prompts)]
    for one in many[:2]:
        run(runner, [Work(one, len(one.tokens) - 5)])
        one.num_computed = len(one.tokens) - 5
    run(runner, [Work(many[0], 4)])
    many[0].num_computed += 4
    # One token left, a chunk that ends, a whole prompt of one token, and a chunk that does not end.
    work = [Work(many[0], 1), Work(many[1], 5), Work(many[2], 1), Work(many[3], 20)]
    rows = run(runner, work)
    assert rows.shape == (3, 96)
    for row, prompt in zip(rows, prompts, strict=False):
        torch.testing.assert_close(row, expected(decoder, prompt), rtol=1e-4, atol=1e-4)


def test_no_row_when_nothing_samples(runner: Runner) -> None:
    one = sequence(tokens_of(20, seed=1), 0)
    assert run(runner, [Work(one, 12)]).shape == (0, 96)


def test_the_other_blocks_stay_untouched(runner: Runner) -> None:
    one = sequence(tokens_of(11, seed=1), 4)
    run(runner, [Work(one, 11)])
    for layer in runner.pool.layers:
        written = {int(i) for i in layer.isfinite().flatten(1).any(1).nonzero()}
        assert written == {4, 5}
        # Three of the second block's eight tokens.
        assert layer[4].isfinite().sum() * 8 == layer[4].numel() * 3


def test_layers_that_are_told_are_final(runner: Runner, decoder: Decoder) -> None:
    one = sequence(tokens_of(24, seed=4), 5)
    told: list[tuple[int, list[Tensor]]] = []

    def on_layers(count: int) -> None:
        told.append((count, [layer.clone() for layer in runner.pool.layers[:count]]))

    runner.run([Work(one, 24)], on_layers)
    assert [count for count, _ in told] == list(range(1, decoder.spec.layers))
    for count, seen in told:
        for before, after in zip(seen, runner.pool.layers[:count], strict=True):
            assert torch.equal(before[one.blocks], after[one.blocks])
            assert not before[one.blocks].isnan().any()

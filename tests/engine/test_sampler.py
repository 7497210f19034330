"""Sampling: the right distribution, a function of seed, position and logits alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.engine.sampler import (
    draw,
    is_plain,
    penalize,
    probabilities,
    sample,
    uniform,
    unusable,
)
from runtime.front.openai_types import CompletionBody, parse_body
from runtime.protocol import SamplingParams

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40).map(torch.tensor)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=10, **changes)


def normalized(scores: Tensor, **changes: Any) -> list[float]:
    chances = probabilities(scores, params(**changes))
    return (chances / chances.sum()).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        *({"temperature": t} for t in (-1.0, math.nan, math.inf)),
        *({"top_p": p} for p in (-0.1, 1.1, math.nan)),
        {"top_k": -1},
        *({"min_p": p} for p in (-0.1, 2.0, math.nan)),
        *({"presence_penalty": p} for p in (math.nan, math.inf)),
        *({"frequency_penalty": p} for p in (math.nan, -math.inf)),
        *({"repetition_penalty": p} for p in (0.0, -1.0, math.nan, math.inf)),
        {"logprobs": -1},
    ],
)
def test_parameters_that_choose_nothing_are_told(changes: dict[str, Any]) -> None:
    assert next(iter(changes)) in unusable(params(**changes))


@pytest.mark.parametrize("end", ["least", "most"])
def test_whatever_the_front_allows_chooses_a_token(end: str) -> None:
    most = end == "most"
    asked = {
        "model": "m",
        "prompt": "p",
        "temperature": 2 if most else 0,
        "top_p": 1 if most else 1e-300,
        "top_k": 1 << 31 if most else -1,
        "min_p": 1 if most else 0,
        "presence_penalty": 2 if most else -2,
        "frequency_penalty": 2 if most else -2,
        "repetition_penalty": 10 if most else 1e-300,
        "logprobs": 20 if most else 0,
    }
    body = parse_body(json.dumps(asked).encode(), CompletionBody)
    assert not unusable(body.sampling(max_tokens=1, seed=0))


NUMBERS = st.floats() | st.sampled_from([0.0, 1.0, 1e-300, -1e-300, 1e300])


@settings(max_examples=400)
@given(
    logits=LOGITS,
    output=st.booleans(),
    changes=st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("temperature", "top_p", "min_p"), NUMBERS),
            "top_k": st.integers(-2, 1 << 64),
            "logprobs": st.none() | st.integers(-2, 60),
        },
    ),
)
def test_all_other_parameters_choose_a_token(
    logits: Tensor, output: bool, changes: dict[str, Any]
) -> None:
    asked = params(**changes)
    if not unusable(asked):
        token = sample(logits, asked, [0], [0] if output else []).token
        assert 0 <= token < len(logits)


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 10**6))
def test_uniform_is_in_range_and_repeats(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    for numbers in (
        [uniform(7, i) for i in range(4000)],
        [uniform(s, 3) for s in range(4000)],
    ):
        deciles = Counter(int(number * 10) for number in numbers)
        assert all(330 < deciles[d] < 470 for d in range(10))


@given(logits=LOGITS)
def test_temperature_zero_is_the_most_likely_token(logits: Tensor) -> None:
    assert sample(logits, params(temperature=0), [], []).token == int(logits.argmax())
    tiny = sample(logits, params(temperature=1e-6, seed=3), [], []).token
    assert logits[tiny] >= logits.max() - 1e-3


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, 3.0, 0.0, 2.0])
    counts = Counter(
        sample(logits, params(temperature=0.7, seed=seed), [], []).token for seed in range(6000)
    )
    for token, chance in enumerate((logits / 0.7).softmax(0).tolist()):
        spread = 4 * math.sqrt(chance * (1 - chance) / 6000)
        assert abs(counts[token] / 6000 - chance) < spread


@given(logits=LOGITS, seed=st.integers(0, 2**64 - 1), output=st.lists(st.integers(0, 0)))
def test_a_draw_depends_on_seed_position_and_logits_only(
    logits: Tensor, seed: int, output: list[int]
) -> None:
    asked = params(seed=seed, top_p=0.9, top_k=7)
    before = logits.clone()
    first = sample(logits, asked, [], output)
    batch = torch.stack([torch.zeros_like(logits), logits])
    assert sample(batch[1], asked, [0] * 5, list(output)) == first
    assert torch.equal(logits, before)


def test_positions_of_one_seed_differ() -> None:
    logits = torch.zeros(1000)
    tokens = {sample(logits, params(seed=1), [], [0] * n).token for n in range(50)}
    assert len(tokens) > 40


@given(logits=LOGITS, k=st.integers(1, 50))
def test_top_k_keeps_the_k_most_likely(logits: Tensor, k: int) -> None:
    chances = probabilities(logits, params(top_k=k))
    kept = chances > 0
    least = logits.sort(descending=True).values[min(k, len(logits)) - 1]
    # Equal probabilities at the border stay together.
    assert kept.sum() >= min(k, len(logits))
    assert (logits[kept] >= least - 1e-5).all()


@given(logits=LOGITS, p=st.floats(0, 1))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_sufficient_set(logits: Tensor, p: float) -> None:
    chances = probabilities(logits, params(top_p=p))
    full = logits.double().softmax(0)
    kept = chances > 0
    assert kept[int(full.argmax())]
    assert full[kept].sum() >= p - 1e-9
    assert full[kept].sum() - full[kept].min() < p + 1e-9 or kept.sum() == 1


def test_top_p_counts_what_top_k_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 top_k=2 leaves 4/7 and 3/7.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert normalized(logits, top_k=2, top_p=0.5) == pytest.approx([1, 0, 0, 0])
    assert normalized(logits, top_k=2, top_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_min_p_is_relative_to_the_most_likely() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert normalized(logits, min_p=0.5) == pytest.approx([0.625, 0.375, 0])
    assert normalized(logits, min_p=1.0) == pytest.approx([1, 0, 0])


@given(chances=st.lists(st.floats(0, 1), min_size=1, max_size=30), at=st.floats(0, 1))
def test_a_draw_never_takes_an_impossible_token(chances: list[float], at: float) -> None:
    if sum(chances) > 1e-300:
        assert chances[draw(torch.tensor(chances, dtype=torch.float64), at)] > 0


def test_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 1.0])
    asked = params(presence_penalty=0.5, frequency_penalty=0.25)
    # The prompt does not count for presence and frequency; token 2 came twice, token 3 once.
    scores = penalize(logits, asked, [0, 1], [2, 3, 2])
    assert scores.tolist() == pytest.approx([2.0, -2.0, 0.0, 0.25])
    scores = penalize(logits, params(repetition_penalty=2.0), [0, 1], [2])
    assert scores.tolist() == pytest.approx([1.0, -4.0, 0.5, 1.0])


def test_penalties_change_the_greedy_choice() -> None:
    logits = torch.tensor([1.0, 0.9])
    asked = params(temperature=0, presence_penalty=0.5)
    assert sample(logits, asked, [0], []).token == 0
    assert sample(logits, asked, [], [0]).token == 1
    assert not is_plain(asked)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    asked = params(temperature=0, logprobs=2, repetition_penalty=100.0)
    output = sample(logits, asked, [1], [])
    assert output.token == 2
    expected = logits.log_softmax(0).tolist()
    assert output.logprob is not None
    assert output.logprob.token == 2
    assert output.logprob.logprob == pytest.approx(expected[2])
    assert [token for token, _ in output.logprob.top] == [1, 2]
    assert [value for _, value in output.logprob.top] == pytest.approx([expected[1], expected[2]])


def test_logprobs_zero_has_no_alternatives_and_none_has_nothing() -> None:
    logits = torch.tensor([1.0, 3.0])
    with_zero = sample(logits, params(temperature=0, logprobs=0), [], [])
    assert with_zero.logprob is not None and with_zero.logprob.top == ()
    assert sample(logits, params(temperature=0), [], []).logprob is None

"""Greedy tokens are the same over shm, over tcp, mixed, and in Hugging Face transformers on the
same weights."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from lab import MODEL_NAME, Deployment
from reference import Greedy

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

LENGTHS = (1, 2, 15, 16, 17, 65, 1024)
OUTPUT_TOKENS = 12
TEXT = (
    "The harbour town lived by its tides. In the morning the boats left before the light, and "
    "the women who mended nets told the children which winds to trust. A visitor once asked how "
    "many ships had been lost; the answer, given without looking up, was forty-two in 1871 and "
    "none since the lighthouse. "
)


def complete(endpoint: str, prompt: Sequence[int]) -> list[int]:
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{endpoint}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    assert len(tokens) == OUTPUT_TOKENS
    return tokens


def tokenize(endpoint: str, text: str) -> list[int]:
    request = urllib.request.Request(
        f"{endpoint}/tokenize",
        json.dumps({"prompt": text}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


@pytest.fixture(scope="module")
def prompts(mixed: Deployment) -> list[list[int]]:
    """One prompt a length, each starting elsewhere in the text so that no prefix is shared by
    accident."""
    tokens = tokenize(mixed.endpoint, TEXT * 30)
    return [tokens[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], transformers_greedy: Greedy) -> list[list[int]]:
    return transformers_greedy(prompts, OUTPUT_TOKENS)


@pytest.mark.parametrize("mode", ["mixed", "over_shm", "over_tcp"])
def test_greedy_tokens_equal_transformers(
    mode: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    deployment: Deployment = request.getfixturevalue(mode)
    endpoint = deployment.endpoint
    one_by_one = [complete(endpoint, p) for p in prompts]
    assert one_by_one == expected, "first pass, one at a time"
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: complete(endpoint, p), prompts))
    assert together == expected, "second pass, all at once, prefixes cached"

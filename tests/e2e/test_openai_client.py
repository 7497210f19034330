"""The real `openai` client against prefill and decode apart, with a mixed instance as the
oracle."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from lab import MODEL_NAME, Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTION = [{"role": "user", "content": "Name three colours of the sea."}]


@pytest.fixture(scope="module")
def apart(over_shm: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{over_shm.endpoint}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def together(mixed: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{mixed.endpoint}/v1", api_key="none", max_retries=0)


BLOCK_BYTES = 16 * 46_080
"""16 tokens of float32 K and V in 30 layers."""


def new_blocks(served: dict[str, Any]) -> int:
    """Blocks of the prompt that decode did not have, the last one perhaps partly filled."""
    blocks: int = -(-served["prompt_tokens"] // 16) - served["decode_cached_tokens"] // 16
    return blocks


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **({"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 12} | options)
    )


def outcome(answer: Any) -> list[tuple[str, str, Any]]:
    return [
        (
            c.message.content,
            c.finish_reason,
            [t.token for t in c.logprobs.content] if c.logprobs else None,
        )
        for c in answer.choices
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "max_tokens": 1},
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.2, "seed": 5, "top_p": 0.8, "n": 3},
        {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": 20, "min_p": 0.02}},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.7, "max_tokens": 24},
        {"temperature": 0, "extra_body": {"repetition_penalty": 1.3}, "max_tokens": 24},
        {"temperature": 0, "stop": ["sea", "blue", "Blue"], "max_tokens": 40},
        {"temperature": 0, "max_tokens": 200},
    ],
    ids=str,
)
def test_apart_equals_together(
    apart: openai.OpenAI, together: openai.OpenAI, options: dict[str, Any], over_shm: Deployment
) -> None:
    answer, oracle = chat(apart, **options), chat(together, **options)
    assert outcome(answer) == outcome(oracle)
    assert answer.usage.completion_tokens == oracle.usage.completion_tokens
    assert answer.usage.prompt_tokens == oracle.usage.prompt_tokens
    over_shm.wait_idle("prefill-0", "decode-0")


def test_stream_equals_whole_and_proves_the_handover(apart: openai.OpenAI) -> None:
    whole = chat(apart, temperature=0)
    text, served, usage = "", None, None
    for chunk in chat(apart, temperature=0, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
        served = (chunk.model_extra or {}).get("pdctl") or served
    assert text == whole.choices[0].message.content
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert served is not None
    assert (served["prefill"], served["decode"], served["path"]) == ("prefill-0", "decode-0", "shm")
    assert served["decode_cached_tokens"] == usage.prompt_tokens // 16 * 16, "asked before"
    assert served["kv_bytes"] == new_blocks(served) * BLOCK_BYTES
    assert {"reserve", "prefill", "transfer", "swap_in", "decode"} <= served["stages"].keys()


def test_a_prompt_larger_than_the_buffer_is_refused_at_once_with_both_numbers(
    apart: openai.OpenAI, over_shm: Deployment
) -> None:
    total = over_shm.get("decode-0", "/ledger")["totals"]["buffer_blocks_total"]
    prompt = [100] * (16 * total + 1)
    with pytest.raises(openai.BadRequestError) as failure:
        apart.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=1)
    said = failure.value.message
    assert f"{len(prompt)} tokens needs {total + 1} blocks" in said and f"has {total}" in said
    over_shm.wait_idle("prefill-0", "decode-0")


def test_the_second_turn_of_a_chat_moves_only_what_is_new(
    apart: openai.OpenAI, together: openai.OpenAI
) -> None:
    story = "The harbour town lived by its tides, and the boats left before the light. " * 8
    messages = [{"role": "user", "content": f"{story}Who left before the light?"}]
    first, oracle = (chat(c, temperature=0, messages=messages) for c in (apart, together))
    assert outcome(first) == outcome(oracle)
    served = first.model_extra["pdctl"]
    assert served["decode_cached_tokens"] < 64, "the template's own words at most"
    assert served["kv_bytes"] == new_blocks(served) * BLOCK_BYTES
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And what did the town live by?"},
    ]
    second, oracle = (chat(c, temperature=0, messages=messages) for c in (apart, together))
    assert outcome(second) == outcome(oracle)
    again = second.model_extra["pdctl"]
    had = again["decode_cached_tokens"]
    assert had >= served["prompt_tokens"] // 16 * 16
    assert again["kv_bytes"] == new_blocks(again) * BLOCK_BYTES < served["kv_bytes"] / 2
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens > 0 and details.model_extra["decode_cached_tokens"] == had


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"model": "gpt-4"}, 404, "gpt-4"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"extra_body": {"temprature": 1}}, 400, "temprature"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "5824 tokens"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_said_clearly(
    apart: openai.OpenAI, options: dict[str, Any], status: int, words: str
) -> None:
    with pytest.raises(openai.APIStatusError) as failure:
        apart.chat.completions.create(**{"model": MODEL_NAME, "messages": QUESTION} | options)
    assert failure.value.status_code == status
    assert words in failure.value.message

"""Request bodies: what is accepted, with which meaning, and how each mistake is named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import RequestError
from runtime.front.openai_types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from runtime.front.parameters import IGNORED, UNSUPPORTED

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse_body(json.dumps({"model": "m", "messages": USER} | fields).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return parse_body(json.dumps({"model": "m", "prompt": "p"} | fields).encode(), CompletionBody)


def test_defaults_are_openais() -> None:
    body = chat()
    assert (body.temperature, body.top_p, body.n, body.stream) == (1.0, 1.0, 1, False)
    assert body.wanted_tokens is None and body.default_tokens is None
    assert completion().default_tokens == 16
    params = body.sampling(max_tokens=5, seed=3)
    assert (params.max_tokens, params.seed, params.top_k, params.logprobs) == (5, 3, 0, None)


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [4, 5],
    }
    params = chat(**fields, logprobs=True, top_logprobs=3).sampling(max_tokens=9, seed=1)
    for name, value in fields.items():
        got = getattr(params, name)
        assert got == (tuple(value) if isinstance(value, list) else value), name
    assert params.logprobs == 3
    assert chat(logprobs=True).sampling(max_tokens=1, seed=0).logprobs == 0
    assert completion(logprobs=0).sampling(max_tokens=1, seed=0).logprobs == 0
    assert chat(top_k=-1).sampling(max_tokens=1, seed=0).top_k == 0


def test_seeds() -> None:
    assert chat(seed=5).base_seed() == 5
    assert chat(seed=0).base_seed() == 0
    negative = chat(seed=-(1 << 63)).base_seed()
    assert 0 <= negative < 1 << 63
    assert chat().base_seed() != chat().base_seed(), "random without one"


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).wanted_tokens == 4
    assert chat(max_tokens=3).wanted_tokens == 3


def test_messages_are_flattened() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "name": "x"},
        ]
    )
    assert body.messages == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


def test_ignored_and_inert_parameters_are_accepted() -> None:
    chat(**dict.fromkeys(IGNORED, "anything"))
    chat(**dict.fromkeys(UNSUPPORTED), temperature=None, stop=None)
    for name, values in UNSUPPORTED.items():
        for value in values:
            chat(**{name: value})
    chat(best_of=2, n=2)


def test_the_documentation_names_every_parameter() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    served = {*ChatBody.model_fields, *CompletionBody.model_fields}
    for name in (served - {"stream_options"}) | IGNORED | UNSUPPORTED.keys():
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter", "not supported"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "unsupported_parameter",
            "",
        ),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter", ""),
        ({"echo": True}, "echo", "unsupported_parameter", ""),
        ({"best_of": 2}, "best_of", "unsupported_parameter", ""),
        ({"temprature": 1}, "temprature", "unknown_parameter", "did you mean 'temperature'"),
        ({"max_token": 1}, "max_token", "unknown_parameter", "did you mean 'max_tokens'"),
        ({"qqqqqq": 1}, "qqqqqq", "unknown_parameter", "unknown parameter"),
        ({"model": None}, "model", "missing_parameter", "model is required"),
        ({"model": 5}, "model", "invalid_value", "string"),
        ({"temperature": 2.1}, "temperature", "invalid_value", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "invalid_value", "number"),
        ({"temperature": True}, "temperature", "invalid_value", "number"),
        ({"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        ({"top_k": 1.5}, "top_k", "invalid_value", "integer"),
        ({"min_p": -0.1}, "min_p", "invalid_value", "0"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "1"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value", "1"),
        ({"n": 0}, "n", "invalid_value", "1"),
        ({"n": 129}, "n", "invalid_value", "128"),
        ({"seed": 1 << 63}, "seed", "invalid_value", ""),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value", "2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "0"),
        ({"stop": 5}, "stop", "invalid_value", "string or a list"),
        ({"stop": ["a", ""]}, "stop", "invalid_value", "empty"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value", "16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value", "token ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "invalid_value", "token ids"),
        ({"stream": "yes"}, "stream", "invalid_value", "boolean"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "invalid_value",
            "stream: true",
        ),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "invalid_value", ""),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_value", "boolean"),
    ],
    ids=str,
)
def test_mistakes_are_named(fields: dict[str, Any], param: str, code: str, words: str) -> None:
    for build in (chat, completion):
        with pytest.raises(RequestError) as failure:
            build(**fields)
        error = failure.value
        assert (error.status, error.param, error.code) == (400, param, code), str(error)
        assert words in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        (["hi"], "[0] must be an object"),
        ([{"role": "robot", "content": "x"}], "[0].role is 'robot'"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "[0].role is 'tool'"),
        ([{"role": "user"}], "[0].content is missing"),
        ([{"role": "user", "content": 5}], "[0].content must be"),
        ([*USER, {"role": "user", "content": [{"type": "image_url"}]}], "[1].content has a part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "[0].content has a text part"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "[0].tool_calls is not supported"),
        ([{"content": "x"}], "[0].role is None"),
    ],
    ids=str,
)
def test_message_mistakes(messages: Any, words: str) -> None:
    with pytest.raises(RequestError) as failure:
        chat(messages=messages)
    assert failure.value.param == "messages"
    assert words in str(failure.value)


@pytest.mark.parametrize(
    "prompt", [[], 5, ["a", 1], [[1], "a"], [1, -2], [[1, "x"]], [True], {"a": 1}], ids=str
)
def test_prompt_mistakes(prompt: Any) -> None:
    with pytest.raises(RequestError) as failure:
        completion(prompt=prompt)
    assert failure.value.param == "prompt"


def test_logprobs_mean_different_things() -> None:
    with pytest.raises(RequestError, match="top_logprobs is only allowed"):
        chat(top_logprobs=2)
    with pytest.raises(RequestError, match="logprobs"):
        chat(logprobs=3)
    with pytest.raises(RequestError, match="logprobs"):
        completion(logprobs=True)
    with pytest.raises(RequestError, match="128"):
        completion(prompt=["a"] * 65, n=2)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"a":' * 5000,
        b'{"temperature": 1e999}',
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(RequestError) as failure:
        parse_body(raw, ChatBody)
    assert failure.value.code == "invalid_json" and len(str(failure.value)) < 200


def test_tokenize_takes_one_of_both() -> None:
    assert parse_body(b'{"prompt": "x"}', TokenizeBody).prompt == "x"
    for raw in (b"{}", b'{"prompt": "x", "messages": [{"role":"user","content":"x"}]}'):
        with pytest.raises(RequestError, match="prompt or messages is required") as failure:
            parse_body(raw, TokenizeBody)
        assert failure.value.param == "prompt"


def test_too_many_choices_name_the_prompt() -> None:
    with pytest.raises(RequestError, match="over the limit of 128") as failure:
        completion(prompt=["a"] * 65, n=2)
    assert failure.value.param == "prompt"


MANY = 300_000


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (CompletionBody, b'"prompt":[' + b"[1]," * MANY + b"[1]]", "over the limit of 128"),
        (CompletionBody, b'"prompt":[[' + b"[]," * MANY + b"[]]]", "over the limit of 128"),
        (CompletionBody, b'"prompt":[' + b"{}," * MANY + b"{}]", "prompt must be"),
        (CompletionBody, b'"prompt":[' + b"1," * (1 << 20) + b"1]", "has 1048577 token ids"),
        (CompletionBody, b'"prompt":["",' + b"[]," * MANY + b"[]]", "prompt must be"),
        (ChatBody, b'"messages":[' + b"[]," * MANY + b"[]]", "messages[0] must be an object"),
        (ChatBody, b'"messages":[{"content":[' + b"[]," * MANY + b"[]]}]", "messages[0].role"),
        (
            ChatBody,
            b'"messages":[{"role":"user","content":[' + b"[]," * MANY + b"[]]}]",
            "messages[0].content must be",
        ),
        (
            ChatBody,
            b'"messages":[{"role":"user","content":"x","x":[' + b"[]," * MANY + b"[]]}]",
            "messages[0].x is not supported",
        ),
        (
            ChatBody,
            b'"messages":[{"role":[' + b"[]," * MANY + b"[]]}]",
            "messages[0].role is 'over 65536 bytes'",
        ),
        (ChatBody, b'"tools":[' + b"[]," * MANY + b"[]]", "tools is not supported"),
        (ChatBody, b'"temperature":[' + b"[]," * MANY + b"[]]", "over the limit of 65536 bytes"),
        (ChatBody, b'"stop":[' + b"[]," * MANY + b"[]]", "over the limit of 65536 bytes"),
        (ChatBody, b'"metadata":[' + b"[]," * MANY + b"[]]", "messages is required"),
        (DetokenizeBody, b'"tokens":[' + b"[]," * MANY + b"[]]", "tokens must be"),
        (DetokenizeBody, b'"tokens":[' + b"1," * (1 << 20) + b"1]", "has 1048577 token ids"),
    ],
    ids=lambda v: str(v[:40]) if isinstance(v, bytes) else "",
)
def test_what_a_large_field_cannot_be_is_refused_without_being_built(
    kind: Any, fields: bytes, words: str
) -> None:
    raw = b'{"model":"m",' + fields + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as failure:
            parse_body(raw, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in str(failure.value)
    assert peak < 4 * len(raw), "as objects it takes 15 times its size or more"


def test_an_error_does_not_send_back_what_it_complains_about() -> None:
    long = "x" * 1_000_000
    for fields in (
        {long: 1},
        {"model": long},
        {"stream": True, "stream_options": {long[:9000]: 1}},
    ):
        with pytest.raises(RequestError) as failure:
            chat(**fields)
        assert len(str(failure.value)) < 1000 and len(failure.value.param or "") < 1000
    for message in ({"role": long[:9000]}, {"role": "user", "content": "x", long: 1}):
        with pytest.raises(RequestError) as failure:
            chat(messages=[message])
        assert len(str(failure.value)) < 1000


def test_the_json_inside_of_a_field_is_checked_too() -> None:
    for raw in (b'{"model": "\xff"}', b'{"temperature": 1e999}', b'{"n": 1' + b"[" * 100):
        with pytest.raises(RequestError) as failure:
            parse_body(raw, CompletionBody)
        assert failure.value.code == "invalid_json"
    with pytest.raises(RequestError) as failure:
        parse_body(b'{"model": "m", "prompt": "\xff"}', CompletionBody)
    assert failure.value.param == "prompt"

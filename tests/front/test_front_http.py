"""The HTTP face with the real `openai` client, over a scripted core: answers, errors,
disconnects."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from runtime.errors import TOO_LONG
from runtime.protocol import HEADER_FAILED_LEG


@pytest.fixture(scope="module")
def client(front: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def script(**what: Any) -> str:
    return json.dumps(what)


def chat(client: openai.OpenAI, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)  # type: ignore[arg-type]


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_chat(client: openai.OpenAI) -> None:
    answer: ChatCompletion = chat(client, script(say="Grüße"))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Grüße".encode()) + 1, "EOS counts"
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.prompt_tokens_details.model_extra == {"decode_cached_tokens": 2}
    served = (answer.model_extra or {})["pdctl"]
    assert served["prefill"] == "prefill-0" and served["decode"] == "decode-0"
    assert served["path"] == "shm" and served["kv_bytes"] == 4096
    assert {"admit", "reserve", "prefill", "transfer", "stream"} <= served["stages"].keys()
    assert 0 < served["ttft_s"] <= served["e2e_s"]


def test_chat_stream(client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chat(client, script(say="日本語", delay=0.002), **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "日本語" and not any("\ufffd" in t for t in texts)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    last = chunks[-2]
    assert last.choices[0].finish_reason == "stop"
    assert last.model_extra["pdctl"]["kv_bytes"] == 4096
    assert len({c.id for c in chunks}) == 1


def test_completion_of_every_prompt_kind(client: openai.OpenAI) -> None:
    text = script(say="abc")
    ids = list(text.encode())
    for prompt in (text, [text], ids, [ids]):
        answer = client.completions.create(model="tiny", prompt=prompt)
        assert answer.choices[0].text == "abc", prompt
    answer = client.completions.create(model="tiny", prompt=[text, script(say="de")], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "abc"),
        (1, "abc"),
        (2, "de"),
        (3, "de"),
    ]


def test_completion_stops_after_16_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=script(say="x" * 40))
    assert answer.choices[0].text == "x" * 16 and answer.choices[0].finish_reason == "length"


def test_two_choices_stream_apart(client: openai.OpenAI, front: Any) -> None:
    texts = {0: "", 1: ""}
    finished = []
    for chunk in chat(client, script(say="hello", delay=0.002), n=2, seed=40, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.append((choice.index, "pdctl" in chunk.model_extra))
    assert texts == {0: "hello", 1: "hello"}
    assert sorted(finished) == [(0, True), (1, True)]
    assert front.counters()["last_seed"] == 41


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, script(say="hé"), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [bytes(t.bytes) for t in content] == [b"h", b"\xc3", b"\xa9", b"</s>"]
    assert content[0].logprob == -0.25
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("a", -0.5), ("b", -1.5)]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=script(say="hi"), logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", "i", "</s>"] and logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5, "h": -0.25}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_the_text_and_aborts(
    client: openai.OpenAI, front: Any, stream: bool
) -> None:
    before = front.counters()["aborts"]
    content = script(say="one two three four", delay=0.01)
    answer = chat(client, content, stop=["three", "zzz"], stream=stream)
    if stream:
        chunks = list(answer)
        text = "".join(c.choices[0].delta.content for c in chunks)
        finish = chunks[-1].choices[0].finish_reason
        served = chunks[-1].model_extra["pdctl"]
    else:
        served = answer.model_extra["pdctl"]
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len("one two three")
    assert (text, finish) == ("one two ", "stop")
    assert served["kv_bytes"] == 4096, "what the core knows at the end, not at the first token"
    wait_until(lambda: front.counters()["aborts"] == before + 1, "the core was not told")


def test_token_ids_are_returned_when_asked_for(client: openai.OpenAI) -> None:
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(
        model="tiny", prompt=script(say="ab"), max_tokens=5, extra_body=body
    )
    assert (answer.choices[0].model_extra or {})["token_ids"] == [97, 98, 97, 98, 97]
    assert answer.choices[0].finish_reason == "length"


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_failure_before_the_first_token_is_a_status(
    client: openai.OpenAI, status: int, stream: bool
) -> None:
    content = script(fail_at=0, status=status, leg="transfer", retry_after_s=2.5)
    with pytest.raises(openai.APIStatusError) as failure:
        chat(client, content, stream=stream)
    assert failure.value.status_code == status
    headers = failure.value.response.headers
    error: Any = failure.value.body
    if status == 503:
        assert headers["Retry-After"] == "3"
    else:
        assert headers[HEADER_FAILED_LEG] == "transfer"
        assert (error["leg"], error["instance"]) == ("transfer", "prefill-0")


@pytest.mark.parametrize("code", [TOO_LONG, None])
def test_what_the_core_refuses_has_its_code(client: openai.OpenAI, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        chat(client, script(fail_at=0, status=400, code=code))
    assert failure.value.code == (code or "invalid_value")


def test_a_failure_mid_stream_is_an_event_and_no_clean_end(front: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    body = {"model": "tiny", "prompt": script(say="abcdef", fail_at=3, delay=0.01), "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    assert answer.status == 200
    with pytest.raises(http.client.IncompleteRead) as broken:
        answer.read()
    events = [json.loads(e[6:]) for e in broken.value.partial.decode().strip().split("\n\n")]
    assert events[-1]["error"]["leg"] == "prefill"
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "abc"


def test_one_failed_choice_fails_the_request_and_aborts_the_others(
    client: openai.OpenAI, front: Any
) -> None:
    before = front.counters()["aborts"]
    prompts = [script(say="ab", hang=True), script(fail_at=0)]
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt=prompts)
    wait_until(lambda: front.counters()["aborts"] == before + 1, "the core was not told")


def post(front: Any, path: str, body: bytes, **headers: str) -> tuple[int, Any, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), answer.headers


def test_other_errors_have_the_same_shape(front: Any) -> None:
    cases = [
        ("/v1/chat/completions", b"{nonsense", 400, "invalid_json"),
        ("/v1/chat/completions", b"[1]", 400, "invalid_json"),
        ("/v1/chat/completions", b"[" * 100_000, 400, "invalid_json"),
        (
            "/v1/chat/completions",
            b'{"model":"gpt-4","messages":[{"role":"user","content":"x"}]}',
            404,
            "model_not_found",
        ),
        ("/v1/nothing", b"", 404, "not_found"),
        ("/v1/models", b"", 405, "method_not_allowed"),
        (
            "/v1/completions",
            b'{"model":"tiny","prompt":"' + b"x" * 600 + b'"}',
            400,
            "context_length_exceeded",
        ),
        (
            "/v1/completions",
            b'{"model":"tiny","prompt":"xx","max_tokens":511}',
            400,
            "context_length_exceeded",
        ),
        ("/v1/completions", b'{"model":"tiny","prompt":""}', 400, "invalid_value"),
        ("/v1/completions", b'{"model":"tiny","prompt":[300]}', 400, "invalid_value"),
    ]
    for path, body, status, code in cases:
        got, answer, _ = post(front, path, body)
        assert (got, answer["error"]["code"]) == (status, code), (path, body[:40], answer)
        assert {"message", "type", "param", "code"} <= answer["error"].keys()


def test_a_prompt_over_the_context_names_both_numbers(front: Any) -> None:
    _, answer, _ = post(
        front, "/v1/completions", b'{"model":"tiny","prompt":"' + b"x" * 600 + b'"}'
    )
    assert "600" in answer["error"]["message"] and "512" in answer["error"]["message"]


def test_a_prompt_over_the_context_is_refused_by_its_length(front: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": [1_000_000] * 600}).encode()
    _, answer, _ = post(front, "/v1/completions", body)
    assert answer["error"]["code"] == TOO_LONG, "its ids need not be looked at"


def test_the_last_of_duplicate_keys_counts(front: Any) -> None:
    body = b'{"model":"no","model":"tiny","prompt":"hi"}'
    assert post(front, "/v1/completions", body)[0] == 200


def test_a_huge_body_is_refused_unread(front: Any) -> None:
    status, answer, _ = post(front, "/v1/completions", b"x" * (9 << 20))
    assert status == 413 and str(8 << 20) in answer["error"]["message"]


def test_a_huge_chunked_body_is_refused(front: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    connection.request(
        "POST",
        "/v1/completions",
        iter([b"x" * (1 << 20)] * 9),
        encode_chunked=True,
        headers={"Transfer-Encoding": "chunked"},
    )
    assert connection.getresponse().status == 413


# ---- clients that go away ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_aborts_every_choice(front: Any, stream: bool) -> None:
    before = front.counters()["aborts"]
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    body = {"model": "tiny", "prompt": script(say="abcdef", hang=True), "stream": stream, "n": 2}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        assert connection.getresponse().readline().startswith(b"data: ")
    else:
        wait_until(lambda: front.get("/ledger")["ledger"]["requests"] == 2, "not started")
    connection.close()
    wait_until(lambda: front.counters()["aborts"] == before + 2, "the core was not told")
    wait_until(lambda: front.get("/ledger")["idle"], "something is still held")


# ---- headers ------------------------------------------------------------------------------------


def test_request_ids(front: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": script(say="x")}).encode()
    _, answer, headers = post(front, "/v1/completions", body, **{"X-Request-Id": "mine-1"})
    assert headers["X-Request-Id"] == "mine-1"
    assert headers["x-pdctl-request-id"] != "mine-1"
    assert answer["id"] == f"cmpl-{headers['x-pdctl-request-id']}"
    assert (headers["x-pdctl-prefill"], headers["x-pdctl-decode"]) == ("prefill-0", "decode-0")


def test_internal_headers_need_the_token(front: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": script(say="x")}).encode()
    internal = {
        "x-pdctl-request-id": "router-1",
        "x-pdctl-prefill": "prefill-0",
        "x-pdctl-deadline-s": "7.5",
    }
    _, _, headers = post(front, "/v1/completions", body, **internal, **{"x-pdctl-token": "wrong"})
    assert headers["x-pdctl-request-id"] != "router-1"
    assert front.counters()["last_named_prefill"] == 0
    token = {"x-pdctl-token": "deployment-token"}
    _, _, headers = post(front, "/v1/completions", body, **internal, **token)
    assert headers["x-pdctl-request-id"] == "router-1"
    counters = front.counters()
    assert counters["last_named_prefill"] == 1 and counters["last_deadline_s"] == 7.5


# ---- small routes -------------------------------------------------------------------------------


def test_models_tokenize_and_back(client: openai.OpenAI, front: Any) -> None:
    model = client.models.list().data[0]
    assert model.id == "tiny" and (model.model_extra or {})["max_model_len"] == 512
    assert client.models.retrieve("tiny").id == "tiny"
    _, answer, _ = post(front, "/tokenize", '{"prompt": "é<s>"}'.encode())
    assert answer == {"tokens": [0xC3, 0xA9, 256], "count": 3, "max_model_len": 512}
    _, back, _ = post(front, "/detokenize", json.dumps({"tokens": answer["tokens"]}).encode())
    assert back == {"prompt": "é<s>"}
    messages = {"messages": [{"role": "user", "content": "x"}]}
    _, answer, _ = post(front, "/tokenize", json.dumps(messages).encode())
    assert bytes(t for t in answer["tokens"] if t < 256) == b"user: xassistant: "


@pytest.mark.parametrize(
    ("wanted", "tokens"), [({}, [256, 97]), ({"add_special_tokens": False}, [97])]
)
def test_tokenize_with_or_without_the_bos(
    start_front: Any, byte_model: Path, tmp_path: Path, wanted: dict[str, bool], tokens: list[int]
) -> None:
    folder = Path(shutil.copytree(byte_model, tmp_path / "with-bos"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": True}))
    front = start_front(folder=folder)
    _, answer, _ = post(front, "/tokenize", json.dumps({"prompt": "a"} | wanted).encode())
    assert answer["tokens"] == tokens


@pytest.mark.parametrize("token", [5_000, (1 << 31) - 1])
def test_detokenize_names_what_is_no_token(front: Any, token: int) -> None:
    status, answer, _ = post(front, "/detokenize", json.dumps({"tokens": [1, token]}).encode())
    assert status == 400 and answer["error"]["param"] == "tokens"
    assert f"token id {token} is not in 0.." in answer["error"]["message"]


def test_health_ready_ledger_metrics(front: Any) -> None:
    assert front.get("/health") == {"alive": True}
    ready = front.get("/ready")
    assert ready["ready"] and ready["waiting_for"] is None and ready["incarnation"] == "inc-1"
    assert ready["peers"] == {"prefill-0": {"path": "shm", "reason": ""}}
    ledger = front.get("/ledger")
    assert ledger["tp_size"] == 1
    assert ledger["idle"] and set(ledger["ledger"].values()) == {0}
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    for line in (
        'pdctl_requests_total{endpoint="/v1/completions",status="200"}',
        'pdctl_kv_bytes_total{path="shm"}',
        'pdctl_stage_seconds_count{stage="prefill"}',
        "pdctl_ttft_seconds_count",
        "pdctl_core_generates_total",
        'pdctl_held{what="requests"} 0.0',
        "pdctl_running 0.0",
        "pdctl_tp_size 1.0",
    ):
        assert line in text, line


def test_no_torch_is_imported(byte_model: Path) -> None:
    import subprocess
    import sys

    code = "import sys, runtime.front.server; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr

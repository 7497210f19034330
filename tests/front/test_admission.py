"""Large bodies are parsed and tokenized beside the event loop."""

from __future__ import annotations

import http.client
import json
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from runtime.front import completions, endpoints


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", lambda n: {"prompt": "x" * n, "max_tokens": 1}),
        ("/v1/completions", lambda n: {"prompt": ["x" * (n // 100)] * 100, "max_tokens": 1}),
        ("/v1/completions", lambda n: {"prompt": [1] * (n // 3), "max_tokens": 1}),
        ("/v1/chat/completions", lambda n: {"messages": [{"role": "user", "content": "x" * n}]}),
        (
            "/v1/chat/completions",
            lambda n: {"messages": [{"role": "user", "content": ""}] * (n // 32)},
        ),
        ("/tokenize", lambda n: {"prompt": "x" * n}),
        ("/detokenize", lambda n: {"tokens": [1] * (n // 3)}),
    ],
    ids=["text", "many-texts", "ids", "chat", "many-messages", "tokenize", "detokenize"],
)
def test_a_large_body_does_not_hold_up_the_loop(
    start_front: Any,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: Callable[[int], dict[str, Any]],
) -> None:
    front = start_front(core_options=["--context", "200000"])
    threads = []

    def note(work: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments)

        return noting

    monkeypatch.setattr(completions, "tokenized", note(completions.tokenized))
    monkeypatch.setattr(endpoints, "parse_body", note(endpoints.parse_body))
    for size in (200, 100_000):
        request = json.dumps({"model": "tiny"} | body(size)).encode()
        assert post(front, path, request) == 200
    small, large = threads
    assert (small is front._thread, large is front._thread) == (True, False)


def test_a_body_is_not_kept_for_the_whole_stream(start_front: Any) -> None:
    front = start_front()
    script = json.dumps({"say": "ab", "hang": True})
    body = {"model": "tiny", "prompt": script, "stream": True, "metadata": "x" * (4 << 20)}
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    tracemalloc.start()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert connection.getresponse().readline().startswith(b"data: ")
        readers = ("*/front/admission.py", "*/aiohttp/web_request.py")
        only = [tracemalloc.Filter(True, reader) for reader in readers]
        kept = tracemalloc.take_snapshot().filter_traces(only)
    finally:
        tracemalloc.stop()
        connection.close()
    assert sum(trace.size for trace in kept.traces) < 1 << 20


def post(front: Any, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=20)
    connection.request("POST", path, body)
    return connection.getresponse().status

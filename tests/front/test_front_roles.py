"""Instances that are not a ready decode instance: prefill, keys asked for, a core still loading."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from supervision import eventually

TOKEN = b"deployment-token"  # as conftest gives it


def request(
    front: Any, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


ASK = {"model": "tiny", "prompt": "x"}


@pytest.fixture
def starting(start_front: Any) -> Iterator[Any]:
    yield start_front(wait=False, core_options=["--load", "3600"])


def test_a_prefill_instance_sends_clients_elsewhere(start_front: Any) -> None:
    front = start_front(role="prefill", name="prefill-0")
    status, answer = request(front, "POST", "/v1/completions", ASK)
    assert status == 400 and answer["error"]["code"] == "wrong_instance"
    assert "router or a decode instance" in answer["error"]["message"]
    assert request(front, "GET", "/v1/models")[0] == 200
    assert request(front, "POST", "/tokenize", {"prompt": "x"})[0] == 200
    assert request(front, "GET", "/ready")[1]["role"] == "prefill"


def test_a_loading_instance_is_alive_but_not_ready(starting: Any) -> None:
    assert request(starting, "GET", "/health")[0] == 200
    status, answer = request(starting, "GET", "/ready")
    assert status == 503 and "load the model" in answer["waiting_for"]
    status, answer = request(starting, "POST", "/v1/completions", ASK)
    assert status == 503 and answer["error"]["code"] == "overloaded"


def test_a_decode_instance_waits_for_a_tested_path(start_front: Any) -> None:
    front = start_front(wait=False, core_options=["--unlinked"])
    wanted = "path to a prefill peer (prefill-0)"
    eventually(lambda: wanted in request(front, "GET", "/ready")[1]["waiting_for"])
    status, answer = request(front, "GET", "/ready")
    assert status == 503
    assert answer["peers"] == {"prefill-0": {"path": None, "reason": "connection refused"}}


def test_a_mixed_instance_needs_no_peer(start_front: Any) -> None:
    front = start_front(
        wait=False, role="mixed", name="mixed-0", prefill_peers=[], core_options=["--unlinked"]
    )
    while request(front, "GET", "/ready")[0] != 200:
        pass
    assert request(front, "POST", "/v1/completions", ASK)[0] == 200


def test_keys_guard_the_api_and_nothing_else(start_front: Any) -> None:
    front = start_front(keys=(b"secret",))
    for method, path, body in [
        ("POST", "/v1/completions", ASK),
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": []}),
        ("GET", "/v1/models", None),
    ]:
        status, answer = request(front, method, path, body)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), path
    assert request(front, "POST", "/v1/completions", ASK, Authorization="Bearer secret")[0] == 200
    for path in ("/health", "/ready", "/ledger"):
        assert request(front, "GET", path)[0] == 200


def test_a_client_that_reads_nothing_is_aborted(
    start_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.front.completions.SLOW_CLIENT_S", 0.3)
    front = start_front(core_options=["--context", "40000"])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", front.port))
    # About 200 bytes a token on the wire: more than any socket buffers take. The core never ends by
    # itself, however quick it is.
    script = json.dumps({"say": "x" * 64, "burst": 29_000, "hang": True})
    body = ASK | {"prompt": script, "max_tokens": 30_000, "ignore_eos": True, "logprobs": 20}
    raw = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    deadline = time.monotonic() + 100
    while front.counters()["aborts"] == 0:
        assert time.monotonic() < deadline, "not aborted"
        time.sleep(0.05)
    while not front.get("/ledger")["idle"]:
        assert time.monotonic() < deadline, "still held"
        time.sleep(0.05)
    # When it reads on, it finds out why there is no more: a router must not take it for our death.
    client.settimeout(20)
    read = b"".join(iter(lambda: client.recv(1 << 20), b""))
    client.close()
    error = json.loads(read.rpartition(b"data: ")[2].strip())["error"]
    assert (error["leg"], error["code"]) == ("client", "slow_client")
    assert not read.endswith(b"0\r\n\r\n"), "it looks complete"


def test_a_stop_string_does_not_wait_long_for_the_cores_account(start_front: Any) -> None:
    front = start_front(core_options=["--silent-aborts"])
    script = json.dumps({"say": "one two three", "hang": True, "burst": 8})
    status, answer = request(
        front, "POST", "/v1/completions", ASK | {"prompt": script, "stop": " "}
    )
    assert (status, answer["choices"][0]["text"]) == (200, "one")
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_request_past_its_deadline_is_504(start_front: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("runtime.front.admission.DEADLINE_GRACE_S", 0.0)
    front = start_front(request_timeout_s=0.3)
    body = ASK | {"prompt": json.dumps({"say": "ab", "hang": True}), "max_tokens": 9}
    status, answer = request(front, "POST", "/v1/completions", body)
    assert status == 504 and answer["error"]["code"] == "deadline_exceeded"
    assert answer["error"]["instance"] == "decode-0"
    assert front.counters()["aborts"] == 1


def test_a_request_id_under_way_is_not_taken_twice(start_front: Any) -> None:
    front = start_front()
    internal = {"x-pdctl-token": "deployment-token", "x-pdctl-request-id": "same"}
    first = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    hang = ASK | {"prompt": json.dumps({"say": "ab", "hang": True}), "stream": True}
    first.request("POST", "/v1/completions", json.dumps(hang), internal)
    assert first.getresponse().status == 200
    status, answer = request(front, "POST", "/v1/completions", ASK, **internal)
    assert status == 503 and "under way" in answer["error"]["message"]
    first.close()


def test_measuring_needs_the_deployments_token(front: Any) -> None:
    ask = {"what": "path", "peer": "prefill-0", "blocks": 2}
    for wrong in ({}, {"Authorization": "Bearer nonsense"}):
        status, answer = request(front, "POST", "/internal/measure", ask, **wrong)
        assert (status, answer["error"]["code"]) == (401, "invalid_token")
    vouched = {"Authorization": f"Bearer {TOKEN.decode()}"}
    status, answer = request(front, "POST", "/internal/measure", ask, **vouched)
    assert (status, answer) == (200, {"path": "shm", "nbytes": 8192, "seconds": 0.5})
    status, answer = request(front, "POST", "/internal/measure", ask | {"blocks": 33}, **vouched)
    assert status == 503 and "no 33 blocks" in answer["error"]["message"]
    for bad in ({"what": "path"}, ask | {"what": "everything"}, ask | {"blocks": "two"}, []):
        status, answer = request(front, "POST", "/internal/measure", bad, **vouched)
        assert status == 400 and answer["error"]["message"].startswith("measure: ")

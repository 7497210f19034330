"""Everything about the router that is not a served request: keys, limits, registration, state."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.router.conftest import Harness, StartRouter


async def error_of(router: Harness, data: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
    async with router.client.post(router.url + path, data=data) as response:
        assert response.content_type == "application/json"
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b'{"model": "tiny"', "not valid JSON"),
        (b'{"model": "tiny"} x', "not valid JSON"),
        (b"[1]", "Expected `object`"),
        (b'{"model": 5}', "$.model"),
        (b'{"model": "tiny", "stream": "yes"}', "$.stream"),
        (b'{"model": "tiny", "x": ' + b"[" * 200_000, "not valid JSON"),
        (b'{"model": "\xff"}', "UTF-8"),
    ],
)
async def test_a_malformed_body_is_a_400_that_no_instance_sees(
    router: Harness, body: bytes, words: str
) -> None:
    decode = await router.pair()
    status, error = await error_of(router, body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert decode.seen == []


async def test_the_field_at_fault_is_named(router: Harness) -> None:
    await router.pair()
    _, error = await error_of(router, b'{"model": "tiny", "stream": 3}')
    assert error["param"] == "stream"


async def test_an_unknown_model_is_a_404_that_names_the_known_ones(router: Harness) -> None:
    await router.pair()
    headers = {"X-Request-Id": "mine"}
    async with router.post(body={"model": "gpt-9"}, headers=headers) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (404, "mine")
        error = (await response.json())["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


async def test_without_any_instance_it_is_a_503_never_a_404(router: Harness) -> None:
    async with router.post() as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        error = (await response.json())["error"]
    assert (error["code"], error["message"]) == ("no_healthy_pair", "no instance is registered")


async def test_one_model_can_be_asked_for_by_its_name(start_router: StartRouter) -> None:
    router = await start_router(api_keys=(b"key",))

    async def ask(name: str, key: str = "key") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{router.url}/v1/models/{name}"
        async with router.client.get(url, headers=headers) as response:
            return response.status, await response.json()

    assert (await ask("tiny"))[0] == 503, "nobody knows yet what there will be"
    await router.pair()
    status, card = await ask("tiny")
    assert (status, card["id"], card["object"]) == (200, "tiny", "model")
    status, answer = await ask("org/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "serves tiny" in answer["error"]["message"]
    assert (await ask("tiny", key="wrong"))[0] == 401
    async with router.client.delete(f"{router.url}/v1/models/tiny") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET")


async def test_a_503_says_what_is_missing(router: Harness) -> None:
    await router.register(router.registration("prefill-0", "prefill"))
    decode = await router.start_instance("decode-0")
    await router.register(
        router.registration("decode-0", "decode", decode.url, peers={"prefill-0": None})
    )
    await router.until_reachable("decode-0")
    async with router.post() as response:
        assert response.status == 503
        message = (await response.json())["error"]["message"]
    assert message == "decode-0 has no path to prefill-0"


async def test_keys_are_checked_before_anything_else(start_router: StartRouter) -> None:
    router = await start_router(api_keys=(b"good-key", b"other-key"))
    decode = await router.pair()
    for wrong in ({}, {"Authorization": "Bearer bad"}, {"Authorization": "Basic good-key"}):
        async with router.post(headers=wrong) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with router.client.get(f"{router.url}/v1/models", headers=wrong) as response:
            assert response.status == 401
    assert decode.seen == []
    for right in ("Bearer good-key", "bearer other-key"):
        async with router.post(headers={"Authorization": right}) as response:
            assert response.status == 200


async def test_the_deployments_token_is_no_client_key(start_router: StartRouter) -> None:
    router = await start_router(api_keys=(b"good-key",))
    await router.pair()
    headers = {"x-pdctl-token": router.token, "Authorization": f"Bearer {router.token}"}
    async with router.post(headers=headers) as response:
        assert response.status == 401


def _raw_request(router: Harness, head: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", router.server.port), timeout=10)
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: h\r\n{head}\r\n".encode())
    return connection


def _send_until_refused(connection: socket.socket, size: int, frame: bytes) -> tuple[int, bytes]:
    """(bytes sent, what came back) of a client that pushes, and listens between frames."""
    sent, answer = 0, b""
    while sent < size and not answer:
        connection.sendall(frame)
        sent += len(frame)
        if select.select([connection], [], [], 0)[0]:
            answer = connection.recv(65536)
    return sent, answer or connection.recv(65536)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_100_mb_body_is_refused_before_it_is_read(router: Harness, chunked: bool) -> None:
    decode = await router.pair()
    size = 100 << 20
    head = "Transfer-Encoding: chunked\r\n" if chunked else f"Content-Length: {size}\r\n"
    frame = b"%x\r\n%s\r\n" % (65536, b" " * 65536) if chunked else b" " * 65536
    start = time.perf_counter()
    with _raw_request(router, head) as connection:
        sent, answer = await asyncio.to_thread(_send_until_refused, connection, size, frame)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    assert sent < 32 << 20
    assert time.perf_counter() - start < 3
    assert decode.seen == []


async def test_a_client_that_asks_first_is_refused_before_it_sends(router: Harness) -> None:
    with _raw_request(router, "Content-Length: 99999999\r\nExpect: 100-continue\r\n") as connection:
        answer = await asyncio.to_thread(connection.recv, 65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_asks_first_may_send(router: Harness) -> None:
    await router.pair()
    async with router.post(expect100=True) as response:
        assert response.status == 200


async def test_a_body_that_stops_arriving_is_a_408(
    router: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.router.admit.BODY_TIMEOUT_S", 0.1)
    with _raw_request(router, "Content-Length: 100\r\n") as connection:
        connection.sendall(b"{")
        answer = await asyncio.to_thread(connection.recv, 65536)
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_ends_after_the_deadline_is_a_408(start_router: StartRouter) -> None:
    router = await start_router(request_timeout_s=0.2)
    decode = await router.pair()
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    with _raw_request(router, f"Content-Length: {len(body)}\r\n") as connection:
        connection.sendall(body[:5])
        await asyncio.sleep(0.4)  # within the grace that decode would have
        connection.sendall(body[5:])
        answer = await asyncio.to_thread(connection.recv, 65536)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.2 s" in answer
    assert decode.seen == []


async def test_a_compressed_body_is_refused_in_words(router: Harness) -> None:
    await router.pair()
    async with router.post(headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 415
        assert "gzip" in (await response.json())["error"]["message"]


async def test_a_body_of_several_megabytes_arrives_whole(router: Harness) -> None:
    decode = await router.pair()
    async with router.post(body={"prompt": "x" * (5 << 20)}) as response:
        assert response.status == 200
    assert len(decode.seen[0].body) > 5 << 20


async def test_unknown_paths_and_methods_are_json_errors(router: Harness) -> None:
    async with router.client.get(f"{router.url}/v1/nothing") as response:
        assert response.status == 404
        assert "/v1/nothing" in (await response.json())["error"]["message"]
    async with router.client.get(f"{router.url}/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_registration_needs_the_token(router: Harness) -> None:
    info = router.registration("prefill-0", "prefill")
    for token in ("", "wrong", router.token + "x"):
        status, reply = await router.register(info, token=token)
        assert (status, reply["error"]["code"]) == (401, "invalid_token")
    async with router.client.get(f"{router.url}/internal/instances") as response:
        assert response.status == 401
    assert router.server.registry.instances() == ()


async def test_a_registration_is_answered_with_the_heartbeat_interval(
    start_router: StartRouter,
) -> None:
    router = await start_router(heartbeat_timeout_s=3.0)
    status, reply = await router.register(router.registration("prefill-0", "prefill"))
    assert (status, reply["heartbeat_s"]) == (200, 1.0)
    _, reply = await router.register(router.registration("decode-0", "decode", ready=False))
    assert reply["heartbeat_s"] < 1.0, "who waits for peers asks more often"


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"version": 99}, 409, "version 99"),
        ({"version": 99, "role": "sidecar"}, 409, "version 99"),
        ({"role": "sidecar"}, 400, "sidecar"),
        ({"url": "ftp://x"}, 400, "ftp://x"),
        ({"url": "http://h:1/"}, 400, "http://HOST:PORT"),
        ({"url": "http://h:nine"}, 400, "not a registration"),
        ({"name": None}, 400, "$.name"),
    ],
)
async def test_a_wrong_registration_is_refused_in_words(
    router: Harness, change: dict[str, Any], status: int, words: str
) -> None:
    info = router.registration("prefill-0", "prefill") | change
    got, reply = await router.register(info)
    assert got == status
    assert words in reply["error"]["message"]
    assert router.server.registry.instances() == ()


async def test_the_older_of_two_processes_under_one_name_hears_about_it(router: Harness) -> None:
    first = router.registration("prefill-0", "prefill", incarnation="one")
    await router.register(first)
    await router.register(router.registration("prefill-0", "prefill", incarnation="two"))
    status, reply = await router.register(first)
    assert status == 409
    assert "taken over" in reply["error"]["message"]
    assert (await router.state("prefill-0"))["incarnation"] == "two"


async def test_a_silent_instance_gets_no_request(start_router: StartRouter) -> None:
    router = await start_router(heartbeat_timeout_s=0.3)
    decode = await router.pair()
    async with router.post() as response:
        assert response.status == 200
    await asyncio.sleep(0.35)
    async with router.post() as response:
        assert response.status == 503
        assert "no heartbeat" in (await response.json())["error"]["message"]
    assert len(decode.seen) == 1
    assert (await router.state("decode-0"))["state"] == "dead"


async def test_a_restart_at_another_port_takes_the_next_request(router: Harness) -> None:
    old = await router.pair()
    async with router.post() as response:
        assert response.status == 200
    await old.die()
    new = await router.start_instance("decode-0")
    await router.link(new, ("prefill-0",), incarnation="second")
    async with router.post() as response:
        assert response.status == 200
    assert (len(old.seen), len(new.seen)) == (1, 1)
    state = await router.state("decode-0")
    assert (state["incarnation"], state["ok"], state["failed"]) == ("second", 1, 0)


async def test_a_leaving_instance_gets_no_request(router: Harness) -> None:
    leaving = await router.pair(number=0)
    await router.pair(number=1)
    await router.link(leaving, ("prefill-0",), leaving=True)
    for _ in range(4):
        async with router.post() as response:
            assert (await response.json())["served_by"] == "decode-1"


async def test_ready_and_health(router: Harness) -> None:
    async def look(path: str) -> tuple[int, Any]:
        async with router.client.get(router.url + path) as response:
            return response.status, await response.json()

    assert (await look("/health"))[0] == 200
    status, body = await look("/ready")
    assert (status, body["reasons"]) == (503, ["no instance is registered"])
    await router.register(router.registration("prefill-0", "prefill"))
    status, body = await look("/ready")
    assert (status, body["reasons"]) == (503, ["no decode instance is registered"])
    await router.pair()
    expected = {"ready": True, "pid": os.getpid(), "pairs": 1, "mixed": 0, "reasons": []}
    assert await look("/ready") == (200, expected)


async def test_models_lists_what_lives(router: Harness) -> None:
    await router.pair()
    await router.register(router.registration("mixed-0", "mixed", max_model_len=512))
    async with router.client.get(f"{router.url}/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)


async def test_state_shows_what_status_needs(router: Harness) -> None:
    await router.pair()
    async with router.post() as response:
        assert response.status == 200
    state = await router.state("decode-0")
    assert state["heartbeat_age_s"] < 5
    assert state | {"heartbeat_age_s": 0, "registered_s": 0, "url": "", "fingerprint": {}} == {
        "name": "decode-0",
        "role": "decode",
        "url": "",
        "incarnation": "decode-0-first",
        "model": "tiny",
        "max_model_len": 2048,
        "fingerprint": {},
        "ready": True,
        "leaving": False,
        "draining": False,
        "state": "ready",
        "reason": "",
        "heartbeat_age_s": 0,
        "registered_s": 0,
        "running": 0,
        "waiting": 0,
        "in_flight": 0,
        "ok": 1,
        "failed": 0,
        "peers": {"prefill-0": "shm"},
        "links": ["prefill-0"],
    }


async def test_metrics_count_requests_choices_and_retries(router: Harness) -> None:
    dead = await router.pair(number=0)
    await router.pair(number=1)
    await dead.die()
    for _ in range(3):
        async with router.post() as response:
            assert response.status == 200
    await error_of(router, b"{")
    async with router.client.get(f"{router.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    assert 'pdctl_router_requests_total{endpoint="/v1/completions",status="200"} 3.0' in lines
    assert 'pdctl_router_requests_total{endpoint="/v1/completions",status="400"} 1.0' in lines
    assert 'pdctl_router_retries_total{reason="connect"} 1.0' in lines
    assert 'pdctl_router_instances{role="decode",state="unreachable"} 1.0' in lines
    assert 'pdctl_router_ttfb_seconds_count{endpoint="/v1/completions"} 3.0' in lines
    assert "pdctl_router_in_flight 0.0" in lines
    assert any(line.startswith("pdctl_router_choices_total{decode=") for line in lines)

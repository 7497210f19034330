"""What a client and an instance see of each other through the router, on real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

if TYPE_CHECKING:
    from tests.router.conftest import Harness, StartRouter


async def refuse(status: int, leg: str = "") -> web.Response:
    headers = {"x-pdctl-failed-leg": leg} if leg else {}
    body = {"error": {"message": f"scripted {status}", "code": "scripted"}}
    return web.json_response(body, status=status, headers=headers)


async def test_the_body_reaches_decode_unchanged_with_the_pair_named(router: Harness) -> None:
    decode = await router.pair()
    body = b'{ "model":"tiny",  "prompt": "\\u00e4 \xc3\xa4", "stream":false, "x": 1e400 }'
    async with router.client.post(f"{router.url}/v1/completions", data=body) as response:
        assert response.status == 200
        assert await response.json() == {"ok": True, "served_by": "decode-0"}
        assert "Content-Length" in response.headers
    (seen,) = decode.seen
    assert seen.body == body
    assert seen.path == "/v1/completions"
    assert seen.headers["x-pdctl-prefill"] == "prefill-0"
    assert seen.headers["x-pdctl-token"] == router.token
    assert seen.headers["x-pdctl-request-id"] == response.headers["x-pdctl-request-id"]
    assert 590 < float(seen.headers["x-pdctl-deadline-s"]) <= 600
    assert "transfer-encoding" not in seen.headers


async def test_no_internal_header_of_a_client_gets_through(router: Harness) -> None:
    decode = await router.pair()
    forged = {
        "x-pdctl-token": "forged",
        "X-PDCTL-Prefill": "http://evil",
        "x-pdctl-request-id": "forged",
        "x-pdctl-deadline-s": "1e9",
        "x-pdctl-whatever": "forged",
        "Authorization": "Bearer client-secret",
        "Cookie": "a=b",
        "X-Request-Id": "mine-1",
    }
    async with router.post(headers=forged) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
        assert response.headers["x-pdctl-request-id"] not in ("forged", "mine-1")
    (seen,) = decode.seen
    assert "forged" not in seen.headers.values()
    assert seen.headers["x-pdctl-prefill"] == "prefill-0"
    assert "x-pdctl-whatever" not in seen.headers
    assert "authorization" not in seen.headers and "cookie" not in seen.headers


async def test_instance_headers_reach_the_client_but_the_token_does_not(router: Harness) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        headers = {
            "x-pdctl-prefill": "prefill-0",
            "x-pdctl-decode": "decode-0",
            "x-pdctl-token": request.headers["x-pdctl-token"],
            "Server-Timing": "prefill;dur=3",
            "Connection": "close, x-hop",
            "x-hop": "1",
        }
        return web.json_response({}, headers=headers)

    await router.pair(script)
    async with router.post() as response:
        assert response.headers["x-pdctl-prefill"] == "prefill-0"
        assert response.headers["x-pdctl-decode"] == "decode-0"
        assert "x-pdctl-token" not in response.headers
        assert "x-hop" not in response.headers
        timing = response.headers["Server-Timing"]
    names = [part.split(";")[0].strip() for part in timing.split(",")]
    assert names == ["admit", "route", "prefill"]


async def test_a_refused_connection_is_tried_on_another_pair(router: Harness) -> None:
    dead = await router.pair(number=0)
    await router.pair(number=1)
    await dead.die()
    for _ in range(4):
        async with router.post() as response:
            assert response.status == 200
            assert (await response.json())["served_by"] == "decode-1"
    state = await router.state("decode-0")
    assert state["state"] == "unreachable"
    assert "decode-0" in state["reason"]
    assert state["failed"] == 1, "it was asked again although it was known to be gone"


async def test_without_another_pair_a_refused_connection_is_a_502_naming_it(
    router: Harness,
) -> None:
    decode = await router.pair()
    await decode.die()
    async with router.post() as response:
        error = (await response.json())["error"]
        assert response.status == 502
        assert response.headers["x-pdctl-failed-leg"] == "decode"
    assert (error["leg"], error["instance"], error["code"]) == ("decode", "decode-0", "leg_failed")
    async with router.post() as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert "decode-0" in (await response.json())["error"]["message"]


async def test_a_lost_instance_is_found_again_without_waiting_for_a_heartbeat(
    router: Harness,
) -> None:
    decode = await router.pair()
    await decode.die()
    async with router.post() as response:
        assert response.status == 502
    await decode.revive()
    await router.until_reachable("decode-0")
    async with router.post() as response:
        assert response.status == 200


async def test_an_instance_comes_back_by_itself_once_it_answers(router: Harness) -> None:
    decode = await router.start_instance("decode-0")
    decode.healthy = False
    await router.register(router.registration("prefill-0", "prefill"))
    peers = {"prefill-0": "shm"}
    await router.register(router.registration("decode-0", "decode", decode.url, peers=peers))
    await asyncio.sleep(0.05)
    async with router.post() as response:
        assert response.status == 503
        assert "answered 500" in (await response.json())["error"]["message"]
    decode.healthy = True
    await router.until_reachable("decode-0")
    async with router.post() as response:
        assert response.status == 200


@pytest.mark.parametrize("status", [502, 504])
async def test_a_retry_avoids_the_prefill_instance_that_failed(
    router: Harness, status: int
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        if request.headers["x-pdctl-prefill"] == "prefill-0":
            return await refuse(status, "prefill")
        return web.json_response({"prefill": request.headers["x-pdctl-prefill"]})

    await router.pair(script, prefills=("prefill-0", "prefill-1"))
    for _ in range(6):
        async with router.post() as response:
            assert response.status == 200
            assert (await response.json())["prefill"] == "prefill-1"
    assert (await router.state("prefill-0"))["failed"] == 1
    assert (await router.state("decode-0"))["failed"] == 0


async def test_a_retry_after_a_failed_transfer_takes_another_pair_not_another_side(
    router: Harness,
) -> None:
    tried: list[tuple[str, str]] = []

    def script_of(name: str) -> Any:
        async def script(request: web.Request) -> web.StreamResponse:
            tried.append((request.headers["x-pdctl-prefill"], name))
            return await refuse(502, "transfer") if len(tried) == 1 else web.json_response({})

        return script

    names = ("prefill-0", "prefill-1")
    await router.pair(script_of("decode-0"), number=0, prefills=names)
    async with router.post() as response:
        assert response.status == 200
    assert tried[0] != tried[1]


async def test_an_overloaded_decode_passes_the_request_on(router: Harness) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        return await refuse(503)

    await router.pair(full, number=0)
    await router.pair(number=1)
    for _ in range(4):
        async with router.post() as response:
            assert response.status == 200
            assert (await response.json())["served_by"] == "decode-1"


async def test_when_all_are_overloaded_the_client_gets_their_503(router: Harness) -> None:
    async def full(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "full"}}, status=503, headers={"Retry-After": "7"}
        )

    decode = await router.pair(full)
    async with router.post() as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "7"
        assert (await response.json())["error"]["message"] == "full"
    assert len(decode.seen) == 1


async def test_retries_end_after_the_configured_number(start_router: StartRouter) -> None:
    router = await start_router(retries=1)
    decodes = [await router.pair(_always_502, number=n) for n in range(4)]
    async with router.post() as response:
        assert response.status == 502
        assert (await response.json())["error"]["code"] == "scripted"
    assert sum(len(d.seen) for d in decodes) == 2


async def _always_502(request: web.Request) -> web.StreamResponse:
    return await refuse(502, "decode")


async def test_a_client_error_is_passed_on_and_never_retried(router: Harness) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        return await refuse(400)

    decodes = [await router.pair(script, number=n) for n in range(2)]
    async with router.post() as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "scripted 400"
    assert sum(len(d.seen) for d in decodes) == 1


async def test_a_large_answer_that_does_not_stream_passes_through(router: Harness) -> None:
    body = bytes(range(256)) * (40 << 10)

    async def script(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    await router.pair(script)
    async with router.post() as response:
        assert int(response.headers["Content-Length"]) == len(body)
        assert await response.read() == body


async def test_the_deadline_ends_a_request_with_a_504(start_router: StartRouter) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("not cancelled")

    router = await start_router(request_timeout_s=0.2)
    decode = await router.pair(script)
    async with router.post() as response:
        assert response.status == 504
        error = (await response.json())["error"]
    assert (error["code"], error["instance"]) == ("deadline_exceeded", "decode-0")
    await asyncio.wait_for(decode.cancelled.wait(), 5)


async def test_tokenize_needs_no_linked_pair(router: Harness) -> None:
    decode = await router.start_instance("decode-0")
    await router.link(decode, ())
    async with router.post("/tokenize") as response:
        assert response.status == 200
    async with router.post("/v1/completions") as response:
        assert response.status == 503
        assert "no prefill instance is linked" in (await response.json())["error"]["message"]


async def test_a_mixed_instance_alone_serves(router: Harness) -> None:
    mixed = await router.mixed("mixed-0")
    async with router.post() as response:
        assert (await response.json())["served_by"] == "mixed-0"
    assert "x-pdctl-prefill" not in mixed.seen[0].headers

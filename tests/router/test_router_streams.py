"""Streams through the router: order, back-pressure, and every way in which one can break off."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

if TYPE_CHECKING:
    from tests.router.conftest import FakeInstance, Harness, StartRouter


def event(text: str) -> bytes:
    return f'data: {{"text": "{text}"}}\n\n'.encode()


async def start_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
    await response.prepare(request)
    return response


def cut(request: web.Request) -> None:
    """The instance's process dies here."""
    assert request.transport is not None
    request.transport.abort()


async def read_all(response: aiohttp.ClientResponse) -> bytes:
    """All bytes until the end or the cut."""
    read = b""
    try:
        async for chunk in response.content.iter_any():
            read += chunk
    except aiohttp.ClientPayloadError:
        read += b"<cut>"
    return read


async def test_the_first_chunk_arrives_before_the_answer_ends(router: Harness) -> None:
    seen_by_client = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await asyncio.wait_for(seen_by_client.wait(), 5)
        await response.write(event("second") + b"data: [DONE]\n\n")
        return response

    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readany() == event("first")
        seen_by_client.set()
        assert await read_all(response) == event("second") + b"data: [DONE]\n\n"


async def test_an_event_in_pieces_arrives_whole_and_in_order(router: Harness) -> None:
    text = event("one") + event("two") + b"data: [DONE]\n\n"

    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        for at in range(0, len(text), 7):
            await response.write(text[at : at + 7])
            await asyncio.sleep(0.001)
        return response

    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        assert await read_all(response) == text


@pytest.mark.parametrize("first_byte", [False, True])
async def test_a_leaving_client_cancels_the_instance(router: Harness, first_byte: bool) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        if first_byte:
            response = await start_stream(request)
            await response.write(event("first"))
        await asyncio.sleep(30)
        raise AssertionError("not cancelled")

    decode = await router.pair(script)
    request = asyncio.create_task(_read_first(router))
    async with asyncio.timeout(5):
        while not decode.seen:
            await asyncio.sleep(0.005)
        if first_byte:
            await asyncio.sleep(0.05)
        request.cancel()
        await decode.cancelled.wait()
        while (await router.state("decode-0"))["in_flight"]:
            await asyncio.sleep(0.005)
    assert (await router.state("prefill-0"))["in_flight"] == 0


async def _read_first(router: Harness) -> None:
    async with router.post(body={"stream": True}) as response:
        await response.read()


async def test_idle_means_zero_after_many_clients_left_at_random(router: Harness) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        response = await start_stream(request)
        for _ in range(5):
            await response.write(event("word"))
            await asyncio.sleep(0.005)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def ask(patience_s: float) -> bool:
        try:
            async with asyncio.timeout(patience_s), router.post(body={"stream": True}) as response:
                return (await response.read()).endswith(b"data: [DONE]\n\n")
        except TimeoutError:
            return False

    for number in range(2):
        await router.pair(script, number=number)
    chance = random.Random(7)
    patience = [chance.choice([0.005, 0.02, 0.03, 30.0, 30.0, 30.0]) for _ in range(100)]
    complete = await asyncio.gather(*(ask(p) for p in patience))
    assert all(c for c, p in zip(complete, patience, strict=True) if p == 30.0)
    names = ("prefill-0", "decode-0", "prefill-1", "decode-1")
    async with asyncio.timeout(5):
        while any([(await router.state(n))["in_flight"] for n in names]):
            await asyncio.sleep(0.01)
    assert [(await router.state(n))["failed"] for n in names] == [0, 0, 0, 0]
    assert all(i.prompt_bytes == 0 for i in router.server.registry.instances())


async def test_a_body_is_not_kept_for_the_whole_stream(router: Harness) -> None:
    over = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await over.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    await router.pair(script)
    tracemalloc.start()
    try:
        body = {"stream": True, "prompt": "x" * (4 << 20)}
        async with router.post(body=body) as response:
            assert await response.content.readany() == event("first")
            readers = ("*/router/admit.py", "*/aiohttp/web_request.py")
            only = [tracemalloc.Filter(True, reader) for reader in readers]
            kept = tracemalloc.take_snapshot().filter_traces(only)
            over.set()
            assert await read_all(response) == b"data: [DONE]\n\n"
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in kept.traces) < 6 << 20, "more than the script's own request"


async def test_a_slow_client_slows_the_instance_down(router: Harness) -> None:
    sent = 0

    async def script(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = await start_stream(request)
        for _ in range(1000):
            await response.write(event("x" * 65536))
            sent += 65536
        return response

    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        await response.content.readany()
        await asyncio.sleep(0.5)
        stalled_at = sent
        await asyncio.sleep(0.3)
        assert sent == stalled_at < 40 << 20, "the router swallowed what the client did not read"


async def test_an_instance_that_dies_before_its_first_byte_is_replaced(router: Harness) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)  # headers alone are not an answer
        await asyncio.sleep(0.02)
        cut(request)
        return response

    await router.mixed("mixed-0")
    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        assert response.status == 200
        assert (await response.json())["served_by"] == "mixed-0"


async def test_no_retry_after_the_first_byte_but_an_error_event_and_no_done(
    router: Harness,
) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await response.write(b'data: {"text": "hal')
        await asyncio.sleep(0.05)
        cut(request)
        return response

    decodes = [await router.pair(script, number=n) for n in range(2)]
    async with router.post(body={"stream": True}) as response:
        assert response.status == 200
        text = await read_all(response)
    assert text.startswith(event("first"))
    assert text.endswith(b"<cut>"), "the stream ended as if it were complete"
    assert b"[DONE]" not in text
    blank, failure, rest = text[len(event("first")) :].rpartition(b"data: ")[0], *_last_event(text)
    assert (blank, rest) == (b"", b"<cut>"), "half an event reached the client"
    assert failure["error"]["leg"] == "decode"
    assert failure["error"]["instance"] in ("decode-0", "decode-1")
    assert sum(len(d.seen) for d in decodes) == 1


def _last_event(text: bytes) -> tuple[Any, bytes]:
    data, _, rest = text.rpartition(b"data: ")[2].partition(b"\n\n")
    return json.loads(data), rest


async def test_an_instances_own_error_event_is_not_followed_by_another(router: Harness) -> None:
    own = b'data: {"error": {"message": "prefill-0 died", "leg": "prefill"}}\n\n'

    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await response.write(own)
        await asyncio.sleep(0.05)
        cut(request)
        return response

    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        assert await read_all(response) == event("first") + own + b"<cut>"
    assert (await router.state("decode-0"))["state"] == "ready", "it lives: it spoke"
    assert (await router.state("decode-0"))["failed"] == 0
    assert (await router.state("prefill-0"))["failed"] == 1


async def test_nobody_is_blamed_for_a_client_that_did_not_read(router: Harness) -> None:
    own = b'data: {"error": {"message": "the client read nothing", "leg": "client"}}\n\n'

    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await response.write(own)
        assert request.transport is not None
        request.transport.close()
        return response

    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        assert await read_all(response) == event("first") + own + b"<cut>"
    for name in ("decode-0", "prefill-0"):
        state = await router.state(name)
        assert (state["state"], state["failed"]) == ("ready", 0), name
    async with router.client.get(f"{router.url}/metrics") as response:
        assert 'status="499"' in await response.text()


async def test_a_cut_answer_that_does_not_stream_becomes_a_502(router: Harness) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"half": ')
        await asyncio.sleep(0.05)
        cut(request)
        return response

    await router.pair(script)
    async with router.post() as response:
        assert response.status == 502
        error = (await response.json())["error"]
    assert (error["leg"], error["instance"]) == ("decode", "decode-0")


async def test_the_deadline_ends_a_stream_with_an_error_event(start_router: StartRouter) -> None:
    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await asyncio.sleep(30)
        raise AssertionError("not cancelled")

    router = await start_router(request_timeout_s=0.2)
    await router.pair(script)
    async with router.post(body={"stream": True}) as response:
        text = await read_all(response)
    failure, rest = _last_event(text)
    assert (failure["error"]["code"], rest) == ("deadline_exceeded", b"<cut>")


async def test_least_loaded_spreads_long_requests(router: Harness) -> None:
    release = asyncio.Event()

    async def script(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("first"))
        await release.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    decodes: list[FakeInstance] = [await router.pair(script, number=n) for n in range(3)]
    requests = [asyncio.create_task(_read_first(router)) for _ in range(9)]
    async with asyncio.timeout(5):
        while sum(len(d.seen) for d in decodes) < 9:
            await asyncio.sleep(0.005)
    release.set()
    await asyncio.gather(*requests)
    assert [len(d.seen) for d in decodes] == [3, 3, 3]

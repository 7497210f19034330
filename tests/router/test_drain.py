"""POST /internal/drain: nothing new goes to a drained instance, what runs there goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from tests.router.conftest import Harness

FIRST, LAST = b"data: first\n\n", b"data: [DONE]\n\n"


async def drain(
    router: Harness, name: str, draining: bool = True, token: str | None = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token or router.token}"}
    body = {"name": name, "draining": draining}
    url = f"{router.url}/internal/drain"
    async with router.client.post(url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_it_asks_for_the_token_and_a_known_name(router: Harness) -> None:
    await router.pair()
    status, answer = await drain(router, "decode-0", token="guess")
    assert (status, answer["error"]["code"]) == (401, "invalid_token")
    assert (await router.state("decode-0"))["state"] == "ready"
    status, answer = await drain(router, "decode-7")
    assert (status, answer["error"]["code"]) == (404, "unknown_instance")
    assert "decode-7" in answer["error"]["message"]
    async with router.client.post(
        f"{router.url}/internal/drain",
        json={"name": "decode-0"},
        headers={"Authorization": f"Bearer {router.token}"},
    ) as response:
        assert response.status == 400
    async with router.client.get(f"{router.url}/internal/drain") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_what_runs_goes_on_and_what_comes_goes_elsewhere(router: Harness) -> None:
    release = asyncio.Event()

    async def held(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(FIRST)
        await release.wait()
        await response.write(LAST)
        return response

    slow = await router.pair(held, number=0, prefills=("prefill-0",))
    async with router.post() as running:
        assert await running.content.readexactly(len(FIRST)) == FIRST
        other = await router.pair(number=1, prefills=("prefill-0",))
        status, state = await drain(router, "decode-0")
        assert (status, state["state"], state["in_flight"]) == (200, "draining", 1)
        for _ in range(4):
            async with router.post() as response:
                assert (await response.json())["served_by"] == "decode-1"
        release.set()
        assert await running.content.read() == LAST
    assert (await router.state("decode-0"))["in_flight"] == 0
    assert (len(slow.seen), len(other.seen)) == (1, 4)
    await drain(router, "decode-1")
    async with router.post() as response:
        assert response.status == 503
        message = (await response.json())["error"]["message"]
    assert "decode-0 is drained" in message and "decode-1 is drained" in message
    await drain(router, "decode-0", draining=False)
    async with router.post() as response:
        assert response.status == 200


async def test_a_drained_prefill_is_not_named_to_decode(router: Harness) -> None:
    decode = await router.pair(prefills=("prefill-0", "prefill-1"))
    await drain(router, "prefill-0")
    for _ in range(4):
        async with router.post() as response:
            assert response.status == 200
    assert {seen.headers["x-pdctl-prefill"] for seen in decode.seen} == {"prefill-1"}


async def test_the_instance_is_told_with_its_heartbeat(router: Harness) -> None:
    await router.pair()
    await drain(router, "decode-0")
    at = {"host": "192.0.2.7", "port": 9100}
    await router.register(router.registration("prefill-0", "prefill", peer=at))
    info = router.registration("decode-0", "decode", router.instances[0].url)
    _, reply = await router.register(info)
    assert reply["draining"] is True
    assert reply["peers"] == {"prefill-0": at}

"""200 concurrent streams of which a quarter of the clients leave: every other answer right, then
nothing held."""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest
from lab import MODEL_NAME, Deployment
from streams import Stream, stream_completion

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]

STREAMS = 200
LEAVING = 50
QUESTIONS = [f"{n} plus {n + 3} makes" for n in range(8)] + [
    f"In the year {1900 + n} the harbour town had {n} boats, and every morning " * 3
    for n in range(8)
]


async def answer(
    session: aiohttp.ClientSession, endpoint: str, prompt: str, leave_after: int | None
) -> Stream:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    return await stream_completion(session, endpoint, body, leave_after=leave_after)


async def storm(endpoint: str) -> tuple[dict[str, str], list[tuple[str, Stream]]]:
    rng = random.Random(7)
    leave_after = [rng.randrange(6) for _ in range(LEAVING)] + [None] * (STREAMS - LEAVING)
    rng.shuffle(leave_after)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        alone = {q: (await answer(session, endpoint, q, None)).text for q in QUESTIONS}
        prompts = [rng.choice(QUESTIONS) for _ in range(STREAMS)]
        streams = await asyncio.gather(
            *(
                answer(session, endpoint, p, leave)
                for p, leave in zip(prompts, leave_after, strict=True)
            )
        )
    stayed = [
        (p, s) for p, s, leave in zip(prompts, streams, leave_after, strict=True) if leave is None
    ]
    return alone, stayed


@pytest.mark.parametrize("mode", ["over_shm", "over_tcp"])
def test_disconnecting_clients_cost_nobody_else_anything(
    mode: str, request: pytest.FixtureRequest
) -> None:
    deployment: Deployment = request.getfixturevalue(mode)
    alone, stayed = asyncio.run(storm(deployment.endpoint))
    assert len(stayed) == STREAMS - LEAVING
    for prompt, stream in stayed:
        assert stream.error is None
        assert stream.finish == "length"
        assert stream.text == alone[prompt]
    deployment.wait_idle("prefill-0", "decode-0")

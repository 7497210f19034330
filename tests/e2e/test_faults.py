"""Killing processes under load: what fails says which leg, what can go on goes on, what restarts
serves again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import aiohttp
import pytest
from lab import DECODE, MODEL_NAME, PREFILL, Deployment, Lab, descendants, running
from streams import Stream, stream_completion

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

LONG = "The tide came in and the tide went out, and nobody counted. " * 60


@pytest.fixture(scope="module")
def fragile(lab: Lab) -> Iterator[Deployment]:
    """Its own deployment: processes die in it."""
    yield from running(lab, "fragile", prefill=[PREFILL], decode=[DECODE])


def body(prompt: str, max_tokens: int) -> dict[str, object]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def load_and_kill(
    endpoint: str, pids: list[int]
) -> tuple[list[tuple[Stream, float]], Stream]:
    """Long prompts queue at prefill while one stream decodes; then prefill dies. Seconds are since
    the kill."""
    killed_at = 0.0

    async def one(session: aiohttp.ClientSession, prompt: str) -> tuple[Stream, float]:
        stream = await stream_completion(session, endpoint, body(prompt, 4))
        return stream, time.monotonic()

    async with aiohttp.ClientSession() as session:
        decoding = asyncio.create_task(
            stream_completion(session, endpoint, body("Once upon a time", 120))
        )
        await asyncio.sleep(1.5)
        queued = [asyncio.create_task(one(session, f"{n} {LONG}")) for n in range(6)]
        await asyncio.sleep(0.5)
        killed_at = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ended = [(s, at - killed_at) for s, at in await asyncio.gather(*queued)]
        return ended, await decoding


def test_prefill_killed_under_load(fragile: Deployment) -> None:
    decode_pid = fragile.service("decode-0")["pid"]
    pids = descendants(fragile.service("prefill-0")["pid"])
    endpoint = fragile.endpoint

    ended, decoding = asyncio.run(load_and_kill(endpoint, pids))

    assert decoding.error is None and decoding.finish == "length", "decode went on with what it had"
    failed = [(s, at) for s, at in ended if s.error is not None]
    assert failed, "the kill came too late to hit anything"
    for stream, seconds in failed:
        assert seconds < 2.0
        assert stream.error is not None
        assert "prefill" in stream.error["message"]
        assert not stream.done
    fragile.wait_idle("decode-0")
    assert fragile.service("decode-0")["pid"] == decode_pid

    async def after() -> Stream:
        async with aiohttp.ClientSession() as session:
            return await stream_completion(session, endpoint, body("Once", 4))

    refused = asyncio.run(after())
    assert refused.status == 503
    assert fragile.lab.pdctl("status", fragile.name).returncode == 3

    again = fragile.up()
    assert again.returncode == 0, again.stderr
    assert fragile.service("decode-0")["pid"] == decode_pid, "what was healthy was left alone"
    served = asyncio.run(after())
    assert (served.finish, served.done) == ("length", True)


@pytest.mark.parametrize(
    ("victim", "what"),
    [("router", "everything"), ("prefill-0", "service"), ("decode-0", "everything")],
)
def test_down_after_a_kill_leaves_nothing(lab: Lab, victim: str, what: str) -> None:
    """`running` asserts after its `down` that no segment is left; here processes and ports too."""
    name = f"killed-{victim}-{what}"
    deployments = running(lab, name, prefill=[PREFILL], decode=[DECODE])
    deployment = next(deployments)
    services = deployment.status()["services"]
    everyone = [p for s in services for p in descendants(s["pid"])]
    pid = deployment.service(victim)["pid"]
    for p in [pid] if what == "service" else descendants(pid):
        os.kill(p, signal.SIGKILL)
    for _ in deployments:
        pass
    assert [p for p in everyone if os.path.exists(f"/proc/{p}")] == []

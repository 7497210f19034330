"""Changes under steady load lose no request: rolling restarts, and prefill and decode coming and
going."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from lab import DECODE, MODEL_NAME, PREFILL, Deployment, Lab, running
from streams import Stream, stream_completion

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

MIXED = {"host": "local", "threads": 1, "kv_cache": "256MiB"}
CLIENTS = 3
"""Two with short answers, one whose answers take a while."""


@dataclass
class Load:
    """Clients that ask one question after the other until they are told to stop."""

    endpoint: str
    answers: list[Stream] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def failures(self) -> list[str]:
        return [
            f"{s.status} {s.error} {s.finish}"
            for s in self.answers
            if s.status != 200 or s.error or s.finish != "length" or not s.done
        ]

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(session, n) for n in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            body: dict[str, object] = {
                "model": MODEL_NAME,
                "prompt": f"Story {number}.{turn}: once upon a time, by the sea,",
                "max_tokens": 32 if number == 0 else 4,
                "temperature": 0,
                "ignore_eos": True,
            }
            self.answers.append(await stream_completion(session, self.endpoint, body))

    def stop(self) -> None:
        self._stop.set()


@contextlib.contextmanager
def load(deployment: Deployment) -> Iterator[Load]:
    """Steady load for the time of the block, in which not one request may fail."""
    clients = Load(deployment.endpoint)
    thread = threading.Thread(target=lambda: asyncio.run(clients.run()))
    thread.start()
    try:
        yield clients
    finally:
        clients.stop()
        thread.join(120)
    assert not thread.is_alive(), "a request hangs"
    assert clients.failures() == []
    assert len(clients.answers) > 2 * CLIENTS, "that was no load"


@pytest.fixture(scope="module")
def apart(lab: Lab) -> Iterator[Deployment]:
    """One prefill, two decode instances; the tests below change that in turn."""
    yield from running(lab, "rolling", prefill=[PREFILL], decode=[DECODE | {"replicas": 2}])


def pids(deployment: Deployment) -> dict[str, int]:
    return {s["name"]: s["pid"] for s in deployment.status()["services"]}


def pdctl(deployment: Deployment, *args: str) -> str:
    result = deployment.lab.pdctl(*args, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_rolling_restart_of_two_decode_instances(apart: Deployment) -> None:
    before = pids(apart)
    with load(apart):
        out = pdctl(apart, "restart", "decode-0", "decode-1", "--rolling", "--json")
    assert sorted(json.loads(out)["restarted"]) == ["decode-0", "decode-1"]
    after = pids(apart)
    assert {n for n in after if after[n] != before[n]} == {"decode-0", "decode-1"}
    apart.wait_idle("prefill-0", "decode-0", "decode-1")


def test_rolling_restart_of_a_mixed_pair(lab: Lab) -> None:
    for deployment in running(lab, "rolling-mixed", mixed=[MIXED | {"replicas": 2}]):
        with load(deployment):
            out = pdctl(deployment, "restart", "--rolling", "--json")
        assert sorted(json.loads(out)["restarted"]) == ["mixed-0", "mixed-1"]
        deployment.wait_idle("mixed-0", "mixed-1")

"""Changes under steady load lose no request: rolling restarts, and prefill and decode coming and
going."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from lab import DECODE, MODEL_NAME, PREFILL, Deployment, Lab, descendants, running
from streams import Stream, stream_completion

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]

PATIENCE_S = 240.0
CLIENTS = 3
"""Two with short answers, one whose answers take a while."""


@dataclass
class Load:
    """Clients that ask one question after the other until they are told to stop."""

    endpoint: str
    answers: list[Stream] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def failures(self) -> list[Stream]:
        return [
            s
            for s in self.answers
            if s.status != 200 or s.error or s.finish != "length" or not s.done
        ]

    async def _run(self) -> None:
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

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a request hangs"
        assert len(self.answers) > 2 * CLIENTS, "that was no load"

    def wait_for_more(self) -> None:
        """Until each client could have had two more answers."""
        had, deadline = len(self.answers), time.monotonic() + PATIENCE_S
        while len(self.answers) < had + 2 * CLIENTS:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextlib.contextmanager
def load(deployment: Deployment) -> Iterator[Load]:
    """Steady load for the time of the block, in which not one request may fail."""
    clients = Load(deployment.endpoint)
    with clients.running():
        yield clients
    assert clients.failures() == []


@pytest.fixture(scope="module")
def apart(lab: Lab) -> Iterator[Deployment]:
    """One prefill, two decode instances; the tests below change that in turn."""
    yield from running(lab, "rolling", prefill=[PREFILL], decode=[DECODE | {"replicas": 2}])


def pids(deployment: Deployment) -> dict[str, int]:
    return {s["name"]: s["pid"] for s in deployment.status()["services"]}


def pdctl(deployment: Deployment, command: str, *args: str) -> dict[str, Any]:
    """What it answers; it must not fail."""
    result = deployment.lab.pdctl(
        command, *args, "--name", deployment.name, "--json", timeout=PATIENCE_S
    )
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_rolling_restart_of_two_decode_instances(apart: Deployment) -> None:
    before = pids(apart)
    with load(apart):
        done = pdctl(apart, "restart", "decode-0", "decode-1", "--rolling")
    assert sorted(done["restarted"]) == ["decode-0", "decode-1"]
    after = pids(apart)
    assert {n for n in after if after[n] != before[n]} == {"decode-0", "decode-1"}
    apart.wait_idle("prefill-0", "decode-0", "decode-1")


def test_rolling_restart_of_two_prefill_instances(apart: Deployment) -> None:
    pdctl(apart, "scale", "prefill=2", "decode=1", "--yes")
    before = pids(apart)
    with load(apart):
        done = pdctl(apart, "restart", "prefill-0", "prefill-1", "--rolling")
    assert sorted(done["restarted"]) == ["prefill-0", "prefill-1"]
    after = pids(apart)
    assert {n for n in after if after[n] != before[n]} == {"prefill-0", "prefill-1"}
    apart.wait_idle("prefill-0", "prefill-1", "decode-0")
    assert apart.service("decode-0")["peers"].keys() == {"prefill-0", "prefill-1"}


def test_roles_come_and_go_under_load(apart: Deployment) -> None:
    pdctl(apart, "scale", "prefill=2", "decode=1", "--yes")
    with load(apart) as clients:
        assert pdctl(apart, "scale", "decode=2")["started"] == ["decode-1"]
        clients.wait_for_more()
        done = pdctl(apart, "scale", "decode=1", "prefill=1", "--yes")
        assert sorted(done["removed"]) == ["decode-1", "prefill-1"]
    apart.wait_idle("prefill-0", "decode-0")
    assert apart.status()["healthy"]


def test_a_killed_prefill_instance_costs_only_what_it_had(apart: Deployment) -> None:
    """And each failure names it; what had no answer yet went elsewhere; decode links again."""
    pdctl(apart, "scale", "prefill=2", "decode=1", "--yes")
    decode = pids(apart)["decode-0"]
    clients = Load(apart.endpoint)
    with clients.running():
        clients.wait_for_more()
        for pid in descendants(apart.service("prefill-0")["pid"]):
            os.kill(pid, signal.SIGKILL)
        clients.wait_for_more()
        pdctl(apart, "restart", "prefill-0")
        restarted = len(clients.answers)
        clients.wait_for_more()
    failed = clients.failures()
    assert len(failed) <= CLIENTS, failed
    for stream in failed:
        assert stream.error is not None and "prefill-0" in stream.error["message"]
    assert not set(map(id, failed)) & set(map(id, clients.answers[restarted:]))
    assert pids(apart)["decode-0"] == decode
    assert apart.get("decode-0", "/ready")["peers"]["prefill-0"]["path"]
    apart.wait_idle("prefill-0", "prefill-1", "decode-0")

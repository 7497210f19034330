"""Fixtures for the router: a real router on a real socket, scripted instances behind it.

Coroutine tests in this folder run on uvloop, like the router itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
import pytest
import uvloop
from aiohttp import web

from runtime.config import Address, RouterConfig
from runtime.protocol import PROTOCOL_VERSION
from runtime.router.app import RouterServer

TOKEN = "the-deployments-token"
MODEL = "tiny"
Json = dict[str, Any]
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


def registration(name: str, role: str, url: str = "http://127.0.0.1:9", **more: Any) -> Json:
    """The JSON of a Registration; `more` overrides any field."""
    return {
        "version": PROTOCOL_VERSION,
        "name": name,
        "role": role,
        "url": url,
        "incarnation": f"{name}-first",
        "ready": True,
        "model": MODEL,
        "fingerprint": {"model": MODEL, "block_size": 16},
        "max_model_len": 2048,
        **more,
    }


async def answer_json(request: web.Request) -> web.StreamResponse:
    return web.json_response({"ok": True, "served_by": request.app[NAME]})


NAME = web.AppKey("name", str)


@dataclass(slots=True)
class Seen:
    """One request as an instance saw it."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class FakeInstance:
    """An HTTP server whose answer is a test's script."""

    name: str
    url: str
    runner: web.AppRunner
    script: Script = answer_json
    seen: list[Seen] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    healthy: bool = True

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 500)
        headers = {k.lower(): v for k, v in request.headers.items()}
        self.seen.append(Seen(request.path, headers, await request.read()))
        try:
            return await self.script(request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def die(self) -> None:
        """Close the port and every connection, as a killed process does."""
        server = self.runner.server
        assert server is not None
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        for site in list(self.runner.sites):
            await site.stop()

    async def revive(self) -> None:
        """Answer at the old address again."""
        await web.TCPSite(self.runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()


@dataclass(slots=True)
class Harness:
    """A router and what a test needs around it."""

    server: RouterServer
    client: aiohttp.ClientSession
    instances: list[FakeInstance] = field(default_factory=list)
    token: ClassVar[str] = TOKEN
    model: ClassVar[str] = MODEL

    @staticmethod
    def registration(name: str, role: str, url: str = "http://127.0.0.1:9", **more: Any) -> Json:
        return registration(name, role, url, **more)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def start_instance(self, name: str, script: Script = answer_json) -> FakeInstance:
        app = web.Application(client_max_size=64 << 20)
        app[NAME] = name
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        instance = FakeInstance(name=name, url="", runner=runner, script=script)
        app.router.add_route("*", "/{path:.*}", instance.handle)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        instance.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.instances.append(instance)
        return instance

    async def register(self, info: Json, token: str = TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{self.url}/internal/register"
        async with self.client.post(url, json=info, headers=headers) as response:
            return response.status, await response.json()

    async def pair(
        self, script: Script = answer_json, number: int = 0, prefills: tuple[str, ...] = ()
    ) -> FakeInstance:
        """Register prefill-N and a decode-N linked to it (or to `prefills`); returns the latter."""
        linked = prefills or (f"prefill-{number}",)
        for name in linked:
            await self.register(registration(name, "prefill"))
        decode = await self.start_instance(f"decode-{number}", script)
        await self.link(decode, linked)
        return decode

    async def link(self, decode: FakeInstance, prefills: tuple[str, ...], **more: Any) -> None:
        peers = dict.fromkeys(prefills, "shm")
        info = registration(decode.name, "decode", decode.url, peers=peers, **more)
        status, reply = await self.register(info)
        assert status == 200, reply
        await self.until_reachable(decode.name)

    async def mixed(self, name: str, script: Script = answer_json) -> FakeInstance:
        instance = await self.start_instance(name, script)
        status, reply = await self.register(registration(name, "mixed", instance.url))
        assert status == 200, reply
        await self.until_reachable(name)
        return instance

    async def until_reachable(self, name: str) -> None:
        async with asyncio.timeout(5):
            while not all(i.reachable for i in self.server.registry.instances() if i.name == name):
                await asyncio.sleep(0.005)

    async def state(self, name: str) -> Json:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.client.get(f"{self.url}/internal/instances", headers=headers) as response:
            document = await response.json()
        (found,) = (i for i in document["instances"] if i["name"] == name)
        assert isinstance(found, dict)
        return found

    def post(
        self, path: str = "/v1/completions", **more: Any
    ) -> aiohttp.client._RequestContextManager:
        body = {"model": MODEL, "prompt": "hi", **more.pop("body", {})}
        return self.client.post(self.url + path, json=body, **more)


StartRouter = Callable[..., Awaitable[Harness]]


@pytest.fixture
def loop_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {n: pyfuncitem.funcargs[n] for n in pyfuncitem._fixtureinfo.argnames}
    runner = pyfuncitem.funcargs["loop_runner"]
    assert isinstance(runner, asyncio.Runner)
    runner.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def start_router(loop_runner: asyncio.Runner) -> Iterator[StartRouter]:
    """Starts routers; keyword arguments go into RouterConfig."""
    started: list[Harness] = []

    async def start(api_keys: tuple[bytes, ...] = (), **more: Any) -> Harness:
        config = RouterConfig(
            deployment="test", token_file="unused", listen=Address("127.0.0.1", 0), **more
        )
        server = RouterServer(config, TOKEN.encode(), api_keys)
        await server.start()
        harness = Harness(server, aiohttp.ClientSession())
        started.append(harness)
        return harness

    async def stop() -> None:
        for harness in started:
            await harness.client.close()
            for instance in harness.instances:
                await instance.runner.cleanup()
            await harness.server.stop()

    yield start
    loop_runner.run(stop())


@pytest.fixture
def router(loop_runner: asyncio.Runner, start_router: StartRouter) -> Harness:
    return loop_runner.run(_started(start_router))


async def _started(start_router: StartRouter) -> Harness:
    return await start_router()

"""A scripted OpenAI endpoint on loopback, in a thread: every answer is what the test says it is.

A script is a function from the request's number and body to actions: bytes to send, a pause, or the
end of the connection. Knows nothing of the code under test.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the connection under the answer."""


@dataclass(frozen=True, slots=True)
class Refuse:
    status: int
    message: str


Action = bytes | Pause | Cut | Refuse
Script = Callable[[int, dict[str, Any]], Sequence[Action]]

MODEL = {"id": "toy", "object": "model", "max_model_len": 4096, "vocab_size": 1000}


def sse(doc: dict[str, Any] | str, *, event: str = "", end: str = "\n") -> bytes:
    data = doc if isinstance(doc, str) else json.dumps(doc)
    head = f"event: {event}{end}" if event else ""
    return f"{head}data: {data}{end}{end}".encode()


def text(piece: str, finish: str | None = None, **extra: Any) -> bytes:
    return sse({"choices": [{"index": 0, "text": piece, "finish_reason": finish}], **extra})


def usage(prompt: int, output: int) -> bytes:
    return sse({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


DONE = sse("[DONE]")


def tokens(ids: list[int], piece: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": piece, "token_ids": ids, "finish_reason": finish}
    return sse({"choices": [choice]})


def answer(pieces: int, *, prompt: int = 10, gap_s: float = 0.0, **served: Any) -> list[Action]:
    """A whole, good answer of `pieces` one-token pieces."""
    actions: list[Action] = []
    for i in range(pieces):
        last = i == pieces - 1
        extra = {"pdctl": served} if last and served else {}
        actions.append(text(f"w{i} ", "length" if last else None, **extra))
        if gap_s and not last:
            actions.append(Pause(gap_s))
    return [*actions, usage(prompt, pieces), DONE]


@dataclass(slots=True)
class Server:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    active: int = 0
    most_active: int = 0


def _app(server: Server, script: Script, model: dict[str, Any]) -> web.Application:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [model]})

    async def tokenize(request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [sum(map(ord, w)) % 1000 for w in words]})

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(server.bodies)
        server.bodies.append(body)
        server.paths.append(request.path)
        server.active += 1
        server.most_active = max(server.most_active, server.active)
        try:
            return await _play(request, script(number, body))
        finally:
            server.active -= 1

    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", models)
    if model.get("id") != "mute":
        app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/completions", generate)
    app.router.add_post("/v1/chat/completions", generate)
    return app


async def _play(request: web.Request, actions: Sequence[Action]) -> web.StreamResponse:
    if actions and isinstance(actions[0], Refuse):
        refusal = actions[0]
        error = {"error": {"message": refusal.message, "type": "overloaded"}}
        return web.json_response(error, status=refusal.status)
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Server-Timing": "admit;dur=1.5, route;dur=0.5",
        }
    )
    await response.prepare(request)
    for action in actions:
        match action:
            case bytes():
                await response.write(action)
            case Pause(seconds):
                await asyncio.sleep(seconds)
            case Cut():
                assert request.transport is not None
                request.transport.close()
                return response
    await response.write_eof()
    return response


@contextmanager
def serve(script: Script, model: dict[str, Any] | None = None) -> Iterator[Server]:
    """Serve the script on a free port of 127.0.0.1 until the block ends."""
    server = Server()
    loop = asyncio.new_event_loop()
    app = _app(server, script, model if model is not None else MODEL)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    up = threading.Event()

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        up.set()

    async def end() -> None:
        await runner.cleanup()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def body() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert up.wait(5.0)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(5.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5.0)
        loop.close()

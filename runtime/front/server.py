"""The worker front's process: binds its port, starts the core, serves, drains, ends.

Owns the order of start and stop, and the exit code. `build_app` is the whole HTTP face over a given
instance.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from pathlib import Path

import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from runtime import bad_requests
from runtime import config as configs
from runtime.config import Address, WorkerConfig
from runtime.errors import ConfigError, LegError
from runtime.front.auth import Gate
from runtime.front.completions import CALLER, Completions
from runtime.front.core_client import CoreArgv, CoreClient
from runtime.front.endpoints import Endpoints
from runtime.front.http_errors import errors_as_json
from runtime.front.instance import STATS_TIMEOUT_S, Instance, own_leg
from runtime.front.metrics import Metrics
from runtime.front.registration import Registrar
from runtime.front.tokenizer import load_tokenizer
from runtime.protocol import HEADER_REQUEST_ID

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
_CORE_STOP_S = 10.0
_DEAD_LINGER_S = 0.5
"""After the core's death: time for the failed requests' answers, and for one look at /health."""
_BACKLOG = 1024
_DRAIN_POLL_S = 0.1


def run_worker(config_path: Path) -> int:
    """The process's main: its exit code. Raises RuntimeFailure when it cannot start."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    config = configs.load(config_path, WorkerConfig)

    def core_argv(fd: int) -> list[str]:
        arguments = ["core", "--config", str(config_path), "--fd", str(fd)]
        return [sys.executable, "-m", "runtime", *arguments]

    return serve_worker(config, core_argv)


def serve_worker(config: WorkerConfig, core_argv: CoreArgv) -> int:
    """Everything that can be wrong is found before the core is started."""
    bad_requests.keep_out_of_log()
    token = configs.read_token(config.token_file)
    gate = Gate(token, configs.read_api_keys(config.api_key_file), config.request_timeout_s)
    with bind(config.listen) as listener:
        tokenizer = load_tokenizer(Path(config.model.path))
        core = CoreClient(core_argv, own_leg=own_leg(config), instance=config.name)
        instance = Instance(config, tokenizer, core, Metrics(config.tp_size))
        return uvloop.run(_Worker(instance, token, gate, listener).run())


def bind(address: Address) -> socket.socket:
    """Listen before anything is started. Raises ConfigError when the port is not to be had."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as e:
        raise ConfigError(f"listen {address}: {e.strerror or e}") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"listen {address}: {e.strerror or e}",
            hint=f"`ss -ltnp 'sport = :{address.port}'` shows who has it; or choose another port",
        ) from e
    return listener


class _Worker:
    def __init__(
        self, instance: Instance, token: bytes, gate: Gate, listener: socket.socket
    ) -> None:
        self._instance = instance
        self._config = instance.config
        self._token = token
        self._gate = gate
        self._listener = listener
        self._crashed = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        core = self._instance.core
        await core.start()
        try:
            return await self._serve()
        finally:
            await core.stop(_CORE_STOP_S)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
            self._instance.core.kill()
        self._instance.core.may_end = True
        self._stop.set()

    async def _serve(self) -> int:
        instance = self._instance
        runner = web.AppRunner(
            build_app(instance, self._gate),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        await web.SockSite(runner, self._listener, backlog=_BACKLOG).start()
        log.info("%s (%s) listens on %s", self._config.name, self._config.role, self._config.listen)
        registrar = self._registrar(instance)
        registering = asyncio.create_task(registrar.run()) if registrar else None
        if registering is not None:
            registering.add_done_callback(self._registering_ended)
        try:
            if await _first(instance.core.dead, self._crashed, self._stop) is not self._stop:
                await asyncio.sleep(_DEAD_LINGER_S)
                return 1
            await self._drain(instance, registrar)
            return 0
        finally:
            if registering is not None:
                registering.cancel()
                await asyncio.wait([registering], timeout=1.0)
            await runner.cleanup()

    def _registering_ended(self, task: asyncio.Task[None]) -> None:
        """Without heartbeats the router forgets this instance: better to end and be noticed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("registration failed unexpectedly", exc_info=error)
            self._crashed.set()

    def _registrar(self, instance: Instance) -> Registrar | None:
        if self._config.router is None:
            return None
        registrar = Registrar(instance, self._config.router, self._token)
        instance.core.listeners.append(registrar.changed)
        return registrar

    async def _drain(self, instance: Instance, registrar: Registrar | None) -> None:
        """Take nothing new and let what runs finish; a second signal cuts it short."""
        instance.draining = True
        log.info("draining: %d requests under way", len(instance.active))
        if registrar is not None:
            await registrar.leave()
        quiet = asyncio.Event()
        watching = asyncio.create_task(_when_quiet(instance, quiet))
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await _first(quiet, self._stop_now, instance.core.dead)
        except TimeoutError:
            log.warning("requests did not finish in time: %d clients'", len(instance.active))
        finally:
            watching.cancel()


async def _when_quiet(instance: Instance, quiet: asyncio.Event) -> None:
    """Sets `quiet` when nothing runs for clients, nor, at prefill, for decode instances."""
    await instance.idle.wait()
    while instance.config.role == "prefill" and await _has_outgoing(instance):
        await asyncio.sleep(_DRAIN_POLL_S)
    quiet.set()


async def _has_outgoing(instance: Instance) -> bool:
    try:
        return (await instance.core.stats(STATS_TIMEOUT_S)).ledger.outgoing > 0
    except LegError:
        return instance.core.alive  # too busy to answer


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """The first of these events that is set."""
    tasks = {asyncio.create_task(event.wait()): event for event in events}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(event for task, event in tasks.items() if task in done)
    finally:
        for task in tasks:
            task.cancel()


def build_app(instance: Instance, gate: Gate) -> web.Application:
    app = web.Application(
        middlewares=[_counting(instance.metrics), errors_as_json], client_max_size=MAX_BODY_BYTES
    )
    completions = Completions(instance, gate)
    endpoints = Endpoints(instance, gate, created=int(time.time()))
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.completion),
            web.get("/v1/models", endpoints.models),
            web.get("/v1/models/{name:.+}", endpoints.model),
            web.post("/tokenize", endpoints.tokenize),
            web.post("/detokenize", endpoints.detokenize),
            web.get("/health", endpoints.health),
            web.get("/ready", endpoints.ready),
            web.get("/ledger", endpoints.ledger),
            web.get("/metrics", endpoints.metrics),
            web.post("/internal/measure", endpoints.measure),
        ]
    )
    app.on_response_prepare.append(_name_request)
    return app


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    caller = request.get(CALLER)
    if caller is None:
        return
    response.headers[HEADER_REQUEST_ID] = caller.request_id
    if caller.client_request_id is not None:
        response.headers["X-Request-Id"] = caller.client_request_id


def _counting(metrics: Metrics) -> Middleware:
    """Counts answers by route and status. Unknown paths share one label: they cannot flood it."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        endpoint = resource.canonical if resource is not None else "unknown"
        metrics.requests.labels(endpoint, str(response.status)).inc()
        return response

    return count

"""The router process: routes, listening, start and stop. `run_router` is its entry.

Binds exactly the configured address. SIGTERM: takes no new connection, lets what streams finish.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from runtime import bad_requests
from runtime.answers import error_response
from runtime.config import RouterConfig, load, read_api_keys, read_token
from runtime.errors import ConfigError, RequestError
from runtime.router.admit import KeyRing, check_head
from runtime.router.control import Control
from runtime.router.dispatch import Dispatcher
from runtime.router.engines import NativeEngine
from runtime.router.metrics import RouterMetrics
from runtime.router.policy import make_policy
from runtime.router.probe import Prober
from runtime.router.registry import Registry

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""How long the rest of a refused body is thrown away, so that the client gets to see the answer."""
OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


class RouterServer:
    """The router in the running event loop."""

    def __init__(self, config: RouterConfig, token: bytes, api_keys: tuple[bytes, ...]) -> None:
        self._config = config
        self._token = token
        self._keys = KeyRing(token, api_keys)
        self.registry = Registry(time.monotonic, config.heartbeat_timeout_s)
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._prober: Prober | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        session = self._session = aiohttp.ClientSession(
            # Idle connections are dropped here long before an instance drops them.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._prober = Prober(self.registry, session)
        self._runner = web.AppRunner(
            self._make_app(session, self._prober),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=self._config.drain_timeout_s,
            lingering_time=LINGER_S,
            auto_decompress=False,
        )
        await self._runner.setup()
        listen = self._config.listen
        try:
            await web.TCPSite(self._runner, listen.host, listen.port).start()
        except OSError as e:
            await self.stop()
            raise ConfigError(
                f"cannot listen on {listen}: {e.strerror or e}",
                hint="is the port taken by another program, or the address of another host?",
            ) from e

    async def stop(self) -> None:
        """Take no new connection; wait for what runs, drain_timeout_s at most."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._prober is not None:
            await self._prober.close()
        if self._session is not None:
            await self._session.close()

    @property
    def port(self) -> int:
        assert self._runner is not None
        return int(self._runner.addresses[0][1])

    def _make_app(self, session: aiohttp.ClientSession, prober: Prober) -> web.Application:
        config = self._config
        metrics = RouterMetrics(self.registry)
        dispatcher = Dispatcher(
            config,
            self._keys,
            self.registry,
            make_policy(config.policy),
            NativeEngine(self._token.decode()),
            session,
            prober,
            metrics,
        )
        control = Control(self._keys, self.registry, prober, metrics, config.heartbeat_timeout_s)
        app = web.Application(client_max_size=config.max_body_bytes)
        for path in OPENAI_PATHS:
            app.router.add_post(path, dispatcher.handle, expect_handler=self._expect)
        app.router.add_post("/internal/register", control.register)
        app.router.add_post("/internal/drain", control.drain)
        app.router.add_get("/internal/instances", control.instances)
        app.router.add_get("/v1/models", control.models)
        app.router.add_get("/v1/models/{name:.+}", control.model)
        app.router.add_get("/health", control.health)
        app.router.add_get("/ready", control.ready)
        app.router.add_get("/metrics", control.metrics)
        app.router.add_route("*", "/{path:.*}", _nothing_here)
        return app

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """A client that asks before it sends gets its refusal before it sends."""
        try:
            check_head(request, self._keys, self._config.max_body_bytes)
        except RequestError as e:
            return error_response(e)
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None


async def _nothing_here(request: web.Request) -> web.Response:
    allowed = _methods(request.path)
    if allowed:
        failure = RequestError(
            f"{request.method} is not allowed on {request.path}: use {allowed}",
            status=405,
            code="method_not_allowed",
        )
        answer = error_response(failure)
        answer.headers["Allow"] = allowed
        return answer
    return error_response(
        RequestError(f"there is no {request.path} here", status=404, code="not_found")
    )


def _methods(path: str) -> str:
    if path in OPENAI_PATHS or path in ("/internal/register", "/internal/drain"):
        return "POST"
    known = ("/internal/instances", "/v1/models", "/health", "/ready", "/metrics")
    return "GET" if path in known or path.startswith("/v1/models/") else ""


async def _serve(config: RouterConfig, token: bytes, api_keys: tuple[bytes, ...]) -> None:
    server = RouterServer(config, token, api_keys)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    log.info("listening on %s, policy %s", config.listen.url, config.policy)
    await stop.wait()
    log.info("stopping: streams may finish for up to %g s", config.drain_timeout_s)
    await server.stop()
    log.info("stopped")


def run_router(config_path: Path) -> int:
    """Serve until SIGTERM; 0 after a clean stop. Raises ConfigError when it cannot start."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    bad_requests.keep_out_of_log()
    config = load(config_path, RouterConfig)
    token, api_keys = read_token(config.token_file), read_api_keys(config.api_key_file)
    if not (token.isascii() and token.decode("ascii").isprintable()):
        raise ConfigError(f"token_file {config.token_file}: not printable ASCII")
    uvloop.run(_serve(config, token, api_keys))
    return 0

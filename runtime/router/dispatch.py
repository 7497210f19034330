"""Stage `route`: one client request becomes one upstream request.

Owns retries (only while the client has seen nothing), blame, and what the client is told.
`registry` owns who is eligible, `policy` the choice, `engines` the upstream request, `relay` the
bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from runtime.answers import error_object, error_response, sse_event
from runtime.config import RouterConfig
from runtime.errors import LEG_CLIENT, LegError, NoPairError, RequestError, RuntimeFailure
from runtime.protocol import HEADER_FAILED_LEG, HEADER_REQUEST_ID
from runtime.reasons import reason
from runtime.router.admit import Call, KeyRing, admit, client_id
from runtime.router.engines import NativeEngine
from runtime.router.instances import Eligible, Lease
from runtime.router.metrics import RouterMetrics
from runtime.router.policy import NOTHING, Avoid, Choice, Policy, pick
from runtime.router.probe import Prober
from runtime.router.registry import Registry
from runtime.router.relay import Relay, UpstreamCut, response_headers

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
GRACE_S = 1.0
"""Decode has the same deadline and knows better which leg is late: it gets to say so first."""
WHOLE_BODY_BYTES = 1 << 20
"""A larger body is written to the upstream in pieces, so that others get their turn."""
CLIENT_LEFT = 499
_TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize"})
# The deadline of a request is one timer around all of it; here only what has a limit of its own.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
_SKIPPED_HEADERS = ("User-Agent", "Accept", "Accept-Encoding")

Reason = Literal["connect", "disconnect", "failed_leg", "overloaded"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that the client has seen nothing of."""

    reason: Reason
    answer: web.Response
    """What the client gets if there is no other pair."""
    avoid: Avoid


@dataclass(slots=True)
class Exchange:
    """One client request under way."""

    request: web.Request
    relay: Relay
    started: float
    """On time.perf_counter."""
    deadline: float
    """On the loop's clock."""
    call: Call | None = None
    choice: Choice | None = None
    route_s: float = 0.0
    status: int = CLIENT_LEFT

    def stamp(self, headers: CIMultiDict[str], upstream_timing: str = "") -> None:
        """The headers that every answer carries."""
        headers["Server"] = "pdctl"
        echoed = client_id(self.request) if self.call is None else self.call.client_id
        if echoed:
            headers["X-Request-Id"] = echoed
        if self.call is None:
            return
        headers[HEADER_REQUEST_ID] = self.call.id
        timing = f"admit;dur={self.call.admit_s * 1e3:.3f}, route;dur={self.route_s * 1e3:.3f}"
        headers["Server-Timing"] = f"{timing}, {upstream_timing}" if upstream_timing else timing


class Dispatcher:
    """Serves the OpenAI endpoints."""

    def __init__(
        self,
        config: RouterConfig,
        keys: KeyRing,
        registry: Registry,
        policy: Policy,
        engine: NativeEngine,
        upstream: aiohttp.ClientSession,
        prober: Prober,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._keys = keys
        self._registry = registry
        self._policy = policy
        self._engine = engine
        self._upstream = upstream
        self._prober = prober
        self._metrics = metrics

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The per-request boundary: whatever goes wrong ends here, as an answer."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(
            request=request,
            relay=Relay(request),
            started=time.perf_counter(),
            deadline=loop.time() + self._config.request_timeout_s,
        )
        self._metrics.in_flight += 1
        try:
            return await self._within_deadline(exchange)
        except RuntimeFailure as e:
            return await self._fail(exchange, e)
        except ConnectionError:
            raise  # the client left while it was being written to
        except Exception:
            log.exception("request %s failed", exchange.call.id if exchange.call else "-")
            return await self._fail(
                exchange, RuntimeFailure("internal error; the router's log has the details")
            )
        finally:
            self._metrics.in_flight -= 1
            self._account(exchange)

    async def _within_deadline(self, exchange: Exchange) -> web.StreamResponse:
        try:
            async with asyncio.timeout_at(exchange.deadline + GRACE_S):
                exchange.call = await admit(
                    exchange.request,
                    self._keys,
                    self._config.max_body_bytes,
                    self._registry.models(),
                )
                return await self._route(exchange, exchange.call)
        except TimeoutError as e:
            if exchange.choice is None:
                raise self._too_late() from e
            decode, limit = exchange.choice.decode.name, self._config.request_timeout_s
            raise LegError(
                f"{decode} did not finish within {limit:g} s",
                leg="decode",
                instance=decode,
                timeout=True,
            ) from e

    def _too_late(self) -> RequestError:
        limit = self._config.request_timeout_s
        return RequestError(
            f"the request did not arrive within {limit:g} s", status=408, code="body_timeout"
        )

    async def _route(self, exchange: Exchange, call: Call) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        failure: Failure | None = None
        avoid = NOTHING
        if loop.time() >= exchange.deadline:  # its body ended within the grace
            raise self._too_late()
        for _ in range(self._config.retries + 1):
            choice = pick(self._policy, self._eligible(call), avoid)
            if choice is None or loop.time() >= exchange.deadline:
                break
            if failure is not None:
                self._metrics.retried(failure.reason)
            exchange.choice = choice
            outcome = await self._attempt(exchange, call, choice)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            failure = outcome
            avoid = Avoid(
                avoid.instances | failure.avoid.instances, avoid.pairs | failure.avoid.pairs
            )
        if failure is None:
            raise NoPairError("; ".join(self._registry.missing(call.model)))
        exchange.stamp(failure.answer.headers)
        exchange.status = failure.answer.status
        return failure.answer

    def _eligible(self, call: Call) -> Eligible:
        if call.path in _TOKENIZER_PATHS:
            return self._registry.tokenizers(call.model)
        return self._registry.eligible(call.model)

    async def _attempt(
        self, exchange: Exchange, call: Call, choice: Choice
    ) -> web.StreamResponse | Failure:
        remaining = exchange.deadline - asyncio.get_running_loop().time()
        shaped = self._engine.shape(call, choice, exchange.request.headers, max(remaining, 0.0))
        self._metrics.chosen(choice)
        lease = Lease(choice.decode, choice.prefill, len(call.body))
        served = False
        try:
            exchange.route_s = time.perf_counter() - call.started - call.admit_s
            try:
                upstream = await self._upstream.post(
                    shaped.url,
                    data=call.body if len(call.body) <= WHOLE_BODY_BYTES else BytesIO(call.body),
                    headers=shaped.headers,
                    skip_auto_headers=_SKIPPED_HEADERS,
                    allow_redirects=False,
                    timeout=_TIMEOUT,
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
                return self._lost(choice, "connect", f"no connection: {reason(e)}")
            except (aiohttp.ClientError, OSError) as e:
                why = f"it broke off before its answer: {reason(e)}"
                return self._lost(choice, "disconnect", why)
            try:
                outcome = await self._answer(exchange, call, choice, lease, upstream)
            finally:
                upstream.close()
            served = isinstance(outcome, web.StreamResponse) and outcome.status < 500
            return outcome
        finally:
            lease.end(served)

    async def _answer(
        self,
        exchange: Exchange,
        call: Call,
        choice: Choice,
        lease: Lease,
        upstream: aiohttp.ClientResponse,
    ) -> web.StreamResponse | Failure:
        if upstream.status in (502, 503, 504):
            return await self._refusal(choice, upstream)

        def first_byte() -> None:
            call.body = b""
            lease.first_byte()
            self._metrics.first_byte(exchange.request.path, time.perf_counter() - exchange.started)
            if upstream.status < 500:
                self._registry.succeeded(choice.decode)
                if choice.prefill is not None:
                    self._registry.succeeded(choice.prefill)

        headers = response_headers(upstream)
        exchange.stamp(headers, upstream.headers.get("Server-Timing", ""))
        try:
            answer = await exchange.relay.run(upstream, headers, first_byte)
        except UpstreamCut as e:
            leg = exchange.relay.reported_leg()
            if leg == LEG_CLIENT:
                raise RequestError(
                    "the client did not read", status=CLIENT_LEFT, code="slow_client"
                ) from e
            if leg:  # the instance lives: it ended the stream itself, with an error event
                self._blame(choice, leg)
            else:
                failure = self._lost(
                    choice, "disconnect", f"it broke off in mid-answer: {reason(e)}"
                )
                if not exchange.relay.started:
                    return failure
            name = choice.decode.name
            raise LegError(f"{name} broke off in mid-answer", leg="decode", instance=name) from e
        exchange.status = upstream.status
        return answer

    async def _refusal(
        self, choice: Choice, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse | Failure:
        """502, 503 and 504 by the instance itself: its words, unless another pair can do better."""
        try:
            body = await upstream.read()
        except (aiohttp.ClientError, OSError) as e:
            return self._lost(choice, "disconnect", f"it broke off in mid-answer: {reason(e)}")
        answer = web.Response(status=upstream.status, headers=response_headers(upstream), body=body)
        if upstream.status == 503:
            return Failure("overloaded", answer, Avoid(frozenset({choice.decode.name})))
        leg = upstream.headers.get(HEADER_FAILED_LEG, "decode")
        return Failure("failed_leg", answer, self._blame(choice, leg))

    def _blame(self, choice: Choice, leg: str) -> Avoid:
        """Remember which leg failed; returns what a retry of this request must avoid."""
        decode, prefill = choice.decode, choice.prefill
        if leg == "prefill" and prefill is not None:
            self._registry.suspect(prefill)
            return Avoid(frozenset({prefill.name}))
        if leg == "transfer" and prefill is not None:
            self._registry.suspect_link(decode, prefill)
            return Avoid(pairs=frozenset({(prefill.name, decode.name)}))
        self._registry.suspect(decode)
        return Avoid(frozenset({decode.name}))

    def _lost(self, choice: Choice, reason: Reason, why: str) -> Failure:
        """The instance that was asked is gone: out at once, until a probe reaches it again."""
        decode = choice.decode
        self._registry.unreachable(decode, why)
        self._prober.watch(decode)
        log.warning("%s at %s: %s", decode.name, decode.info.url, why)
        error = LegError(f"{decode.name}: {why}", leg="decode", instance=decode.name)
        return Failure(reason, error_response(error), Avoid(frozenset({decode.name})))

    async def _fail(self, exchange: Exchange, failure: RuntimeFailure) -> web.StreamResponse:
        answer = error_response(failure)
        exchange.status = answer.status
        if exchange.relay.started:
            return await exchange.relay.break_off(sse_event({"error": error_object(failure)}))
        exchange.stamp(answer.headers)
        return answer

    def _account(self, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        path, call, choice = exchange.request.path, exchange.call, exchange.choice
        self._metrics.finished(path, exchange.status, seconds)
        log.info(
            "%s %s %d %.3fs prefill=%s decode=%s client_id=%s",
            call.id if call else "-",
            path,
            exchange.status,
            seconds,
            choice.prefill.name if choice and choice.prefill else "-",
            choice.decode.name if choice else "-",
            (call.client_id if call else client_id(exchange.request)) or "-",
        )

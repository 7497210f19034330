"""One completion request, top to bottom: its choices through the core, then SSE or one JSON.

Owns the lifecycle: nothing is sent before the first token exists, a client that goes away aborts
its choices at once, a failure afterwards ends the stream uncleanly. Shapes are `responses`',
validation `openai_types`'.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from runtime.answers import error_object, json_response, sse_event
from runtime.errors import LEG_CLIENT, LegError, RequestError, RuntimeFailure
from runtime.front.admission import Job, plan_job, tokenized, understand
from runtime.front.auth import Caller, Gate
from runtime.front.core_client import CoreEvent, Flow
from runtime.front.http_errors import failure_of
from runtime.front.instance import Instance, own_leg
from runtime.front.openai_types import ChatBody, CompletionBody
from runtime.front.responses import (
    SSE_DONE,
    Choice,
    Json,
    Piece,
    served_object,
    usage,
)
from runtime.protocol import (
    HEADER_DECODE,
    HEADER_PREFILL,
    Failed,
    FinishReason,
    OutputToken,
    Served,
)

log = logging.getLogger(__name__)

CALLER = web.RequestKey("caller", Caller)

SETTLE_S = 1.0
"""How long the end of a choice waits for the core's account of it, after a stop string."""
SLOW_CLIENT_S = 30.0
"""How long a client may leave its socket's buffer full before its request is aborted. What waits in
the buffer may still be read until the request's deadline."""


@dataclass(slots=True)
class _Burst:
    tokens: list[OutputToken]
    finish: FinishReason | None = None
    served: Served | None = None


class Completions:
    """Handlers of /v1/chat/completions and /v1/completions."""

    def __init__(self, instance: Instance, gate: Gate) -> None:
        self._instance = instance
        self._gate = gate

    async def chat(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, ChatBody)

    async def completion(self, http: web.Request) -> web.StreamResponse:
        return await self._serve(http, CompletionBody)

    async def _serve(
        self, http: web.Request, kind: type[ChatBody | CompletionBody]
    ) -> web.StreamResponse:
        arrived = time.monotonic()
        caller = http[CALLER] = self._gate.admit(http)
        ready = self._instance.require_serving()
        with self._instance.under_way(caller.request_id):
            body, prompts = await understand(http, partial(tokenized, self._instance, kind))
            job = plan_job(self._instance, ready, caller, body, prompts, arrived)
            return await self._run(http, job)

    # ---- the way through the core ---------------------------------------------------------------

    async def _run(self, http: web.Request, job: Job) -> web.StreamResponse:
        instance = self._instance
        flow = instance.core.submit(job.generates)
        stages = {"admit": time.monotonic() - job.arrived}
        try:
            pieces = await self._next(job, flow, stages)
            instance.started(job.caller.request_id)
            if job.body.stream:
                return await self._stream(http, job, flow, pieces, stages)
            while any(c.finish is None for c in job.choices):
                await self._next(job, flow, stages)
            return self._whole(job, stages)
        except (asyncio.CancelledError, ConnectionError):
            instance.metrics.disconnects.inc()
            raise
        finally:
            flow.close()
            _log_end(job)

    async def _next(self, job: Job, flow: Flow, stages: dict[str, float]) -> list[Piece]:
        """What came since the last call. Raises any choice's failure: all fail together."""
        open_ = [c for c in job.choices if c.finish is None]
        settling = all(c.cut for c in open_)
        patience = SETTLE_S if settling else max(0.0, job.deadline - time.monotonic())
        try:
            async with asyncio.timeout(patience):
                events = await flow.events()
        except TimeoutError as e:
            if settling:
                return [self._ended(job, choice, stages) for choice in open_]
            raise LegError(
                "the request's deadline has passed",
                leg=own_leg(self._instance.config),
                instance=self._instance.config.name,
                timeout=True,
            ) from e
        now = time.monotonic()
        pieces = []
        for index, burst in self._bursts(job, events).items():
            choice = job.choices[index]
            if choice.cut:
                choice.served = burst.served or choice.served
                if burst.finish is not None:
                    pieces.append(self._ended(job, choice, stages))
                continue
            pieces.append(_absorb(choice, burst, job.stop_ids))
            if choice.cut:
                flow.abort(index)
            self._clock(job, choice, len(burst.tokens), now, stages)
        return pieces

    def _ended(self, job: Job, choice: Choice, stages: dict[str, float]) -> Piece:
        """The end of a choice whose text a stop string has ended before."""
        choice.finish = "stop"
        self._clock(job, choice, 0, time.monotonic(), stages)
        return Piece(choice, "", (), len(choice.text))

    def _bursts(self, job: Job, events: Sequence[tuple[int, CoreEvent]]) -> dict[int, _Burst]:
        """Several messages of one choice, when the client is slower than the core, count as one."""
        bursts: dict[int, _Burst] = {}
        for index, event in events:
            cut = job.choices[index].cut
            if isinstance(event, Failed):
                if cut:  # its text is complete all the same
                    bursts[index] = _Burst([], "abort")
                    continue
                raise failure_of(event, own_leg=own_leg(self._instance.config))
            if event.finish == "abort" and not cut:
                raise LegError(
                    "the engine gave the request up",
                    leg=own_leg(self._instance.config),
                    instance=self._instance.config.name,
                )
            burst = bursts.setdefault(index, _Burst([]))
            burst.tokens.extend(event.tokens)
            burst.finish = event.finish
            burst.served = event.served or burst.served
        return bursts

    def _clock(
        self, job: Job, choice: Choice, tokens: int, arrived: float, stages: dict[str, float]
    ) -> None:
        now = time.monotonic()
        metrics = self._instance.metrics
        if choice.last_at == 0.0:
            choice.ttft_s = now - job.arrived
            stages.setdefault("stream", now - arrived)
            metrics.first_token(choice.ttft_s)
        elif tokens:
            metrics.burst(arrived - choice.last_at, tokens)
        choice.last_at = arrived
        if choice.finish is not None:
            choice.e2e_s = now - job.arrived
            known = choice.served.stages if choice.served is not None else {}
            metrics.finished(choice.served, {**known, **stages}, choice.e2e_s)

    # ---- answers --------------------------------------------------------------------------------

    def _whole(self, job: Job, stages: dict[str, float]) -> web.Response:
        body = job.format.envelope([job.format.whole(c) for c in job.choices], chunk=False)
        body["usage"] = usage(job.choices)
        body["pdctl"] = self._served(job.choices[0], stages) | {
            "kv_bytes": sum(c.served.kv_bytes for c in job.choices if c.served is not None),
            "e2e_s": max(c.e2e_s for c in job.choices),
        }
        return json_response(body, headers=_served_headers(job.choices[0].served))

    async def _stream(
        self,
        http: web.Request,
        job: Job,
        flow: Flow,
        pieces: list[Piece],
        stages: dict[str, float],
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers | _served_headers(pieces[0].choice.served))
        await response.prepare(http)
        try:
            while True:
                data = self._chunks(job, pieces, stages)
                if all(c.finish is not None for c in job.choices):
                    await _send(http, job, response, data + self._tail(job), last=True)
                    return response
                if data:  # tokens after a stop string make no chunk
                    await _send(http, job, response, data)
                pieces = await self._next(job, flow, stages)
        except RuntimeFailure as e:
            log.warning("request %s failed mid-stream: %s", job.caller.request_id, e)
            self._instance.metrics.broken_streams.inc()
            await _send(http, job, response, sse_event({"error": error_object(e)}))
            # The chunked body gets no end: a client that ignores the event still sees a failure.
            if http.transport is not None:
                http.transport.close()
        return response

    def _chunks(self, job: Job, pieces: Sequence[Piece], stages: dict[str, float]) -> bytes:
        out = []
        for piece in pieces:
            chunk = job.format.envelope([job.format.chunk(piece)], chunk=True)
            piece.choice.announced = True
            if job.body.include_usage:
                chunk["usage"] = None
            if piece.choice.finish is not None:
                chunk["pdctl"] = self._served(piece.choice, stages)
            out.append(sse_event(chunk))
        return b"".join(out)

    def _tail(self, job: Job) -> bytes:
        if not job.body.include_usage:
            return SSE_DONE
        last = job.format.envelope([], chunk=True) | {"usage": usage(job.choices)}
        return sse_event(last) + SSE_DONE

    def _served(self, choice: Choice, stages: dict[str, float]) -> Json:
        return served_object(choice, instance=self._instance.config.name, stages=stages)


async def _send(
    http: web.Request, job: Job, response: web.StreamResponse, data: bytes, *, last: bool = False
) -> None:
    """Wait for room in the client's socket buffer, but not for ever."""
    try:
        async with asyncio.timeout(SLOW_CLIENT_S):
            await (response.write_eof(data) if last else response.write(data))
    except TimeoutError as e:
        slow = f"the client read nothing for {SLOW_CLIENT_S:.0f} s"
        if (transport := http.transport) is not None:
            if not last:  # behind what waits in the socket: a router that reads on blames nobody
                error = error_object(RequestError(slow, code="slow_client")) | {"leg": LEG_CLIENT}
                await response.write(sse_event({"error": error}))
            transport.close()
            left = job.deadline - time.monotonic()
            asyncio.get_running_loop().call_later(left, transport.abort)
        raise ConnectionResetError(slow) from e


def _absorb(choice: Choice, burst: _Burst, stop_ids: frozenset[int]) -> Piece:
    """Add a burst to its choice. Tokens after a stop string never existed."""
    choice.served = burst.served or choice.served
    offset, texts, taken = len(choice.text), list[str](), list[OutputToken]()
    for i, token in enumerate(burst.tokens):
        taken.append(token)
        last = burst.finish == "stop" and i == len(burst.tokens) - 1
        if not (last and token.token in stop_ids):
            texts.append(choice.detokenizer.push(token.token))
        if choice.detokenizer.stopped:
            break
    if burst.finish is not None:
        texts.append(choice.detokenizer.finish())
    if burst.finish is None:
        choice.cut = choice.detokenizer.stopped
    elif choice.detokenizer.stopped:
        choice.finish = "stop"
    elif burst.finish != "abort":
        choice.finish = burst.finish
    text = "".join(texts)
    choice.text += text
    choice.tokens.extend(taken)
    return Piece(choice, text, taken, offset)


def _log_end(job: Job) -> None:
    """One line a request: what it was and how it ended, `-` for choices that did not finish."""
    theirs = job.caller.client_request_id
    log.info(
        "request %s%s: %d prompt and %d output tokens in %.3f s, %s",
        job.caller.request_id,
        f" (client's id {theirs})" if theirs is not None else "",
        job.choices[0].prompt_tokens,
        sum(len(c.tokens) for c in job.choices),
        time.monotonic() - job.arrived,
        ",".join(c.finish or "-" for c in job.choices),
    )


def _served_headers(served: Served | None) -> dict[str, str]:
    if served is None:
        return {}
    return {HEADER_PREFILL: served.prefill, HEADER_DECODE: served.decode}

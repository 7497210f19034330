"""Stage `stream`: an upstream's answer, passed to the client as it comes.

Holds at most one unfinished SSE event (or a short whole body): a client that reads slowly slows the
upstream down. Knows no instances; a cut upstream is reported as UpstreamCut, before or after the
first byte went out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from runtime.errors import RuntimeFailure
from runtime.protocol import HEADER_TOKEN
from runtime.reasons import reason

HOLD_BYTES = 8 << 20
"""A body that is not a stream is held back up to this size, so that a cut can become a 502."""
MAX_EVENT_BYTES = 1 << 20
BREAK_OFF_S = 1.0

# Hop by hop, or ours to set.
_DROPPED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "content-length", "date", "server"),
        *("server-timing", "x-request-id", HEADER_TOKEN),
    }
)


class UpstreamCut(RuntimeFailure):
    """The upstream's connection broke before its answer was complete."""


def response_headers(upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """What is passed to the client, x-pdctl-* included, the token never."""
    named = upstream.headers.get("Connection", "").lower()
    dropped = _DROPPED | {n.strip() for n in named.split(",")} if named else _DROPPED
    return CIMultiDict([(k, v) for k, v in upstream.headers.items() if k.lower() not in dropped])


class _Error(msgspec.Struct):
    leg: str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error


_event_decoder = msgspec.json.Decoder(_ErrorEvent)


class EventCutter:
    """Lets whole SSE events through: a cut upstream never leaves half of one at the client."""

    __slots__ = ("_rest", "last")

    def __init__(self) -> None:
        self._rest = b""
        self.last = b""
        """The last bytes that were let through."""

    def feed(self, chunk: bytes) -> bytes:
        if self._rest:
            chunk, self._rest = self._rest + chunk, b""
        if not chunk.endswith((b"\n\n", b"\n\r\n")):
            end = max(chunk.rfind(b"\n\n") + 2, chunk.rfind(b"\n\r\n") + 3)
            if end < 3:
                end = len(chunk) if len(chunk) > MAX_EVENT_BYTES else 0
            chunk, self._rest = chunk[:end], chunk[end:]
        if chunk:
            self.last = chunk
        return chunk

    def rest(self) -> bytes:
        """At a clean end: what is left belongs to the client too."""
        return self._rest

    @property
    def done(self) -> bool:
        return self.last.rstrip().endswith(b"data: [DONE]")

    def failed_leg(self) -> str:
        """Of the upstream's last event, if that said that it failed; else empty."""
        event = self.last.rstrip().replace(b"\r\n", b"\n").rpartition(b"\n\n")[2]
        try:
            error = _event_decoder.decode(event.removeprefix(b"data:")).error
        except msgspec.MsgspecError:
            return ""
        return error.leg or "decode"


class Relay:
    """One answer on its way to one client. `started`: the client has seen some of it."""

    __slots__ = ("_cutter", "_request", "_response", "status")

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._cutter: EventCutter | None = None
        self.status = 0

    @property
    def started(self) -> bool:
        return self._response is not None

    async def run(
        self,
        upstream: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
        on_first: Callable[[], None],
    ) -> web.StreamResponse:
        """Pass the answer on; `on_first` is called with its first bytes. Raises UpstreamCut."""
        streams = upstream.headers.get("Content-Type", "").startswith("text/event-stream")
        held, ended = await _read_held(upstream, 0 if streams else HOLD_BYTES)
        on_first()
        self.status = upstream.status
        if ended:
            return web.Response(status=upstream.status, headers=headers, body=held)
        response = web.StreamResponse(status=upstream.status, headers=headers)
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        self._response = response
        await response.prepare(self._request)
        if streams:
            self._cutter = EventCutter()
            await self._pump_events(upstream, response, self._cutter, held)
        else:
            await self._pump_bytes(upstream, response, held)
        await response.write_eof()
        return response

    async def _pump_events(
        self,
        upstream: aiohttp.ClientResponse,
        response: web.StreamResponse,
        cutter: EventCutter,
        chunk: bytes,
    ) -> None:
        while chunk:
            if whole := cutter.feed(chunk):
                await response.write(whole)
            chunk = await _read(upstream)
        if rest := cutter.rest():
            await response.write(rest)

    async def _pump_bytes(
        self, upstream: aiohttp.ClientResponse, response: web.StreamResponse, chunk: bytes
    ) -> None:
        while chunk:
            await response.write(chunk)
            chunk = await _read(upstream)

    def reported_leg(self) -> str:
        """The leg that the upstream itself reported as failed before it broke off, or empty."""
        return "" if self._cutter is None else self._cutter.failed_leg()

    async def break_off(self, event: bytes) -> web.StreamResponse:
        """End a started answer so that nobody takes it for complete: error event, no clean end."""
        response, cutter = self._response, self._cutter
        assert response is not None
        if cutter is not None and cutter.done:
            return response
        transport = self._request.transport
        if transport is None:
            return response
        if cutter is not None and not cutter.failed_leg():
            try:
                async with asyncio.timeout(BREAK_OFF_S):
                    await response.write(event)
            except (TimeoutError, ConnectionError):
                transport.abort()
        with contextlib.suppress(ConnectionError):
            transport.close()
        return response


async def _read(upstream: aiohttp.ClientResponse) -> bytes:
    """The next bytes, empty at the end."""
    try:
        return await upstream.content.readany()
    except (aiohttp.ClientError, OSError) as e:
        raise UpstreamCut(reason(e)) from e


async def _read_held(upstream: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """The answer's beginning: one chunk more than `limit` bytes, or all of it (then True)."""
    held = await _read(upstream)
    pieces, size = [held], len(held)
    while held and size <= limit:
        held = await _read(upstream)
        pieces.append(held)
        size += len(held)
    return b"".join(pieces), not held

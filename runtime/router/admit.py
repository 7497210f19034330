"""Stage `admit`: who may ask, how much may be sent, and what the router must know of a body.

Ends with a Call or a RequestError (400, 401, 413, 415). Does not know instances.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from dataclasses import dataclass

import msgspec
from aiohttp import web

from runtime.errors import RequestError
from runtime.protocol import RequestId

# Echoed and logged, so nothing that could break a log line.
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


BODY_TIMEOUT_S = 60.0


class _Envelope(msgspec.Struct):
    """The two fields the router needs. Decoding checks the syntax of the whole body."""

    model: str | None = None
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_Envelope)


@dataclass(slots=True)
class Call:
    """One admitted client request."""

    id: RequestId
    client_id: str
    """The client's X-Request-Id, or empty."""
    path: str
    body: bytes
    """Empty once the answer has begun: there is no retry any more."""
    model: str
    stream: bool
    started: float
    """On time.perf_counter."""
    admit_s: float


class KeyRing:
    """The clients' API keys and the deployment's token, compared in constant time."""

    def __init__(self, token: bytes, api_keys: tuple[bytes, ...]) -> None:
        self._token = token
        self._keys = api_keys

    def admits_client(self, request: web.Request) -> bool:
        """Any caller, when no keys are configured."""
        if not self._keys:
            return True
        given = _bearer(request)
        return any(hmac.compare_digest(given, key) for key in self._keys)

    def admits_instance(self, request: web.Request) -> bool:
        return hmac.compare_digest(_bearer(request), self._token)


def _bearer(request: web.Request) -> bytes:
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return b""
    return value.strip().encode("utf-8", "surrogateescape")


def client_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _CLIENT_ID.fullmatch(given) else ""


def check_key(request: web.Request, keys: KeyRing) -> None:
    """Raises RequestError (401)."""
    if not keys.admits_client(request):
        raise RequestError(
            "a valid API key is needed: send it as `Authorization: Bearer KEY`",
            status=401,
            code="invalid_api_key",
        )


def check_head(request: web.Request, keys: KeyRing, max_body_bytes: int) -> None:
    """All that can be refused before a byte of the body is read."""
    check_key(request, keys)
    length = request.content_length
    if length is not None and length > max_body_bytes:
        raise too_large(max_body_bytes)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise RequestError(
            f"Content-Encoding {encoding!r} is not supported: send the body uncompressed",
            status=415,
            code="unsupported_encoding",
        )


def too_large(max_body_bytes: int) -> RequestError:
    return RequestError(
        f"the request body is over the limit of {max_body_bytes} bytes",
        status=413,
        code="request_too_large",
    )


async def admit(
    request: web.Request, keys: KeyRing, max_body_bytes: int, models: frozenset[str]
) -> Call:
    """Check and read one request. Raises RequestError."""
    started = time.perf_counter()
    check_head(request, keys, max_body_bytes)
    try:
        if request.content.is_eof():  # it came with the head, as most do: no timer needed
            body = await _read(request, max_body_bytes)
        else:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read(request, max_body_bytes)
    except TimeoutError as e:
        raise RequestError(
            f"the request body did not arrive within {BODY_TIMEOUT_S:g} s",
            status=408,
            code="body_timeout",
        ) from e
    envelope = _parse(body)
    return Call(
        id=RequestId(secrets.token_hex(12)),
        client_id=client_id(request),
        path=request.path,
        body=body,
        model=_known_model(envelope.model, models),
        stream=bool(envelope.stream),
        started=started,
        admit_s=time.perf_counter() - started,
    )


async def _read(request: web.Request, max_body_bytes: int) -> bytes:
    """`request.read()` would keep the body as long as the request, a stream of minutes maybe."""
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > max_body_bytes:
            raise too_large(max_body_bytes)
    return bytes(body)


def _parse(body: bytes) -> _Envelope:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as e:
        param = str(e).rpartition("$.")[2].rstrip("`") if "$." in str(e) else None
        raise RequestError(f"the request body is invalid: {e}", param=param) from e
    except (msgspec.DecodeError, RecursionError) as e:
        raise RequestError(f"the request body is not valid JSON: {e}", code="invalid_json") from e


def _known_model(model: str | None, models: frozenset[str]) -> str:
    """The model to serve. Before any instance came every name passes: that is a 503, not a 404."""
    if not models:
        return model or ""
    if model is None:
        if len(models) == 1:
            return next(iter(models))
        raise RequestError("`model` is missing", param="model", code="missing_parameter")
    if model not in models:
        raise unknown_model(model, models)
    return model


def unknown_model(model: str, models: frozenset[str]) -> RequestError:
    names = ", ".join(sorted(models))
    return RequestError(
        f"the model {model[:64]!r} does not exist; this deployment serves {names}",
        param="model",
        status=404,
        code="model_not_found",
    )

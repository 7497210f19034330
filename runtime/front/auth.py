"""Who may ask: client keys, and the deployment's token that makes internal headers count.

Owns both comparisons, in constant time. Keys and tokens never reach a log or an answer.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from runtime.errors import RequestError
from runtime.protocol import (
    HEADER_DEADLINE,
    HEADER_PREFILL,
    HEADER_REQUEST_ID,
    HEADER_TOKEN,
    RequestId,
)

_ECHO_LIMIT = 200
_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request's headers say, after those that nobody vouched for were dropped."""

    request_id: RequestId
    client_request_id: str | None
    prefill: str | None
    deadline_s: float


class Gate:
    """Checks requests against one deployment's token and client keys."""

    def __init__(self, token: bytes, keys: Sequence[bytes], default_deadline_s: float) -> None:
        self._token = token
        self._keys = tuple(keys)
        self._default_deadline_s = default_deadline_s

    def admit(self, request: web.Request) -> Caller:
        """Raises RequestError (401) without a valid key or the router's word."""
        internal = self._is_internal(request)
        if not internal and self._keys and not self._is_bearer(request, self._keys):
            raise RequestError(
                "a valid API key is required (Authorization: Bearer KEY)",
                status=401,
                code="invalid_api_key",
            )
        headers = request.headers if internal else {}
        return Caller(
            request_id=RequestId(headers.get(HEADER_REQUEST_ID) or f"r{secrets.token_hex(8)}"),
            client_request_id=_echo(request.headers.get("X-Request-Id")),
            prefill=headers.get(HEADER_PREFILL),
            deadline_s=_seconds(headers.get(HEADER_DEADLINE), self._default_deadline_s),
        )

    def vouch(self, request: web.Request) -> None:
        """For routes of the deployment's own. Raises RequestError (401) without its token."""
        if not self._is_bearer(request, [self._token]):
            raise RequestError(
                "this needs the deployment's token as `Authorization: Bearer TOKEN`",
                status=401,
                code="invalid_token",
            )

    def _is_internal(self, request: web.Request) -> bool:
        given = request.headers.get(HEADER_TOKEN)
        return given is not None and hmac.compare_digest(_raw(given), self._token)

    @staticmethod
    def _is_bearer(request: web.Request, keys: Sequence[bytes]) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        key = _raw(given.strip())
        # Every key is compared, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(key, known) for known in keys]
        return scheme.lower() == "bearer" and any(matches)


def _raw(header: str) -> bytes:
    return header.encode("utf-8", "surrogateescape")


def _echo(value: str | None) -> str | None:
    """A client's own id comes back only when it is harmless in a header and in a log line."""
    if value and len(value) <= _ECHO_LIMIT and value.isascii() and value.isprintable():
        return value
    return None


def _seconds(value: str | None, default: float) -> float:
    try:
        seconds = float(value) if value is not None else default
    except ValueError:
        return default
    # One that is over is for the engine to refuse as it does any other.
    return min(max(seconds, _LEAST_S), default) if not math.isnan(seconds) else default

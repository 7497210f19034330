"""The router's own error answers: OpenAI's shape, with the failed leg and its instance.

Owns the mapping from the exception tree to statuses and to mid-stream events. Knows no request.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from runtime.errors import CapacityError, LegError, RequestError, RuntimeFailure
from runtime.protocol import HEADER_FAILED_LEG


class NoPairError(CapacityError):
    """Nothing healthy serves this model now."""


def error_object(failure: RuntimeFailure) -> dict[str, object]:
    """The value of `error` in a body or an SSE event."""
    error: dict[str, object] = {"message": str(failure), "type": "server_error", "param": None}
    match failure:
        case RequestError():
            error["type"] = "invalid_request_error"
            error["param"] = failure.param
            error["code"] = failure.code or "invalid_value"
        case NoPairError():
            error |= {"type": "service_unavailable", "code": "no_healthy_pair"}
        case CapacityError():
            error |= {"type": "overloaded_error", "code": "overloaded"}
        case LegError():
            error["code"] = "deadline_exceeded" if failure.timeout else "leg_failed"
            error["leg"] = failure.leg
            error["instance"] = failure.instance
        case _:
            error["code"] = "internal_error"
    return error


def error_response(failure: RuntimeFailure) -> web.Response:
    status, headers = 500, dict[str, str]()
    match failure:
        case RequestError():
            status = failure.status
            if status == 401:
                headers["WWW-Authenticate"] = "Bearer"
        case CapacityError():
            status = 503
            headers["Retry-After"] = str(max(1, math.ceil(failure.retry_after_s)))
        case LegError():
            status = failure.status
            headers[HEADER_FAILED_LEG] = failure.leg
    return json_response({"error": error_object(failure)}, status, headers)


def error_event(failure: RuntimeFailure) -> bytes:
    """One whole SSE event."""
    return b"data: " + msgspec.json.encode({"error": error_object(failure)}) + b"\n\n"


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )

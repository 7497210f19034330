"""JSON answers over HTTP, and every failure in one shape: OpenAI's, with the failed leg if there is
one.

Owns the mapping from the exception tree to statuses, headers and error objects, for router and
front. Knows no request.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from runtime.errors import CapacityError, LegError, RequestError, RuntimeFailure
from runtime.protocol import HEADER_FAILED_LEG


def error_object(failure: RuntimeFailure) -> dict[str, object]:
    """The value of `error` in a body or an SSE event."""
    error: dict[str, object] = {"message": str(failure), "type": "server_error", "param": None}
    match failure:
        case RequestError():
            error |= {
                "type": "invalid_request_error",
                "param": failure.param,
                "code": failure.code or "invalid_value",
            }
        case CapacityError():
            error |= {"type": failure.type, "code": failure.code}
        case LegError():
            error |= {
                "code": "deadline_exceeded" if failure.timeout else "leg_failed",
                "leg": failure.leg,
                "instance": failure.instance,
            }
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
    return json_response({"error": error_object(failure)}, status=status, headers=headers)


def sse_event(data: object) -> bytes:
    """One whole SSE event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )

"""Every error answer of the front in one shape: OpenAI's, with the failed leg where there is one.

Owns the mapping from the exception tree to HTTP statuses, and the middleware that applies it to all
routes.
"""

from __future__ import annotations

import logging
import math

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from runtime.errors import CapacityError, Leg, LegError, RequestError, RuntimeFailure
from runtime.protocol import HEADER_FAILED_LEG, Failed

log = logging.getLogger(__name__)

_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
}


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
            error |= {"type": "overloaded_error", "code": "overloaded"}
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
        case CapacityError():
            status = 503
            headers["Retry-After"] = str(max(1, math.ceil(failure.retry_after_s)))
        case LegError():
            status = failure.status
            headers[HEADER_FAILED_LEG] = failure.leg
    return json_response({"error": error_object(failure)}, status=status, headers=headers)


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def failure_of(failed: Failed, *, own_leg: Leg) -> RuntimeFailure:
    """A core's Failed as an exception of the tree."""
    if failed.status in (400, 404):
        return RequestError(failed.message, status=failed.status)
    if failed.status == 503:
        return CapacityError(failed.message, retry_after_s=failed.retry_after_s or 1.0)
    return LegError(
        failed.message,
        leg=failed.leg or own_leg,
        instance=failed.instance,
        timeout=failed.status == 504,
    )


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The per-request boundary: what goes wrong before the first byte becomes one JSON error."""
    try:
        return await handler(request)
    except RuntimeFailure as e:
        return error_response(e)
    except web.HTTPException as e:
        if e.status < 400:
            raise
        return _http_error(request, e)
    except ConnectionError:
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(RuntimeFailure("internal error; the instance's log has the details"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        404: f"there is no {request.path} here",
        405: f"{request.method} is not allowed on {request.path}",
        413: f"the body is over the limit of {request.client_max_size} bytes",
    }
    allowed = error.headers.get("Allow")
    return json_response(
        {
            "error": {
                "message": messages.get(error.status, error.reason),
                "type": "invalid_request_error",
                "param": None,
                "code": _CODES.get(error.status, "invalid_request"),
            }
        },
        status=error.status,
        headers={"Allow": allowed} if allowed else {},
    )

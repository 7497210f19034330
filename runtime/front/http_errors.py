"""What goes wrong on any route of the front becomes one JSON error.

Owns the middleware that sees to it, and the way from a core's failure into the exception tree.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from runtime.answers import error_response, json_response
from runtime.errors import CapacityError, Leg, LegError, RequestError, RuntimeFailure
from runtime.protocol import Failed

log = logging.getLogger(__name__)

_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
}


def failure_of(failed: Failed, *, own_leg: Leg) -> RuntimeFailure:
    """A core's Failed as an exception of the tree."""
    if failed.status in (400, 404):
        return RequestError(failed.message, status=failed.status, code=failed.code)
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

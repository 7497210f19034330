"""Why an exchange with another process over HTTP failed, in a few words."""

from __future__ import annotations

import errno
import os

import aiohttp


def reason(error: Exception) -> str:
    """The system's own words where there are some, without the library's around them."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection ended in the middle of the answer"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno in errno.errorcode:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__

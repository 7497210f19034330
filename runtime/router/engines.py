"""How a chosen pair is asked to serve a request: one object per kind of engine.

An engine kind shapes the upstream request; it does not send it. Ours takes one request at decode,
which calls prefill itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.protocol import (
    HEADER_DEADLINE,
    HEADER_PREFILL,
    HEADER_REQUEST_ID,
    HEADER_TOKEN,
)
from runtime.router.admit import Call
from runtime.router.policy import Choice

# What is passed on of a client's headers. All others end here: keys, cookies, every x-pdctl-*.
_FORWARDED = ("Content-Type", "Accept", "X-Request-Id", "traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class Upstream:
    url: str
    headers: dict[str, str]


class NativeEngine:
    """Our own runtime."""

    def __init__(self, token: str) -> None:
        self._token = token

    def shape(
        self, call: Call, choice: Choice, client: Mapping[str, str], remaining_s: float
    ) -> Upstream:
        """The one upstream request for this call."""
        headers = {name: client[name] for name in _FORWARDED if name in client}
        headers.setdefault("Content-Type", "application/json")
        headers[HEADER_TOKEN] = self._token
        headers[HEADER_REQUEST_ID] = call.id
        headers[HEADER_DEADLINE] = f"{remaining_s:.3f}"
        if choice.prefill is not None:
            headers[HEADER_PREFILL] = choice.prefill.name
        return Upstream(choice.decode.info.url + call.path, headers)

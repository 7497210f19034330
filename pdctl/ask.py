"""One question to a running deployment, streamed, and the proof of how it was served.

Speaks the OpenAI API over HTTP with the standard library only. Knows nothing of hosts or
topologies.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pdctl.errors import PdctlError, UsageError

CONNECT_TIMEOUT_S = 5.0
API_KEY_ENV = "PDCTL_API_KEY"
_RUNNING_HINT = "is it running? see `pdctl status`"
_STATUS_HINT = "`pdctl status` shows what is down or drained"


@dataclass(slots=True)
class Answer:
    """What came back, with times on this process's clock. `served` is the response's `pdctl`
    object."""

    text: str = ""
    finish: str | None = None
    ttft_s: float | None = None
    total_s: float = 0.0
    completion_tokens: int = 0
    served: dict[str, Any] = field(default_factory=dict)
    router_ms: dict[str, float] = field(default_factory=dict)
    """The router's own stages (admit, route) from its Server-Timing header."""


def ask(
    endpoint: str,
    question: str,
    *,
    model: str,
    max_tokens: int,
    timeout_s: float,
    on_text: Callable[[str], None],
) -> Answer:
    """Stream one greedy chat answer; `on_text` gets each piece as it arrives.

    Raises PdctlError when the endpoint refuses, fails in mid-stream, or ends without a finish
    reason.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    start = time.perf_counter()
    connection = _connect(endpoint, timeout_s)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json", **_key()},
        )
        response = connection.getresponse()
        if response.status != 200:
            raise _refused(endpoint, response.status, response.read())
        answer.router_ms = parse_server_timing(response.headers.get("Server-Timing", ""))
        for event in _events(response):
            _apply(event, answer, start, on_text)
    except BrokenPipeError:
        raise  # of `on_text`: nobody reads the answer any more
    except (OSError, http.client.HTTPException) as e:
        raise PdctlError(
            f"{endpoint}: the answer broke off: {_reason(e)}", hint=_STATUS_HINT
        ) from e
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise PdctlError(f"{endpoint}: what it sends is not a stream of chat chunks") from e
    finally:
        connection.close()
    if answer.finish is None:
        raise PdctlError(f"{endpoint}: the answer ended without a finish reason", hint=_STATUS_HINT)
    answer.total_s = time.perf_counter() - start
    return answer


def first_model(endpoint: str) -> str:
    """The name of the model the endpoint serves. Raises PdctlError when it cannot be asked."""
    connection = _connect(endpoint, CONNECT_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/models", headers=_key())
        response = connection.getresponse()
        payload = response.read()
        if response.status != 200:
            raise _refused(endpoint, response.status, payload)
        served = json.loads(payload)["data"]
        if served == []:
            raise PdctlError(f"{endpoint}: it serves no model now", hint=_STATUS_HINT)
        return str(served[0]["id"])
    except (OSError, http.client.HTTPException) as e:
        raise PdctlError(f"{endpoint}: {_reason(e)}", hint=_RUNNING_HINT) from e
    except (ValueError, LookupError, TypeError) as e:
        raise PdctlError(f"{endpoint}: /v1/models did not answer with a list of models") from e
    finally:
        connection.close()


def parse_server_timing(header: str) -> dict[str, float]:
    """`admit;dur=0.3, route;dur=0.1` -> milliseconds by name (W3C Server-Timing)."""
    timings = {}
    for entry in header.split(","):
        name, _, duration = entry.strip().partition(";dur=")
        if name and duration:
            timings[name] = float(duration)
    return timings


def describe(answer: Answer) -> list[str]:
    """How it was served, as lines for a person."""
    served = answer.served
    stages: dict[str, float] = served.get("stages", {})
    lines = []
    if served.get("path") == "local":
        lines.append(
            f"{served['decode']} computed the prompt and the answer; no KV moved (mixed instance)"
        )
    elif served:
        transfer = stages.get("transfer", 0.0) * 1e3
        swap_in = stages.get("swap_in", 0.0) * 1e3
        lines.append(
            f"{served['prefill']} computed {served['prompt_tokens']} prompt tokens"
            f" ({served['cached_tokens']} of them from its prefix cache)"
        )
        lines.append(
            f"{served['kv_bytes'] / 2**20:.1f} MiB of KV moved by {served['path']} to"
            f" {served['decode']}, which had {served['decode_cached_tokens']} of them:"
            f" {transfer:.1f} ms after the prompt was computed,"
            f" swap-in {swap_in:.1f} ms"
        )
    if answer.ttft_s is not None:
        parts = dict(answer.router_ms)
        parts |= {
            name: stages[name] * 1e3
            for name in ("reserve", "prefill_queue", "prefill")
            if name in stages
        }
        ttft = answer.ttft_s * 1e3
        parts["stream and rest"] = ttft - sum(parts.values())
        text = " + ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
        lines.append(f"TTFT {ttft:.1f} ms = {text}")
        decode_s = answer.total_s - answer.ttft_s
        if answer.completion_tokens > 1 and decode_s > 0:
            speed = (answer.completion_tokens - 1) / decode_s
            lines.append(
                f"{answer.completion_tokens} tokens in {answer.total_s:.2f} s;"
                f" {speed:.1f} tokens/s after the first"
            )
    return lines


def _connect(endpoint: str, timeout_s: float) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(endpoint)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)
        connection.connect()
    except OSError as e:  # before ValueError: a certificate that is refused is both
        raise PdctlError(f"{endpoint}: {_reason(e)}", hint=_RUNNING_HINT) from e
    except (ValueError, http.client.InvalidURL) as e:
        raise UsageError(
            f"{endpoint}: not an http URL", hint="give --endpoint http://HOST:PORT"
        ) from e
    connection.sock.settimeout(timeout_s)
    return connection


def _reason(error: Exception) -> str:
    """The system's own words, without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON payloads of an SSE stream up to [DONE]. Our servers put each event's data on one
    line."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)


def _apply(
    event: dict[str, Any], answer: Answer, start: float, on_text: Callable[[str], None]
) -> None:
    if "error" in event:
        said = event["error"].get("message")
        raise PdctlError(f"the answer failed in mid-stream: {said}", hint=_STATUS_HINT)
    if usage := event.get("usage"):
        answer.completion_tokens = usage["completion_tokens"]
    if served := event.get("pdctl"):
        answer.served = served
    for choice in event.get("choices", []):
        piece = choice["delta"].get("content") or ""
        if answer.ttft_s is None:
            answer.ttft_s = time.perf_counter() - start
        if piece:
            answer.text += piece
            on_text(piece)
        answer.finish = choice.get("finish_reason") or answer.finish


def api_key() -> str:
    """Of the environment, or empty. Raises UsageError for what no header can carry."""
    key = os.environ.get(API_KEY_ENV, "").strip()
    if not key.isprintable():
        raise UsageError(
            f"${API_KEY_ENV} has a line break or another character that no key has",
            hint="put one key into it",
        )
    return key


def _key() -> dict[str, bytes]:
    key = api_key()
    return {"Authorization": f"Bearer {key}".encode()} if key else {}


def _refused(endpoint: str, status: int, payload: bytes) -> PdctlError:
    hint = f"put a key into ${API_KEY_ENV}" if status == 401 else ""
    if status in (502, 503, 504):
        hint = _STATUS_HINT
    try:
        text = f"HTTP {status}: {json.loads(payload)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        text = f"HTTP {status}"
    return PdctlError(f"{endpoint}: {text}", hint=hint)

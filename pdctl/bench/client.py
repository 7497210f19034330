"""One endpoint as the benchmark sees it: what it serves, and one timed request.

The only module of the benchmark that speaks HTTP. A request never raises: whatever happens to it
is its Outcome. Looking at the endpoint before the run does raise, in one line.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pdctl.ask import API_KEY_ENV, api_key
from pdctl.bench.dataset import Prompt
from pdctl.bench.outcome import Failure, Outcome, Served
from pdctl.bench.sse import Event, Parser
from pdctl.errors import PdctlError, UsageError

_CONNECT_S = 10.0
_PROBE_S = 20.0
_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint and the model to ask it for."""

    endpoint: str
    """Base URL, without `/v1` and trailing slash."""
    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    token_ids: bool = False
    """It is one of ours: each chunk can say which tokens it holds, text or not."""


def normalize(endpoint: str) -> str:
    """A base URL from what people type: `host:port`, with or without scheme and `/v1`."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def open_session(timeout_s: float) -> aiohttp.ClientSession:
    """A session without connection limit; `timeout_s` bounds a request from send to last byte."""
    headers = {"Accept-Encoding": "identity"}  # compression would hold chunks back
    if key := api_key():
        headers["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
        headers=headers,
    )


async def look(session: aiohttp.ClientSession, endpoint: str, model: str | None) -> Target:
    """Ask the endpoint what it serves. Raises PdctlError or UsageError when it cannot be used."""
    base = normalize(endpoint)
    doc = await _call(session, "GET", f"{base}/v1/models", None)
    models = {m["id"]: m for m in doc.get("data", []) if isinstance(m, dict) and "id" in m}
    if not models:
        raise PdctlError(f"{base} serves no model", hint="wait until the deployment is ready")
    if model is not None and model not in models:
        raise UsageError(
            f"{base} does not serve the model {model}", hint=f"it serves {', '.join(models)}"
        )
    name = model if model is not None else next(iter(models))
    found = models[name]
    return Target(
        base,
        name,
        _whole(found, "max_model_len"),
        _whole(found, "vocab_size"),
        token_ids=found.get("owned_by") == "pdctl",
    )


async def tokenize(session: aiohttp.ClientSession, target: Target, text: str) -> list[int]:
    """What the endpoint's tokenizer makes of `text`."""
    body = {"model": target.model, "prompt": text}
    doc = await _call(session, "POST", f"{target.endpoint}/tokenize", body)
    tokens = doc.get("tokens")
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise PdctlError(f"{target.endpoint}/tokenize answered without `tokens`")
    return tokens


async def _call(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=_PROBE_S, sock_connect=_CONNECT_S)
    try:
        async with session.request(method, url, json=body, timeout=timeout) as response:
            text = await response.text(errors="replace")
            status = response.status
    except TimeoutError as e:
        raise PdctlError(f"{url}: no answer in {_PROBE_S:.0f} s", hint="see pdctl status") from e
    except (aiohttp.InvalidURL, UnicodeError) as e:
        raise UsageError(f"{url}: not a URL", hint="--endpoint http://HOST:PORT") from e
    except (aiohttp.ClientError, OSError) as e:
        raise PdctlError(
            f"{url}: {_reason(e)}", hint="is the deployment up? see pdctl status"
        ) from e
    if status == 401:
        raise PdctlError(f"{url}: it asks for a key", hint=f"put it into ${API_KEY_ENV}")
    try:
        doc = json.loads(text)
    except ValueError:
        doc = None
    if status != 200 or not isinstance(doc, dict):
        raise PdctlError(f"{url}: HTTP {status}: {_error_text(text)}")
    return doc


def _whole(doc: Mapping[str, Any], name: str) -> int | None:
    value = doc.get(name)
    return value if isinstance(value, int) else None


@dataclass(slots=True)
class _Stream:
    """What has come in of one response."""

    arrivals: list[float] = field(default_factory=list)
    finished: bool = False
    done: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)
    served: Served | None = None
    router_s: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None


async def request(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Prompt,
    *,
    index: int = 0,
    scheduled_s: float = 0.0,
    origin: float | None = None,
    ignore_eos: bool = False,
) -> Outcome:
    """Send one streaming request and time it. `origin`: the run's start on `time.perf_counter`."""
    body = dict(prompt.body) | {
        "model": target.model,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    payload = json.dumps(body).encode()
    stream = _Stream()
    zero = time.perf_counter() if origin is None else origin
    started = time.perf_counter()
    try:
        await _read(session, target.endpoint + prompt.path, payload, stream)
    except TimeoutError:
        elapsed = time.perf_counter() - started
        _fail(stream, "timeout", f"not finished after {elapsed:.1f} s")
    except aiohttp.ClientConnectorError as e:
        _fail(stream, "connection", _reason(e))
    except (aiohttp.ClientError, OSError) as e:
        _fail(stream, "stream cut" if stream.arrivals else "connection", _reason(e))
    ended = time.perf_counter()
    return Outcome(
        index=index,
        scheduled_s=scheduled_s,
        started_s=started - zero,
        ended_s=ended - zero,
        arrivals_s=tuple(t - zero for t in stream.arrivals),
        prompt_tokens=_whole(stream.usage, "prompt_tokens"),
        output_tokens=_whole(stream.usage, "completion_tokens"),
        served=stream.served,
        router_s=stream.router_s,
        failure=stream.failure or _incomplete(stream),
    )


async def _read(session: aiohttp.ClientSession, url: str, payload: bytes, stream: _Stream) -> None:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    async with session.post(url, data=payload, headers=headers) as response:
        if response.status != 200:
            text = await response.text(errors="replace")
            stream.failure = Failure(f"HTTP {response.status}", _error_text(text))
            return
        stream.router_s = server_timing(response.headers.getall("Server-Timing", []))
        parser = Parser()
        while chunk := await response.content.readany():
            now = time.perf_counter()
            carried = [_take(stream, event) for event in parser.feed(chunk)]
            if any(carried):
                stream.arrivals.append(now)


def _take(stream: _Stream, event: Event) -> bool:
    """Note one event; true when it carries output."""
    if event.data == "[DONE]":
        stream.done = True
        return False
    try:
        doc = json.loads(event.data)
    except ValueError:
        doc = None
    if event.name == "error" or (isinstance(doc, dict) and doc.get("error")):
        _fail(stream, "stream error", _error_text(event.data))
        return False
    if not isinstance(doc, dict):
        _fail(stream, "malformed chunk", event.data[:_MESSAGE_CHARS])
        return False
    if isinstance(usage := doc.get("usage"), dict):
        stream.usage = usage
    if isinstance(served := doc.get("pdctl"), dict):
        stream.served = read_served(served)
    carried = False
    choices = doc.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict):
            stream.finished |= choice.get("finish_reason") is not None
            carried |= _carries(choice)
    return carried


def _carries(choice: Mapping[str, Any]) -> bool:
    """Output, not just the role that opens a chat stream. Half a character is tokens, not text."""
    if choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(k) for k in ("content", "reasoning_content", "tool_calls"))
    return bool(choice.get("text"))


def _fail(stream: _Stream, kind: str, message: str) -> None:
    """The first failure is the cause: a server that reports one cuts the connection after it."""
    stream.failure = stream.failure or Failure(kind, message)


def _incomplete(stream: _Stream) -> Failure | None:
    if not stream.finished:
        return Failure("stream cut", "the stream ended without a finish reason")
    if not stream.done:
        return Failure("stream cut", "the stream ended without [DONE]")
    if not stream.arrivals:
        return Failure("empty output", "the answer held nothing")
    return None


def read_served(doc: Mapping[str, Any]) -> Served:
    """The `pdctl` object of a response. What is missing or of another type counts as not said."""
    stages = doc.get("stages")
    return Served(
        prefill=str(doc.get("prefill", "")),
        decode=str(doc.get("decode", "")),
        path=str(doc.get("path", "")),
        kv_bytes=_whole(doc, "kv_bytes") or 0,
        cached_tokens=_whole(doc, "cached_tokens") or 0,
        stages=_numbers(stages) if isinstance(stages, dict) else {},
        ttft_s=_numbers(doc).get("ttft_s"),
        e2e_s=_numbers(doc).get("e2e_s"),
    )


def _numbers(doc: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in doc.items() if type(v) in (int, float)}


def server_timing(headers: list[str]) -> dict[str, float]:
    """Seconds per name out of Server-Timing headers (`admit;dur=0.2, route;dur=1.5`)."""
    found: dict[str, float] = {}
    for entry in ",".join(headers).split(","):
        name, *params = (part.strip() for part in entry.split(";"))
        for param in params:
            key, _, value = param.partition("=")
            try:
                if name and key.strip() == "dur":
                    found[name] = float(value.strip().strip('"')) / 1e3
            except ValueError:
                continue  # not a number: as good as absent
    return found


def _reason(error: Exception) -> str:
    """One line, the system's own words where there are some."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection ended in the middle of the answer"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    text = str(cause) or type(error).__name__
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno in errno.errorcode:
        text = os.strerror(cause.errno)  # asyncio puts the address in its place
    elif isinstance(cause, OSError) and cause.strerror:
        text = cause.strerror
    return " ".join(text.split())[:_MESSAGE_CHARS]


def _error_text(text: str) -> str:
    """The message of an OpenAI-style error body, else the body's beginning."""
    try:
        doc = json.loads(text)
    except ValueError:
        doc = None
    match doc:
        case {"error": {"message": str(message)}} | {"error": str(message)}:
            return " ".join(message.split())[:_MESSAGE_CHARS]
        case {"message": str(message)}:
            return " ".join(message.split())[:_MESSAGE_CHARS]
    return " ".join(text.split())[:_MESSAGE_CHARS] or "(no body)"

"""A streaming completion as an impatient client sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass
class Stream:
    text: str = ""
    chunks: int = 0
    finish: str | None = None
    done: bool = False
    status: int = 0
    error: dict[str, Any] | None = None
    """The error object of a failed response or of an in-band error event."""
    broken: str | None = None
    """How the transport broke off, if it did."""


async def stream_completion(
    session: aiohttp.ClientSession,
    endpoint: str,
    body: dict[str, Any],
    *,
    leave_after: int | None = None,
) -> Stream:
    """Stream /v1/completions; with `leave_after`, close the connection after that many chunks (0:
    at once)."""
    stream = Stream()
    try:
        async with session.post(
            f"{endpoint}/v1/completions", json=body | {"stream": True}
        ) as response:
            stream.status = response.status
            if response.status != 200:
                stream.error = (await response.json())["error"]
                return stream
            if leave_after == 0:
                response.close()
                return stream
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                payload = line[6:].strip()
                if payload == b"[DONE]":
                    stream.done = True
                    break
                event = json.loads(payload)
                if "error" in event:
                    stream.error = event["error"]
                    continue
                for choice in event["choices"]:
                    stream.text += choice["text"]
                    stream.finish = choice["finish_reason"] or stream.finish
                stream.chunks += 1
                if leave_after is not None and stream.chunks >= leave_after:
                    response.close()
                    return stream
    except (aiohttp.ClientError, ConnectionError) as e:
        stream.broken = type(e).__name__
    return stream

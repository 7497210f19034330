"""The mixed role: prefill and decode in one engine. Owns deadlines and words to the front."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.engine.contract import (
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Produced,
)
from runtime.engine.role import Parts, Role
from runtime.protocol import (
    Failed,
    Generate,
    Ledger,
    PeerAddress,
    PeerState,
    RequestId,
    Served,
    Tokens,
)

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Local:
    message: Generate
    deadline: asyncio.TimerHandle
    first: Produced | None = None
    first_at: float = 0.0


class MixedRole(Role):
    """Prefill and decode in one engine: nothing moves."""

    def __init__(self, parts: Parts) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = parts.config.name
        self._engine = parts.engine
        self._send = parts.send
        self._requests: dict[RequestId, _Local] = {}
        self._counters: defaultdict[str, float] = defaultdict(float)

    async def start(self) -> None:
        """No other instance sees this one."""

    def serve(self) -> None:
        """Nothing comes but in answer to the front."""

    async def close(self) -> None:
        for request_id in list(self._requests):
            self._forget(request_id)
            self._engine.drop(request_id)

    def generate(self, message: Generate) -> None:
        if message.id in self._requests:
            _log.error("%s: this id is under way already; ignored", message.id)
            return
        deadline = self._loop.call_later(message.deadline_s, self._expire, message.id)
        self._requests[message.id] = _Local(message, deadline)
        self._engine.submit(EngineRequest(message.id, message.prompt, message.params, "generate"))

    def abort(self, request_id: RequestId) -> None:
        if request := self._forget(request_id):
            self._counters["requests_aborted"] += 1
            self._engine.drop(request_id)
            served = self._served(request)
            self._send(Tokens(id=request_id, tokens=(), finish="abort", served=served))

    def set_peers(self, peers: Mapping[str, PeerAddress]) -> None:
        """It needs none."""

    def on_engine(self, event: EngineEvent) -> None:
        request = self._requests.get(event.id)
        if request is None:
            return
        if isinstance(event, EngineFailed):
            self._forget(event.id)
            self._failed(request, event.message, event.status, event.code)
        elif isinstance(event, Produced):
            is_first = request.first is None
            if is_first:
                request.first, request.first_at = event, self._loop.time()
            if event.finish is not None:
                self._forget(event.id)
            served = self._served(request) if is_first or event.finish is not None else None
            self._send(Tokens(id=event.id, tokens=event.tokens, finish=event.finish, served=served))

    def ledger(self) -> Ledger:
        engine = self._engine.stats()
        return Ledger(
            requests=len(self._requests),
            waiting=engine.waiting,
            running=engine.running,
            device_blocks=engine.device_blocks_held,
        )

    def peers(self) -> dict[str, PeerState]:
        return {}

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def _expire(self, request_id: RequestId) -> None:
        if request := self._forget(request_id):
            self._engine.drop(request_id)
            self._failed(request, f"not done within {request.message.deadline_s:g} s", 504)

    def _failed(self, request: _Local, message: str, status: int, code: str | None = None) -> None:
        _log.warning("%s: failed (%d): %s", request.message.id, status, message)
        self._counters["requests_failed"] += 1
        self._send(
            Failed(
                id=request.message.id,
                message=message,
                status=status,
                leg="decode",
                instance=self._name,
                retry_after_s=1.0 if status == 503 else None,
                code=code,
            )
        )

    def _forget(self, request_id: RequestId) -> _Local | None:
        if request := self._requests.pop(request_id, None):
            request.deadline.cancel()
        return request

    def _served(self, request: _Local) -> Served:
        stages: dict[str, float] = {}
        cached = 0
        if request.first:
            cached = request.first.cached_tokens
            stages = {
                "prefill_queue": request.first.queue_s,
                "prefill": request.first.prefill_s,
                "decode": self._loop.time() - request.first_at,
            }
        return Served(
            prefill=self._name,
            decode=self._name,
            path="local",
            prompt_tokens=len(request.message.prompt),
            cached_tokens=cached,
            stages=stages,
        )

"""What a core does for its front, by role: generate here, prefill for others, or decode what others
prefilled.

Owns how the pieces of each role are put together and taken apart. The process around them is
process.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.config import WorkerConfig
from runtime.engine.contract import (
    EngineControl,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Produced,
)
from runtime.errors import ConfigError
from runtime.kv.buffer import CpuBuffer
from runtime.kv.swap import CopyLane
from runtime.protocol import (
    PROTOCOL_VERSION,
    Event,
    Failed,
    Generate,
    Hello,
    Ledger,
    PeerState,
    RequestId,
    Served,
    Tokens,
)
from runtime.transfer.handoff_decode import DecodeHandoff
from runtime.transfer.handoff_prefill import PrefillHandoff
from runtime.transfer.mailbox import Mailbox
from runtime.transfer.peer_client import PeerClient
from runtime.transfer.peer_server import Local, PeerServer

_log = logging.getLogger(__name__)

_SHM = Path("/dev/shm")
_LANE_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What every role is built from."""

    config: WorkerConfig
    token: bytes
    incarnation: str
    fingerprint: dict[str, str | int]
    engine: EngineControl
    mailbox: Mailbox
    send: Callable[[Event], None]


class Role(ABC):
    """For the asyncio thread. `start` raises ConfigError and leaves nothing then."""

    num_buffer_blocks = 0

    @abstractmethod
    async def start(self) -> None:
        """Open what other instances see, before the front hears that the core is ready."""

    @abstractmethod
    def serve(self) -> None:
        """The front knows that the core is ready: begin what sends events."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything back; the engine still runs."""

    @abstractmethod
    def generate(self, message: Generate) -> None: ...

    @abstractmethod
    def abort(self, request_id: RequestId) -> None: ...

    @abstractmethod
    def on_engine(self, event: EngineEvent) -> None: ...

    @abstractmethod
    def ledger(self) -> Ledger: ...

    @abstractmethod
    def peers(self) -> dict[str, PeerState]: ...

    @abstractmethod
    def counters(self) -> Mapping[str, float]: ...


def make_role(parts: Parts) -> Role:
    kinds: dict[str, type[MixedRole] | type[PrefillRole] | type[DecodeRole]] = {
        "mixed": MixedRole,
        "prefill": PrefillRole,
        "decode": DecodeRole,
    }
    return kinds[parts.config.role](parts)


# ---- mixed
# ----------------------------------------------------------------------------------------


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

    def on_engine(self, event: EngineEvent) -> None:
        request = self._requests.get(event.id)
        if request is None:
            return
        if isinstance(event, EngineFailed):
            self._forget(event.id)
            self._failed(request, event.message, event.status)
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

    def _failed(self, request: _Local, message: str, status: int) -> None:
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


# ---- prefill
# --------------------------------------------------------------------------------------


class PrefillRole(Role):
    """Listens for decode instances; has nothing to say to its own front but its statistics."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        if config.peer is None:
            raise ConfigError("a prefill instance needs `peer`, the address decode connects to")
        self._address = config.peer
        self._name = config.name
        self._send = parts.send
        self._handoff = PrefillHandoff(parts.engine)
        local = Local(
            deployment=config.deployment,
            instance=config.name,
            incarnation=parts.incarnation,
            fingerprint=parts.fingerprint,
            block_bytes=parts.engine.layout.block_bytes,
            transfer=config.transfer,
            token=parts.token,
        )
        self._server = PeerServer(local, self._handoff, parts.mailbox.post)

    async def start(self) -> None:
        await self._server.start(self._address)

    def serve(self) -> None:
        """Decode instances may have connected already: nothing is told to the front."""

    async def close(self) -> None:
        await self._server.close()

    def generate(self, message: Generate) -> None:
        self._send(
            Failed(
                id=message.id,
                message=f"{self._name} only prefills: ask a decode instance, or the router",
                status=400,
                instance=self._name,
            )
        )

    def abort(self, request_id: RequestId) -> None:
        """There is none to stop: `generate` refuses them all."""

    def on_engine(self, event: EngineEvent) -> None:
        self._handoff.on_engine(event)

    def ledger(self) -> Ledger:
        return self._handoff.ledger()

    def peers(self) -> dict[str, PeerState]:
        return self._handoff.peers()

    def counters(self) -> Mapping[str, float]:
        return self._handoff.counters


# ---- decode
# ---------------------------------------------------------------------------------------


class DecodeRole(Role):
    """Owns the CPU buffer and a session with each prefill peer."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._parts = parts
        sweep_segments(config.shm_prefix)
        self._buffer = CpuBuffer.create(
            f"{config.shm_prefix}.0.{parts.incarnation}",
            config.cpu_buffer_bytes,
            parts.engine.layout.block_bytes,
        )
        self.num_buffer_blocks = self._buffer.num_blocks
        self._lane = CopyLane("kv-swap-in", parts.mailbox.post)
        self._handoff = DecodeHandoff(config, parts.engine, self._buffer, self._lane, parts.send)
        self._clients: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Decode listens to nobody; it dials, once it may send events."""

    def serve(self) -> None:
        config = self._parts.config
        hello = Hello(
            version=PROTOCOL_VERSION,
            deployment=config.deployment,
            instance=config.name,
            incarnation=self._parts.incarnation,
            fingerprint=self._parts.fingerprint,
            transfer=config.transfer,
            segment=self._buffer.name,
            segment_bytes=self._buffer.nbytes,
            block_bytes=self._buffer.block_bytes,
        )
        post = self._parts.mailbox.post
        for peer in config.prefill_peers:
            client = PeerClient(peer, hello, self._parts.token, self._handoff, post)
            self._clients.append(asyncio.create_task(client.run(), name=f"peer {peer.name}"))

    async def close(self) -> None:
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        self._handoff.close()
        self._lane.close()
        await self._lane.wait_closed(_LANE_CLOSE_S)
        self._buffer.close()

    def generate(self, message: Generate) -> None:
        self._handoff.generate(message)

    def abort(self, request_id: RequestId) -> None:
        self._handoff.abort(request_id)

    def on_engine(self, event: EngineEvent) -> None:
        self._handoff.on_engine(event)

    def ledger(self) -> Ledger:
        return self._handoff.ledger()

    def peers(self) -> dict[str, PeerState]:
        return self._handoff.peers()

    def counters(self) -> Mapping[str, float]:
        return self._handoff.counters


def sweep_segments(prefix: str, folder: Path = _SHM) -> None:
    """Unlink what former incarnations left when they were killed. The prefix is this instance's
    alone.
    """
    for entry in os.scandir(folder):
        ours = entry.name.startswith(f"{prefix}.")
        if ours and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
            _log.warning("removing %s, left by a former incarnation", entry.path)
            Path(entry.path).unlink(missing_ok=True)

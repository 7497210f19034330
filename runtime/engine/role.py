"""What a core does for its front, as its process sees it: the contract of every role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.config import WorkerConfig
from runtime.engine.contract import (
    EngineControl,
    EngineEvent,
)
from runtime.kv.buffer import CpuBuffer
from runtime.protocol import (
    Event,
    Generate,
    Ledger,
    Measure,
    Measured,
    PeerAddress,
    PeerState,
    RequestId,
)
from runtime.transfer.mailbox import Mailbox


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
    buffer: CpuBuffer | None = None
    """Decode only; closed by who made it, after the engine has stopped."""


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
        """Give everything back and let nobody write here any more; the engine still runs."""

    @abstractmethod
    def generate(self, message: Generate) -> None: ...

    @abstractmethod
    def abort(self, request_id: RequestId) -> None: ...

    async def measure(self, ask: Measure) -> Measured:
        """How fast KV comes here. Only decode instances have an answer."""
        return Measured(seq=ask.seq, error="only decode instances measure transfers", status=400)

    @abstractmethod
    def set_peers(self, peers: Mapping[str, PeerAddress]) -> None:
        """The prefill instances that the router knows."""

    @abstractmethod
    def on_engine(self, event: EngineEvent) -> None: ...

    @abstractmethod
    def ledger(self) -> Ledger: ...

    @abstractmethod
    def peers(self) -> dict[str, PeerState]: ...

    @abstractmethod
    def counters(self) -> Mapping[str, float]: ...

"""What prefill remembers of one request and of one session. PrefillHandoff changes it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from runtime.kv.swap import Copy, CopyLane
from runtime.link import Link
from runtime.protocol import (
    Hello,
    KvReady,
    PeerRequest,
    Prefill,
    PrefillFailed,
    Released,
    RequestId,
)
from runtime.transfer.base import Sender

Answer = KvReady | PrefillFailed | Released
"""The terminal messages: exactly one for each Prefill and PathTest."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """One request for a decode instance."""

    message: Prefill
    session: PrefillSession
    engine_id: RequestId
    deadline: asyncio.TimerHandle | None = None
    queued: int = 0
    """The first blocks that were given to the lane in all layers,"""
    queued_layers: int = 0
    """and of the next ones, which a step under way computes, the first layers."""
    put: int = 0
    """The first blocks that are put."""
    nbytes: int = 0
    """What the puts have returned; counted on the lane's thread."""
    copies: set[Copy] = field(default_factory=set)
    in_engine: bool = True
    computed_at: float = 0.0
    stopped: bool = False
    """No further put starts; `answer` goes out when the running one has ended."""
    answer: Answer | None = None


@dataclass(slots=True, eq=False)
class PrefillSession:
    """One control session of a decode instance."""

    number: int
    hello: Hello
    link: Link[PeerRequest]
    lane: CopyLane
    sender: Sender | None
    """None: tcp, and not all data connections have come yet."""
    streams: int = 1
    joined: list[socket.socket] = field(default_factory=list)
    """The data connections that have come."""
    outgoing: dict[int, Outgoing] = field(default_factory=dict)
    last_nonce: int = 0
    lost: bool = False

    @property
    def room(self) -> int:
        """Bytes that blocks may be numbered in: decode's segment and, where we reach it, pool."""
        return self.hello.segment_bytes + (self.sender.pool_bytes if self.sender else 0)

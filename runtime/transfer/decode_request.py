"""What decode remembers of one request, and what can be read off it. DecodeHandoff changes it."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field

from runtime.engine.contract import Adopted, EngineRequest
from runtime.errors import Leg
from runtime.kv.buffer import Reservation
from runtime.kv.swap import Copy
from runtime.link import Link, LinkClosed
from runtime.protocol import (
    Cancel,
    FirstToken,
    Generate,
    KvReady,
    PeerReply,
    Prefill,
    RequestId,
    Served,
    Welcome,
)
from runtime.transfer.base import Receiver
from runtime.transfer.reservations import Waiter, Writer

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeSession:
    """One control session with a prefill peer, from its Welcome on."""

    peer: str
    welcome: Welcome
    link: Link[PeerReply]
    writer: Writer
    requests: dict[int, DecodeRequest] = field(default_factory=dict)
    """By nonce: asked of the peer, and their KV not all in the device pool yet."""
    answers: dict[int, asyncio.Future[PeerReply]] = field(default_factory=dict)
    """By nonce: who waits for the end of a path test."""
    no_pool: str = ""
    """Why KV goes through the CPU buffer, where it could go straight into GPU memory."""

    def tell(self, message: Prefill | Cancel) -> None:
        try:
            self.link.send(message)
        except LinkClosed:
            # peer_client is about to report the session as down, which fails what depends on it.
            _log.debug("%s: link closed while sending", self.peer)

    @property
    def path(self) -> str:
        return self.welcome.path

    @property
    def reason(self) -> str:
        """Why it is not a better path, or not as good as it could be."""
        parts = [self.welcome.path_reason]
        if self.no_pool:
            parts.append(f"through the CPU buffer, not into the GPU: {self.no_pool}")
        return "; ".join(filter(None, parts))

    @property
    def receiver(self) -> Receiver:
        return self.writer.receiver


@dataclass(slots=True, eq=False)
class Landing:
    """KV on its way through blocks of the buffer into device blocks, in order."""

    reservation: Reservation
    device: tuple[int, ...] | None
    """Where each block of the reservation goes; None: no device blocks yet."""
    direct: bool = False
    """The reservation is of these device blocks themselves: nothing is copied."""
    landed: int = 0
    """The first blocks that hold final bytes in the buffer,"""
    queued: int = 0
    """that were given to the copy lane,"""
    copied: int = 0
    """that are in the device pool."""

    @property
    def blocks(self) -> int:
        return len(self.reservation.blocks)

    @property
    def written(self) -> bool:
        """Somebody else may still write into the device blocks."""
        return self.direct and self.reservation.writer_open

    @property
    def done(self) -> bool:
        return self.copied == self.blocks


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """States in order: waiting, prefilling, landing, decoding; `over` once the front had its last
    message.
    """

    message: Generate
    for_engine: EngineRequest
    """Its id is of this attempt alone: the router may try one again while a lost writer still keeps
    the device blocks of the attempt before."""
    session: DecodeSession
    num_blocks: int
    arrived: float
    deadline: float
    waiter: Waiter | None = None
    reserve_timer: asyncio.TimerHandle | None = None
    deadline_timer: asyncio.TimerHandle | None = None
    adopted: Adopted | None = None
    """All device blocks of the prompt, when the engine gave them before the reservation."""
    landing: Landing | None = None
    """Set with the reservation: the prompt's other blocks; later, all that was swapped out."""
    granted: float = 0.0
    submitted: bool = False
    """The engine knows the id."""
    copies: set[Copy] = field(default_factory=set)
    first: FirstToken | None = None
    ready: KvReady | None = None
    """Set once prefill has put everything; over tcp some of it may still be on its way."""
    ready_at: float = 0.0
    landed_at: float = 0.0
    resumed_at: float = 0.0
    away_since: float = 0.0
    """When it was swapped out; 0: it is not."""
    over: bool = False

    @property
    def engine_id(self) -> RequestId:
        return self.for_engine.id

    @property
    def have_blocks(self) -> int:
        """Leading blocks of the prompt that are in the device pool already, and held for it."""
        return self.adopted.cached if self.adopted else 0

    @property
    def missing_blocks(self) -> int:
        """Those that prefill is asked for."""
        return self.num_blocks - self.have_blocks

    @property
    def pledged_blocks(self) -> int:
        """Device blocks it has and cannot use yet."""
        return len(self.adopted.blocks) if self.adopted and not self.resumed else 0

    @property
    def missing_device_blocks(self) -> tuple[int, ...] | None:
        """Where those go, if that is known."""
        return self.adopted.blocks[self.adopted.cached :] if self.adopted else None

    @property
    def resumed(self) -> bool:
        return self.resumed_at > 0

    @property
    def nonce(self) -> int:
        assert self.landing is not None
        return self.landing.reservation.nonce

    @property
    def all_landed(self) -> bool:
        """Every byte was put and has arrived: the peer is not needed any more."""
        if self.ready is None or self.landing is None:
            return False
        return self.landing.landed == self.landing.blocks

    @property
    def leg(self) -> Leg:
        """Whom the request is waiting for."""
        if self.landing is None or self.all_landed:
            return "decode"
        return "prefill" if self.first is None else "transfer"

    def flaw(self, first: FirstToken, vocab_size: int) -> str:
        """Why the first token cannot be what it is said to be; empty: it can."""
        if self.first is not None:
            return "a second first token"
        if first.cached_tokens > (tokens := len(self.message.prompt)):
            return f"{first.cached_tokens} of {tokens} prompt tokens from its cache"
        chosen = first.token
        ids, values = [chosen.token], [0.0]
        if logprob := chosen.logprob:
            ids += [logprob.token, *(token for token, _ in logprob.top)]
            values += [logprob.logprob, *(value for _, value in logprob.top)]
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"a token that is not one of {vocab_size}"
        return "a log probability that is no number" if any(map(math.isnan, values)) else ""

    def served(self, instance: str, now: float, block_size: int) -> Served:
        """As far as known now."""
        stages: dict[str, float] = {}
        if self.granted:
            stages["reserve"] = self.granted - self.arrived
        cached = 0
        if self.first:
            cached = self.first.cached_tokens
            stages["prefill_queue"] = self.first.queue_s
            stages["prefill"] = self.first.prefill_s
        kv_bytes = 0
        if self.ready and self.resumed:
            kv_bytes = self.ready.nbytes
            # Two durations, each on one clock: prefill's to its last put, ours until the bytes were
            # here.
            stages["transfer"] = self.ready.transfer_s + (self.landed_at - self.ready_at)
            stages["swap_in"] = self.resumed_at - self.landed_at
            stages["decode"] = now - self.resumed_at
        return Served(
            prefill=self.session.peer,
            decode=instance,
            path=self.session.path,
            kv_bytes=kv_bytes,
            prompt_tokens=len(self.message.prompt),
            cached_tokens=cached,
            decode_cached_tokens=self.have_blocks * block_size,
            stages=stages,
        )

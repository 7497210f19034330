"""Decode's half of the hand-over: one state machine per request, from its arrival to its last
token.

waiting (for buffer room) -> prefilling -> landing (blocks arrive and are swapped in) -> decoding.
Owns what each state holds and gives it back on every way out. Sockets belong to peer_client,
threads to kv.swap, the queue and the quarantine to reservations. Runs on the asyncio thread;
nothing here waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from runtime.config import WorkerConfig
from runtime.engine.contract import (
    Adopted,
    EngineControl,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Produced,
)
from runtime.errors import Leg, TransferError
from runtime.kv.buffer import CpuBuffer, Reservation
from runtime.kv.swap import Copy, CopyLane, copy_region, split_blocks
from runtime.link import LinkClosed
from runtime.protocol import (
    Cancel,
    Event,
    Failed,
    FinishReason,
    FirstToken,
    Generate,
    KvProgress,
    KvReady,
    Ledger,
    OutputToken,
    PeerReply,
    PeerState,
    Prefill,
    PrefillFailed,
    Released,
    RequestId,
    Tokens,
)
from runtime.transfer.decode_request import DecodeRequest, DecodeSession
from runtime.transfer.reservations import Reservations, Waiter

_log = logging.getLogger(__name__)


class DecodeHandoff:
    """`send` takes events for the front."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: EngineControl,
        buffer: CpuBuffer,
        lane: CopyLane,
        send: Callable[[Event], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._engine = engine
        self._layout = engine.layout
        self._lane = lane
        self._send = send
        self.reservations = Reservations(buffer, self._loop)
        self._buffer = buffer
        self._requests: dict[RequestId, DecodeRequest] = {}
        self._closing: set[DecodeRequest] = set()
        """Over for the front, with a copy that still runs."""
        self._sessions: dict[str, DecodeSession] = {}
        self._down: dict[str, str] = {
            peer.name: "not connected yet" for peer in config.prefill_peers
        }
        """Why each peer without a session has none."""
        self.counters: defaultdict[str, float] = defaultdict(float)

    # ---- from the front -------------------------------------------------------------------------

    def generate(self, message: Generate) -> None:
        now = self._loop.time()
        session = self._choose(message)
        if session is None:
            return
        blocks = self._layout.blocks_for(len(message.prompt))
        if refusal := self._never_fits(message, blocks):
            self._refuse(message, refusal, 400)
            return
        if self.reservations.waiting >= self._config.max_queued:
            self._refuse(
                message,
                f"{self.reservations.waiting} requests already wait for the CPU buffer",
                503,
                retry_after_s=1.0,
            )
            return
        request = DecodeRequest(message, session, blocks, now, now + message.deadline_s)
        self._requests[message.id] = request
        request.deadline_timer = self._loop.call_at(request.deadline, self._expire, request)
        reserve_by = now + self._config.reserve_timeout_s
        request.reserve_timer = self._loop.call_at(reserve_by, self._no_room, request)
        request.waiter = Waiter(blocks, partial(self._granted, request))
        self.reservations.join(request.waiter)

    def abort(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            self.counters["requests_aborted"] += 1
            self._finish(request, (), "abort")

    def _choose(self, message: Generate) -> DecodeSession | None:
        """The session to use; None after the request was refused."""
        if message.id in self._requests:
            _log.error("%s: this id is under way already; ignored", message.id)
            return None
        if not message.prompt:
            self._refuse(message, "the prompt is empty", 400)
            return None
        if message.prefill is None:
            up = [s for s in self._sessions.values() if s.up]
            if not up:
                self._refuse(message, "no prefill instance is linked", 503, retry_after_s=1.0)
                return None
            return min(up, key=self._load)
        session = self._sessions.get(message.prefill)
        if session is not None and session.up:
            return session
        if message.prefill not in self._down:
            self._refuse(message, f"{message.prefill} is no prefill peer of this instance", 400)
        else:
            why = self._down[message.prefill]
            self._refuse(
                message, f"{message.prefill} is down: {why}", 502, "prefill", message.prefill
            )
        return None

    def _load(self, session: DecodeSession) -> int:
        return sum(1 for r in self._requests.values() if r.session is session and not r.resumed)

    def _never_fits(self, message: Generate, blocks: int) -> str:
        tokens = len(message.prompt)
        if blocks > self._buffer.num_blocks:
            return (
                f"a prompt of {tokens} tokens needs {blocks} blocks of the CPU buffer,"
                f" which has {self._buffer.num_blocks}"
            )
        # One more token than the prompt, or decoding could not even begin.
        needed = self._layout.blocks_for(tokens + 1)
        have = self._layout.num_blocks_in(self._engine.pool.nbytes)
        if needed > have:
            return (
                f"a prompt of {tokens} tokens needs {needed} blocks of KV cache, there are {have}"
            )
        return ""

    def _refuse(
        self,
        message: Generate,
        text: str,
        status: int,
        leg: Leg | None = None,
        instance: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.counters["requests_failed"] += 1
        self._send(
            Failed(
                id=message.id,
                message=text,
                status=status,
                leg=leg,
                instance=instance or self._config.name,
                retry_after_s=retry_after_s,
            )
        )

    # ---- reserve --------------------------------------------------------------------------------

    def _granted(self, request: DecodeRequest, reservation: Reservation) -> None:
        now = self._loop.time()
        request.waiter = None
        request.reservation = reservation
        request.granted = now
        _cancel_timer(request.reserve_timer)
        session, message = request.session, request.message
        session.requests[reservation.nonce] = request
        self.reservations.open_for(session.writer, reservation)
        self._tell(
            session,
            Prefill(
                id=message.id,
                nonce=reservation.nonce,
                prompt=message.prompt,
                params=message.params,
                blocks=reservation.blocks,
                deadline_s=request.deadline - now,
            ),
        )

    def _no_room(self, request: DecodeRequest) -> None:
        waited = self._config.reserve_timeout_s
        self._fail(request, f"no room in the CPU buffer for {waited:g} s", 503, "decode", 1.0)

    def _tell(self, session: DecodeSession, message: Prefill | Cancel) -> None:
        try:
            session.link.send(message)
        except LinkClosed:
            # peer_client is about to report the session as down, which fails what depends on it.
            _log.debug("%s: link closed while sending", session.peer)

    # ---- from the peer --------------------------------------------------------------------------

    def session_opened(self, session: DecodeSession) -> None:
        """Welcomed, path not tested yet."""
        self.reservations.welcomed(session.peer, session.welcome.incarnation)

    def session_up(self, session: DecodeSession) -> None:
        session.up = True
        self._sessions[session.peer] = session
        self._send(
            PeerState(name=session.peer, path=session.path, incarnation=session.welcome.incarnation)
        )

    def session_down(self, session: DecodeSession, reason: str) -> None:
        """Fails, in this turn of the loop, everything that still needs the peer."""
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
        session.up = False
        for request in list(self._requests.values()):
            if request.session is session and not request.all_landed:
                self._fail(request, f"{session.peer} was lost: {reason}", 502, "prefill")
        self.reservations.lose(session.writer)

    def peer_down(self, name: str, reason: str) -> None:
        """There is no session with this peer, and why."""
        if self._down.get(name) == reason and name not in self._sessions:
            return
        self._down[name] = reason
        self._send(PeerState(name=name, path=None, reason=reason))

    def on_peer(self, session: DecodeSession, message: PeerReply) -> None:
        if not isinstance(message, FirstToken | KvProgress | KvReady | PrefillFailed | Released):
            return
        request = session.requests.get(message.nonce)
        if isinstance(message, KvReady | PrefillFailed | Released):
            if request:
                self._on_terminal(request, message)
            self.reservations.terminal(session.writer, message.nonce)
        elif request is None:
            return  # over, and crossed by its Cancel
        elif isinstance(message, FirstToken):
            self._on_first(request, message)
        else:
            self._on_landed(request, message.blocks)

    def on_received(self, session: DecodeSession, nonce: int) -> None:
        """The receiver itself saw more blocks complete (tcp)."""
        if request := session.requests.get(nonce):
            self._on_landed(request, 0)

    def on_bad_put(self, session: DecodeSession, nonce: int, why: str) -> None:
        if request := session.requests.get(nonce):
            self._fail(request, f"{session.peer} sent a bad put: {why}", 502, "transfer")

    def _on_first(self, request: DecodeRequest, message: FirstToken) -> None:
        request.first = message
        if message.finish is not None:
            # Nothing will decode it, so no KV comes; Released, or a fence, ends the reservation.
            self._finish(request, (message.token,), message.finish, cancel_peer=False)
            return
        self._send(
            Tokens(
                id=request.message.id,
                tokens=(message.token,),
                served=request.served(self._config.name, self._loop.time()),
            )
        )
        self._adopt(request)

    def _on_terminal(
        self, request: DecodeRequest, message: KvReady | PrefillFailed | Released
    ) -> None:
        peer = request.session.peer
        if isinstance(message, PrefillFailed):
            retry = 1.0 if message.status == 503 else None
            text = f"{peer}: {message.message}"
            self._fail(request, text, message.status, message.leg, retry)
        elif isinstance(message, Released) or request.first is None:
            self._fail(request, f"{peer} gave the request back unasked", 502, "prefill")
        elif message.nbytes != (expected := request.num_blocks * self._layout.block_bytes):
            text = f"{peer} moved {message.nbytes} of {expected} bytes of KV"
            self._fail(request, text, 502, "transfer")
        else:
            request.ready = message
            request.ready_at = self._loop.time()
            # What is put by shm is here; tcp answers with what it has really received.
            self._on_landed(request, request.num_blocks)

    # ---- swap in --------------------------------------------------------------------------------

    def _adopt(self, request: DecodeRequest) -> None:
        """Ask for device blocks as early as it is known that KV will come."""
        if request.submitted:
            return
        request.submitted = True
        message = request.message
        self._engine.submit(EngineRequest(message.id, message.prompt, message.params, "decode"))

    def _on_landed(self, request: DecodeRequest, reported: int) -> None:
        landed = request.session.receiver.landed(request.nonce, reported)
        if landed > request.num_blocks:
            self._fail(request, f"{request.session.peer} reported blocks that are not its", 502)
            return
        request.landed = max(request.landed, landed)
        if request.all_landed and not request.landed_at:
            request.landed_at = self._loop.time()
        if request.landed:
            self._adopt(request)
            self._swap_in(request)
            # The copies may have been done before KvReady came.
            self._maybe_resume(request)

    def _swap_in(self, request: DecodeRequest) -> None:
        """Copy what has landed and has a place to go; copies of one request follow each other."""
        reservation, device = request.reservation, request.device_blocks
        if device is None or request.queued == request.landed:
            return
        assert reservation is not None
        start, stop = request.queued, request.landed
        request.queued = stop
        cuts = split_blocks(start, stop, self._layout.block_bytes)
        source, pool = self._buffer.region, self._engine.pool

        def piece(at: int, end: int) -> None:
            runs = self._layout.block_runs(reservation.blocks[at:end], device[at:end])
            copy_region(pool, source, runs)

        copy = Copy(
            [partial(piece, at, end) for at, end in cuts],
            lambda done: self._on_copied(request, cuts[done - 1][1]),
            lambda error: self._on_copy_end(request, copy, error),
        )
        request.copies.add(copy)
        self._buffer.set_reading(reservation, True)
        self._lane.submit(copy)

    def _on_copied(self, request: DecodeRequest, blocks: int) -> None:
        assert request.reservation is not None
        request.copied = blocks
        self._buffer.copied(request.reservation, blocks)
        self._maybe_resume(request)

    def _on_copy_end(self, request: DecodeRequest, copy: Copy, error: TransferError | None) -> None:
        request.copies.discard(copy)
        if not request.copies:
            assert request.reservation is not None
            self._buffer.set_reading(request.reservation, False)
        if request.over:
            self._release_engine(request)
        elif error is not None:
            self._fail(request, f"swap in: {error}", 502, "decode")

    def _maybe_resume(self, request: DecodeRequest) -> None:
        if request.over or request.resumed:
            return
        if not request.all_landed or request.copied < request.num_blocks:
            return
        assert request.first is not None and request.ready is not None
        request.resumed_at = self._loop.time()
        self._engine.resume(request.message.id, request.first.token)
        request.session.receiver.revoke(request.nonce)
        del request.session.requests[request.nonce]
        self.counters["transfers"] += 1
        self.counters[f"kv_bytes_{request.session.path}"] += request.ready.nbytes
        stages = request.served(self._config.name, request.resumed_at).stages
        self.counters["transfer_seconds"] += stages["transfer"]
        self.counters["swap_in_seconds"] += stages["swap_in"]

    # ---- from the engine ------------------------------------------------------------------------

    def on_engine(self, event: EngineEvent) -> None:
        request = self._requests.get(event.id)
        if request is None:
            return
        if isinstance(event, Adopted):
            request.device_blocks = event.blocks
            self._swap_in(request)
        elif isinstance(event, Produced):
            if event.finish is None:
                self._send(Tokens(id=event.id, tokens=event.tokens))
            else:
                request.submitted = False
                self._finish(request, event.tokens, event.finish)
        elif isinstance(event, EngineFailed):
            request.submitted = False
            retry = 1.0 if event.status == 503 else None
            self._fail(request, event.message, event.status, "decode", retry)

    # ---- the ways out ---------------------------------------------------------------------------

    def _expire(self, request: DecodeRequest) -> None:
        seconds = request.message.deadline_s
        self._fail(request, f"not done within {seconds:g} s", 504, request.leg)

    def _fail(
        self,
        request: DecodeRequest,
        message: str,
        status: int,
        leg: Leg = "transfer",
        retry_after_s: float | None = None,
    ) -> None:
        if request.reservation is not None and leg != "decode" and not request.resumed:
            self.counters["transfer_failures"] += 1
        peer = request.session.peer
        instance = self._config.name if leg == "decode" else peer
        _log.warning("%s: failed (%d, %s): %s", request.message.id, status, leg, message)
        self._close(request, cancel_peer=True)
        self._refuse(request.message, message, status, leg, instance, retry_after_s)

    def _finish(
        self,
        request: DecodeRequest,
        tokens: tuple[OutputToken, ...],
        finish: FinishReason,
        *,
        cancel_peer: bool = True,
    ) -> None:
        served = request.served(self._config.name, self._loop.time())
        self._close(request, cancel_peer=cancel_peer)
        self._send(Tokens(id=request.message.id, tokens=tokens, finish=finish, served=served))

    def _close(self, request: DecodeRequest, *, cancel_peer: bool) -> None:
        """Give back all that the request holds; what a copy or the writer still uses goes when that
        ends.
        """
        request.over = True
        del self._requests[request.message.id]
        _cancel_timer(request.deadline_timer)
        _cancel_timer(request.reserve_timer)
        if request.waiter:
            self.reservations.leave(request.waiter)
        if reservation := request.reservation:
            session = request.session
            session.requests.pop(reservation.nonce, None)
            if cancel_peer and reservation.nonce in session.writer.open:
                self._tell(session, Cancel(reservation.nonce))
            self.reservations.abandon(session.writer, reservation)
        for copy in request.copies:
            copy.cancel()
        if request.copies:
            self._closing.add(request)
        else:
            self._release_engine(request)

    def _release_engine(self, request: DecodeRequest) -> None:
        """Only when no copy writes into its device blocks any more."""
        if request.copies:
            return
        self._closing.discard(request)
        if request.submitted:
            request.submitted = False
            self._engine.drop(request.message.id)

    def close(self) -> None:
        """The process ends: no timer fires and no event is sent after this."""
        for request in list(self._requests.values()):
            self._close(request, cancel_peer=False)
        self.reservations.close()

    # ---- what is held ---------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        engine = self._engine.stats()
        return Ledger(
            requests=len(self._requests) + len(self._closing),
            waiting=self.reservations.waiting + engine.waiting,
            running=engine.running,
            device_blocks=engine.device_blocks_held,
            buffer_blocks=self._buffer.used_blocks,
            reservations=self._buffer.reservations,
            quarantined_blocks=self._buffer.quarantined_blocks,
            copies=self._lane.pending,
        )

    def peers(self) -> dict[str, PeerState]:
        states = {
            name: PeerState(name=name, path=None, reason=reason)
            for name, reason in self._down.items()
        }
        for name, session in self._sessions.items():
            incarnation = session.welcome.incarnation
            states[name] = PeerState(name=name, path=session.path, incarnation=incarnation)
        return states


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()

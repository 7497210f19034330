"""Decode's half of the hand-over: one state machine per request, from its arrival to its last
token.

waiting (for buffer room) -> prefilling -> landing (blocks arrive and are swapped in) -> decoding.
Owns what each state holds and gives it back on every way out. Sockets belong to peer_client,
threads to kv.swap, the queue and the quarantine to reservations. Runs on the asyncio thread;
nothing here waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

from runtime.config import WorkerConfig
from runtime.engine.contract import (
    Adopted,
    EngineControl,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Freed,
    Produced,
    SwapOut,
)
from runtime.errors import CapacityError, Leg, LegError, RequestError, TransferError
from runtime.kv.buffer import CpuBuffer, Reservation
from runtime.kv.swap import SwapLanes
from runtime.link import LinkClosed
from runtime.protocol import (
    MOST_SECONDS,
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
from runtime.transfer.accounts import Accounts
from runtime.transfer.admission import Admission, refusal
from runtime.transfer.decode_request import DecodeRequest, DecodeSession, Landing
from runtime.transfer.peer_table import PeerTable
from runtime.transfer.pledges import Pledges
from runtime.transfer.reservations import Reservations, Waiter
from runtime.transfer.swap_in import SwapIn
from runtime.transfer.swap_out import SwapOuts
from runtime.transfer.trial import prove_pool

_log = logging.getLogger(__name__)


class DecodeHandoff:
    """`send` takes events for the front."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: EngineControl,
        buffer: CpuBuffer,
        lanes: SwapLanes,
        send: Callable[[Event], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._engine = engine
        self._layout = engine.layout
        self._send = send
        self.reservations = Reservations(buffer, self._loop)
        self._buffer = buffer
        self._swap = SwapIn(engine, buffer, lanes.swap_in, self._maybe_resume, self._on_copy_end)
        self.accounts = Accounts(config.name, engine.layout.block_size)
        self._swap_outs = SwapOuts(
            engine, self.reservations, lanes.swap_out, self.accounts, self._release_engine
        )
        self._requests: dict[RequestId, DecodeRequest] = {}
        self._in_engine: dict[RequestId, DecodeRequest] = {}
        """The same ones, by the id that the engine knows them by."""
        self._attempts = itertools.count(1)
        self._closing: set[DecodeRequest] = set()
        """Over for the front, with a copy that still runs or a writer that still may write."""
        self._pledges = Pledges(engine)
        self._admission = Admission(config, engine, buffer.num_blocks)
        self.peers = PeerTable((peer.name for peer in config.prefill_peers), send)

    # ---- from the front -------------------------------------------------------------------------

    def generate(self, message: Generate) -> None:
        if message.id in self._requests:
            _log.error("%s: this id is under way already; ignored", message.id)
            return
        try:
            session = self.peers.choose(message.prefill, self._load)
            blocks = self._admission.check(message, self.reservations.waiting)
        except (RequestError, CapacityError, LegError) as e:
            self._send_failed(refusal(message, e, self._config.name))
            return
        loop, now = self._loop, self._loop.time()
        engine_id = RequestId(f"{message.id}.{next(self._attempts)}")
        for_engine = EngineRequest(engine_id, message.prompt, message.params, "decode")
        deadline = now + message.deadline_s
        request = DecodeRequest(message, for_engine, session, blocks, now, deadline)
        self._requests[message.id] = self._in_engine[engine_id] = request
        request.deadline_timer = loop.call_at(request.deadline, self._expire, request)
        reserve_by = now + self._config.reserve_timeout_s
        request.reserve_timer = loop.call_at(reserve_by, self._no_room, request)
        request.waiter = Waiter(partial(self._needs, request), partial(self._granted, request))
        self.reservations.join(request.waiter)

    def abort(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            self.accounts.aborted()
            self._finish(request, (), "abort")

    def _load(self, session: DecodeSession) -> int:
        return sum(1 for r in self._requests.values() if r.session is session and not r.resumed)

    def _send_failed(self, failed: Failed) -> None:
        _log.warning(
            "%s: failed (%d, %s): %s", failed.id, failed.status, failed.leg, failed.message
        )
        self.accounts.failed()
        self._send(failed)

    # ---- reserve --------------------------------------------------------------------------------

    def _needs(self, request: DecodeRequest, free: int) -> int:
        direct = self.first_device_block(request.session) is not None
        return self._pledges.needs(request, self._requests.values(), free, direct=direct)

    def first_device_block(self, session: DecodeSession) -> int | None:
        """Its number in puts of this session; None: they do not reach the device pool."""
        if self._buffer.pool_blocks:
            return 0
        return self._buffer.num_blocks if session.receiver.reaches_pool else None

    def _granted(self, request: DecodeRequest, reservation: Reservation) -> None:
        now = self._loop.time()
        request.waiter = None
        request.landing = landing = Landing(reservation, request.missing_device_blocks)
        first = self.first_device_block(request.session)
        if landing.device is not None and first is not None:
            landing.direct = True
            blocks = tuple(first + block for block in landing.device)
            self._buffer.lend(reservation, blocks, partial(self._release_engine, request))
        request.granted = now
        self.accounts.reserved(request)
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
                have_blocks=request.have_blocks,
                deadline_s=min(max(request.deadline - now, 0.0), MOST_SECONDS),
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

    async def prove_pool(self, session: DecodeSession) -> None:
        """See that a path into another memory than the buffer's leads there. Raises TransferError,
        and LinkClosed when the session is lost.
        """
        first = self.first_device_block(session)
        if first:
            await prove_pool(session, self.reservations, self._engine, first)

    def session_down(self, session: DecodeSession, reason: str) -> None:
        """Fails, in this turn of the loop, everything that still needs the peer."""
        self.peers.lost(session)
        needing = [r for r in self._requests.values() if r.session is session and not r.all_landed]
        self._fail_all(needing, f"{session.peer} was lost: {reason}", "prefill")
        self.reservations.lose(session.writer)

    def on_peer(self, session: DecodeSession, message: PeerReply) -> None:
        if not isinstance(message, FirstToken | KvProgress | KvReady | PrefillFailed | Released):
            return
        request = session.requests.get(message.nonce)
        if isinstance(message, KvReady | PrefillFailed | Released):
            if not isinstance(message, PrefillFailed) or message.fenced:
                self.reservations.terminal(session.writer, message.nonce)
            if request:
                self._on_terminal(request, message)
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
        if why := request.flaw(message, self._engine.vocab_size):
            self._fail(request, f"{request.session.peer} sent {why}", 502, "prefill")
            return
        request.first = message
        if message.finish is not None:
            # Nothing will decode it, so no KV comes; Released, or a fence, ends the reservation.
            self._finish(request, (message.token,), message.finish, cancel_peer=False)
            return
        self._send(
            Tokens(
                id=request.message.id,
                tokens=(message.token,),
                served=self.accounts.served(request),
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
            self._fail(request, text, message.status, message.leg, retry, message.code)
        elif isinstance(message, Released) or request.first is None or request.ready:
            self._fail(request, f"{peer} gave the request back unasked", 502, "prefill")
        elif message.nbytes != (expected := request.missing_blocks * self._layout.block_bytes):
            text = f"{peer} moved {message.nbytes} of {expected} bytes of KV"
            self._fail(request, text, 502, "transfer")
        else:
            request.ready = message
            request.ready_at = self._loop.time()
            # What is put by shm is here; tcp answers with what it has really received.
            self._on_landed(request, request.missing_blocks)

    # ---- swap in --------------------------------------------------------------------------------

    def _adopt(self, request: DecodeRequest) -> None:
        """Ask for device blocks as early as it is known that KV will come."""
        if request.submitted:
            return
        request.submitted = True
        self._engine.submit(request.for_engine)

    def _on_landed(self, request: DecodeRequest, reported: int) -> None:
        landing = request.landing
        assert landing is not None
        landed = request.session.receiver.landed(request.nonce, reported)
        if landed > landing.blocks:
            self._fail(request, f"{request.session.peer} reported blocks that are not its", 502)
            return
        landing.landed = max(landing.landed, landed)
        if request.all_landed and not request.landed_at:
            request.landed_at = self._loop.time()
        if landing.landed:
            self._adopt(request)
            self._swap.advance(request)
        # The copies may have been done before KvReady came, or there were none to make.
        self._maybe_resume(request)

    def _on_copy_end(self, request: DecodeRequest, error: TransferError | None) -> None:
        if request.over:
            self._release_engine(request)
        elif error is not None:
            self._fail(request, f"swap in: {error}", 502, "decode")

    def _maybe_resume(self, request: DecodeRequest) -> None:
        if request.over or request.landing is None or not request.landing.done:
            return
        if request.away_since:
            self._swap_outs.back(request)
        if request.resumed or not request.all_landed:
            return
        assert request.first is not None
        request.resumed_at = self._loop.time()
        self._engine.resume(request.engine_id, request.first.token)
        request.session.receiver.revoke(request.nonce)
        del request.session.requests[request.nonce]
        self.accounts.resumed(request)
        self.reservations.pump()  # one less that only waits for its KV (pledges.py)

    # ---- from the engine ------------------------------------------------------------------------

    def on_engine(self, event: EngineEvent) -> None:
        if isinstance(event, Freed):
            self.reservations.pump()
            return
        request = self._in_engine.get(event.id)
        if request is None:
            return
        if isinstance(event, Adopted):
            self._swap.place(request, event)
        elif isinstance(event, SwapOut):
            self._swap_outs.start(request, event)
        elif isinstance(event, Produced):
            if event.finish is None:
                self._send(Tokens(id=request.message.id, tokens=event.tokens))
            else:
                request.submitted = False
                self._finish(request, event.tokens, event.finish)
        elif isinstance(event, EngineFailed):
            request.submitted = False
            retry = 1.0 if event.status == 503 else None
            self._fail(request, event.message, event.status, "decode", retry, event.code)

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
        code: str | None = None,
    ) -> None:
        self.accounts.hand_over_failed(request, leg)
        self._close(request, cancel_peer=True)
        self._send_failed(
            Failed(
                id=request.message.id,
                message=message,
                status=status,
                leg=leg,
                instance=self._config.name if leg == "decode" else request.session.peer,
                retry_after_s=retry_after_s,
                code=code,
            )
        )
        self.reservations.pump()

    def _fail_all(self, requests: list[DecodeRequest], message: str, leg: Leg) -> None:
        # None of them is served with what another one gives back.
        self.reservations.leave(*(r.waiter for r in requests if r.waiter))
        for request in requests:
            self._fail(request, message, 502, leg)

    def _finish(
        self,
        request: DecodeRequest,
        tokens: tuple[OutputToken, ...],
        finish: FinishReason,
        *,
        cancel_peer: bool = True,
    ) -> None:
        served = self.accounts.served(request)
        self._close(request, cancel_peer=cancel_peer)
        self._send(Tokens(id=request.message.id, tokens=tokens, finish=finish, served=served))
        self.reservations.pump()

    def _close(self, request: DecodeRequest, *, cancel_peer: bool) -> None:
        """Give back all it holds; what a copy or the writer still uses goes when that ends."""
        request.over = True
        del self._requests[request.message.id], self._in_engine[request.engine_id]
        _cancel_timer(request.deadline_timer)
        _cancel_timer(request.reserve_timer)
        if request.waiter:
            self.reservations.leave(request.waiter)
            request.waiter = None
        if landing := request.landing:
            session, reservation = request.session, landing.reservation
            session.requests.pop(reservation.nonce, None)
            if cancel_peer and reservation.nonce in session.writer.open:
                self._tell(session, Cancel(reservation.nonce))
            self.reservations.abandon(session.writer, reservation)
        self._swap.cancel(request)
        self._closing.add(request)
        self._release_engine(request)

    def _release_engine(self, request: DecodeRequest) -> None:
        """Only when neither a copy nor prefill writes into its device blocks any more."""
        if request.copies or (request.landing and request.landing.written):
            return
        self._closing.discard(request)
        if request.submitted:
            request.submitted = False
            self._engine.drop(request.engine_id)

    def stop(self) -> None:
        """The process will end: its requests fail for that, not for the loss of peers it leaves."""
        self._fail_all(list(self._requests.values()), f"{self._config.name} stops", "decode")

    def close(self) -> None:
        """The process ends: no timer fires and no event is sent after this."""
        for request in list(self._requests.values()):
            self._close(request, cancel_peer=False)
        self.reservations.close()

    # ---- what is held ---------------------------------------------------------------------------

    def peer_states(self) -> dict[str, PeerState]:
        return self.peers.states(self._load)

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
            copies=self._swap.pending + self._swap_outs.pending,
        )


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()

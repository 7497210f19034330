"""Decode's half of the hand-over: one state machine per request, from its arrival to its last
token.

waiting (for buffer room) -> prefilling -> landing (blocks arrive and are swapped in) -> decoding.
Owns the steps from one state to the next. The ways out belong to decode_table, sockets to
peer_client, threads to kv.swap, the queue and the quarantine to reservations. Runs on the asyncio
thread; nothing here waits.
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
from runtime.errors import CapacityError, LegError, RequestError, TransferError
from runtime.kv.buffer import CpuBuffer, Reservation
from runtime.kv.swap import SwapLanes
from runtime.protocol import (
    MOST_SECONDS,
    Event,
    FirstToken,
    Generate,
    KvProgress,
    KvReady,
    Ledger,
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
from runtime.transfer.decode_table import DecodeTable
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
        self._requests = DecodeTable(engine, self.reservations, self._swap, self.accounts, send)
        self._swap_outs = SwapOuts(
            engine, self.reservations, lanes.swap_out, self.accounts, self._requests.release_engine
        )
        self._attempts = itertools.count(1)
        self._pledges = Pledges(engine)
        self._admission = Admission(config, engine, buffer.num_blocks)
        self.peers = PeerTable((peer.name for peer in config.prefill_peers), send)

    # ---- from the front -------------------------------------------------------------------------

    def generate(self, message: Generate) -> None:
        if message.id in self._requests:
            _log.error("%s: this id is under way already; ignored", message.id)
            return
        try:
            session = self.peers.choose(message.prefill, self._requests.load)
            blocks = self._admission.check(message, self.reservations.waiting)
        except (RequestError, CapacityError, LegError) as e:
            self._requests.refuse(refusal(message, e, self._config.name))
            return
        loop, now = self._loop, self._loop.time()
        engine_id = RequestId(f"{message.id}.{next(self._attempts)}")
        for_engine = EngineRequest(engine_id, message.prompt, message.params, "decode")
        deadline = now + message.deadline_s
        request = DecodeRequest(message, for_engine, session, blocks, now, deadline)
        self._requests.add(request)
        request.deadline_timer = loop.call_at(request.deadline, self._expire, request)
        reserve_by = now + self._config.reserve_timeout_s
        request.reserve_timer = loop.call_at(reserve_by, self._no_room, request)
        request.waiter = Waiter(partial(self._needs, request), partial(self._granted, request))
        self.reservations.join(request.waiter)

    def abort(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            self.accounts.aborted()
            self._requests.finish(request, (), "abort")

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
            self._buffer.lend(reservation, blocks, partial(self._requests.release_engine, request))
        request.granted = now
        self.accounts.reserved(request)
        if request.reserve_timer:
            request.reserve_timer.cancel()
        session, message = request.session, request.message
        session.requests[reservation.nonce] = request
        self.reservations.open_for(session.writer, reservation)
        session.tell(
            Prefill(
                id=message.id,
                nonce=reservation.nonce,
                prompt=message.prompt,
                params=message.params,
                blocks=reservation.blocks,
                have_blocks=request.have_blocks,
                deadline_s=min(max(request.deadline - now, 0.0), MOST_SECONDS),
            )
        )

    def _no_room(self, request: DecodeRequest) -> None:
        waited = self._config.reserve_timeout_s
        self._requests.fail(
            request, f"no room in the CPU buffer for {waited:g} s", 503, "decode", 1.0
        )

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
        self._requests.fail_all(needing, f"{session.peer} was lost: {reason}", "prefill")
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
            self._requests.fail(request, f"{session.peer} sent a bad put: {why}", 502, "transfer")

    def _on_first(self, request: DecodeRequest, message: FirstToken) -> None:
        if why := request.flaw(message, self._engine.vocab_size):
            self._requests.fail(request, f"{request.session.peer} sent {why}", 502, "prefill")
            return
        request.first = message
        if message.finish is not None:
            # Nothing will decode it, so no KV comes; Released, or a fence, ends the reservation.
            self._requests.finish(request, (message.token,), message.finish, cancel_peer=False)
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
            self._requests.fail(request, text, message.status, message.leg, retry, message.code)
        elif isinstance(message, Released) or request.first is None or request.ready:
            self._requests.fail(request, f"{peer} gave the request back unasked", 502, "prefill")
        elif message.nbytes != (expected := request.missing_blocks * self._layout.block_bytes):
            text = f"{peer} moved {message.nbytes} of {expected} bytes of KV"
            self._requests.fail(request, text, 502, "transfer")
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
            self._requests.fail(
                request, f"{request.session.peer} reported blocks that are not its", 502
            )
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
            self._requests.release_engine(request)
        elif error is not None:
            self._requests.fail(request, f"swap in: {error}", 502, "decode")

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
        request = self._requests.of_engine(event.id)
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
                self._requests.finish(request, event.tokens, event.finish)
        elif isinstance(event, EngineFailed):
            request.submitted = False
            retry = 1.0 if event.status == 503 else None
            self._requests.fail(request, event.message, event.status, "decode", retry, event.code)

    # ---- the end --------------------------------------------------------------------------------

    def _expire(self, request: DecodeRequest) -> None:
        seconds = request.message.deadline_s
        self._requests.fail(request, f"not done within {seconds:g} s", 504, request.leg)

    def stop(self) -> None:
        """The process will end: its requests fail for that, not for the loss of peers it leaves."""
        self._requests.fail_all(
            list(self._requests.values()), f"{self._config.name} stops", "decode"
        )

    def close(self) -> None:
        """The process ends: no timer fires and no event is sent after this."""
        self._requests.close()
        self.reservations.close()

    # ---- what is held ---------------------------------------------------------------------------

    def peer_states(self) -> dict[str, PeerState]:
        return self.peers.states(self._requests.load)

    def ledger(self) -> Ledger:
        engine = self._engine.stats()
        return Ledger(
            requests=len(self._requests) + len(self._requests.closing),
            waiting=self.reservations.waiting + engine.waiting,
            running=engine.running,
            device_blocks=engine.device_blocks_held,
            buffer_blocks=self._buffer.used_blocks,
            reservations=self._buffer.reservations,
            quarantined_blocks=self._buffer.quarantined_blocks,
            copies=self._swap.pending + self._swap_outs.pending,
        )

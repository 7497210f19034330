"""Prefill's half of the hand-over: compute a prompt for a decode instance and put its KV into that
one's buffer.

Owns each request from `Prefill` to exactly one terminal message, which is only sent when no put for
it can run any more. Sockets and sessions' beginnings belong to peer_server. Runs on the asyncio
thread; nothing here waits except `end_session`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVarTuple

from runtime.engine.contract import (
    Computed,
    EngineControl,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    Produced,
)
from runtime.errors import TransferError
from runtime.kv.swap import Copy, split_blocks
from runtime.link import LinkClosed
from runtime.protocol import (
    Cancel,
    FirstToken,
    KvProgress,
    KvReady,
    Ledger,
    PathTest,
    PeerReply,
    PeerRequest,
    PeerState,
    Ping,
    Pong,
    Prefill,
    PrefillFailed,
    Released,
    RequestId,
)
from runtime.transfer.base import Sender
from runtime.transfer.path_test import PathTestPut, test_fits
from runtime.transfer.pool_put import pool_put
from runtime.transfer.prefill_request import Answer, Outgoing, PrefillSession
from runtime.transfer.tcp import STALL_S

_log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")


class ProtocolViolation(TransferError):
    """The peer sent what no peer of ours sends: its session ends."""


class PrefillHandoff:
    def __init__(self, engine: EngineControl) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._layout = engine.layout
        self._by_engine_id: dict[RequestId, Outgoing] = {}
        self._sessions: dict[int, PrefillSession] = {}
        self.counters: defaultdict[str, float] = defaultdict(float)

    # ---- sessions -------------------------------------------------------------------------------

    def open_session(self, session: PrefillSession) -> None:
        self._sessions[session.number] = session

    def session(self, number: int) -> PrefillSession | None:
        return self._sessions.get(number)

    def sessions_of(self, instance: str) -> list[PrefillSession]:
        return [s for s in self._sessions.values() if s.hello.instance == instance]

    async def end_session(self, session: PrefillSession) -> bool:
        """The fence: when this returns True, nothing of the session is written any more."""
        if not session.lost:
            session.lost = True
            if session.sender:
                session.sender.abort()
            for outgoing in list(session.outgoing.values()):
                self._stop(outgoing, None)
            session.lane.close()
        # A put of shared memory is at most one piece from its end, one over tcp was woken by the
        # abort.
        if not await session.lane.wait_closed(STALL_S):
            _log.error("session %d: a put does not end", session.number)
            return False
        self._sessions.pop(session.number, None)
        for outgoing in list(session.outgoing.values()):
            self._close_if_quiet(outgoing)  # a bug kept it when its last copy ended
        if session.sender:
            session.sender.close()
        for sock in session.joined:
            sock.close()
        return True

    # ---- from the peer --------------------------------------------------------------------------

    def on_peer(self, session: PrefillSession, message: PeerRequest) -> None:
        """Raises ProtocolViolation, after which the caller ends the session."""
        if session.lost:
            return
        if isinstance(message, Ping):
            self._tell(session, Pong(message.seq))
        elif isinstance(message, Prefill):
            self._use_nonce(session, message.nonce)
            self._prefill(session, message)
        elif isinstance(message, Cancel):
            # Unknown: its terminal message is on the way and answers this one.
            if outgoing := session.outgoing.get(message.nonce):
                self._stop(outgoing, Released(message.nonce))
        elif isinstance(message, PathTest):
            self._use_nonce(session, message.nonce)
            self._path_test(session, message)
        else:
            raise ProtocolViolation(f"{type(message).__name__} in the middle of a session")

    def _use_nonce(self, session: PrefillSession, nonce: int) -> None:
        if nonce <= session.last_nonce:
            raise ProtocolViolation(f"nonce {nonce} after {session.last_nonce}")
        session.last_nonce = nonce

    def _prefill(self, session: PrefillSession, message: Prefill) -> None:
        if why := self._refusal(session, message):
            _log.error("%s: refused: %s", message.id, why)
            failed = PrefillFailed(nonce=message.nonce, message=why, status=400, leg="prefill")
            self._tell(session, failed)
            return
        # Unique here also when two decode instances, or a retry, use the same request id.
        engine_id = RequestId(f"{message.id}@{session.number}.{message.nonce}")
        outgoing = Outgoing(message, session, engine_id)
        session.outgoing[message.nonce] = outgoing
        self._by_engine_id[engine_id] = outgoing
        outgoing.deadline = self._loop.call_later(message.deadline_s, self._expire, outgoing)
        self._engine.submit(EngineRequest(engine_id, message.prompt, message.params, "prefill"))

    def _refusal(self, session: PrefillSession, message: Prefill) -> str:
        if session.sender is None:
            return "the data connection is not open"
        blocks, have = message.blocks, message.have_blocks
        wanted = self._layout.blocks_for(len(message.prompt)) - have
        if have < 0 or len(blocks) != wanted:
            return f"{len(blocks)} blocks for a prompt that needs {wanted} more than {have}"
        room = self._blocks_of(session)
        if len(set(blocks)) != wanted or not all(0 <= block < room for block in blocks):
            return f"blocks that are not {wanted} different ones of the buffer's {room}"
        return ""

    def _blocks_of(self, session: PrefillSession) -> int:
        return self._layout.num_blocks_in(session.room)

    def _path_test(self, session: PrefillSession, message: PathTest) -> None:
        """Put bytes where the peer asked for them, on the lane that all KV takes."""
        nonce, sender = message.nonce, session.sender
        if sender is None or not test_fits(message, self._blocks_of(session)):
            why = "path test without a data connection, or not into blocks of the buffer"
            self._tell(session, PrefillFailed(nonce=nonce, message=why, status=400, leg="transfer"))
            return
        began = self._loop.time()

        test = PathTestPut(message, sender, self._engine)

        def end(error: TransferError | None) -> None:
            test.end()
            if error:
                self._tell_terminal(session, _failed_put(sender, nonce, error))
            elif not session.lost:
                nbytes = len(message.blocks) * self._layout.block_bytes
                seconds = self._loop.time() - began
                self._tell(session, KvReady(nonce=nonce, nbytes=nbytes, transfer_s=seconds))

        put = Copy(test.pieces, lambda _: None, lambda error: self._guarded(session, end, error))
        session.lane.submit(put)

    def _tell_terminal(self, session: PrefillSession, answer: Answer) -> None:
        self._tell(session, answer)
        if isinstance(answer, PrefillFailed) and not answer.fenced:
            # The receive loop sees the end, and ends the session.
            session.link.close()

    def _tell(self, session: PrefillSession, message: PeerReply) -> None:
        if session.lost:
            return
        try:
            session.link.send(message)
        except LinkClosed:
            # The session's receive loop sees the same and ends the session.
            _log.debug("session %d: link closed while sending", session.number)

    # ---- from the engine ------------------------------------------------------------------------

    def on_engine(self, event: EngineEvent) -> None:
        if outgoing := self._by_engine_id.get(event.id):
            self._guarded(outgoing.session, self._on_event, outgoing, event)

    def _guarded(
        self, session: PrefillSession, call: Callable[[*Args], None], *args: *Args
    ) -> None:
        """Boundary of one session: a bug in what another thread tells ends it, so that its requests
        fail now, and not by their deadlines.
        """
        try:
            call(*args)
        except Exception:
            _log.exception("session %d failed", session.number)
            session.link.close()

    def _on_event(self, outgoing: Outgoing, event: EngineEvent) -> None:
        if isinstance(event, EngineFailed):
            outgoing.in_engine = False
            self._fail(outgoing, event.message, event.status, event.code)
        elif outgoing.stopped:
            return
        elif isinstance(event, Produced):
            self._on_first(outgoing, event)
        elif isinstance(event, Computed):
            self._on_computed(outgoing, event)

    def _on_first(self, outgoing: Outgoing, event: Produced) -> None:
        outgoing.computed_at = self._loop.time()
        nonce = outgoing.message.nonce
        self._tell(
            outgoing.session,
            FirstToken(
                nonce=nonce,
                token=event.tokens[0],
                finish=event.finish,
                cached_tokens=event.cached_tokens,
                queue_s=event.queue_s,
                prefill_s=event.prefill_s,
            ),
        )
        if event.finish is not None:
            self._stop(outgoing, Released(nonce))

    def _on_computed(self, outgoing: Outgoing, event: Computed) -> None:
        """Put what is final and not there yet: full blocks while the prompt is under way, the last
        partial one at its end; of a step under way the layers that are done. Blocks are counted
        from the first that decode asks for.
        """
        message = outgoing.message
        step_over = event.layers == self._layout.num_layers
        stop = event.num_tokens // self._layout.block_size - message.have_blocks
        if event.num_tokens >= len(message.prompt):
            stop = len(message.blocks)
            if not stop and step_over:
                self._on_all_put(outgoing)
        start, layers = outgoing.queued, range(outgoing.queued_layers, event.layers)
        # A step that failed and is tried again tells the same layers again.
        if stop > start and layers:
            outgoing.queued = stop if step_over else start
            outgoing.queued_layers = 0 if step_over else event.layers
            self._queue_puts(outgoing, event.blocks, range(start, stop), layers, step_over)

    def _queue_puts(
        self,
        outgoing: Outgoing,
        held: Sequence[int],
        blocks: range,
        layers: range,
        step_over: bool,
    ) -> None:
        """Copy these layers of these blocks, a few MiB at a time. `held`: all blocks of the prompt
        in the pool. Only with the last layer a block is `whole`, so when the step is over.
        """
        message, session = outgoing.message, outgoing.session
        have = message.have_blocks
        cuts = split_blocks(blocks.start, blocks.stop, len(layers) * self._layout.layer_stride)
        sender, copies = session.sender, self._engine.copies
        assert sender is not None

        def piece(at: int, end: int) -> None:
            source = held[have + at : have + end]
            runs = self._engine.pool_map.gather(source, message.blocks[at:end], layers)
            whole = end if step_over else blocks.start
            outgoing.nbytes += pool_put(sender, copies, message.nonce, runs, whole)

        def on_piece(done: int) -> None:
            if step_over:
                self._guarded(session, self._on_put, outgoing, cuts[done - 1][1])

        def on_end(error: TransferError | None) -> None:
            outgoing.copies.discard(copy)
            self._guarded(session, self._on_put_end, outgoing, error)

        copy = Copy([partial(piece, at, end) for at, end in cuts], on_piece, on_end)
        outgoing.copies.add(copy)
        session.lane.submit(copy)

    # ---- from the lane --------------------------------------------------------------------------

    def _on_put(self, outgoing: Outgoing, blocks: int) -> None:
        outgoing.put = blocks
        session, message = outgoing.session, outgoing.message
        assert session.sender is not None
        # The last blocks are told by KvReady.
        if session.sender.put_lands and not outgoing.stopped and blocks < len(message.blocks):
            self._tell(session, KvProgress(message.nonce, blocks))

    def _on_put_end(self, outgoing: Outgoing, error: TransferError | None) -> None:
        message, sender = outgoing.message, outgoing.session.sender
        assert sender is not None
        if outgoing.stopped:
            if error is not None and not sender.put_fences:
                # Whatever it was to be told, that would free blocks which this put may still reach.
                outgoing.answer = _failed_put(sender, message.nonce, error)
            self._close_if_quiet(outgoing)
        elif error is not None:
            self._stop(outgoing, _failed_put(sender, message.nonce, error))
        elif outgoing.put == len(message.blocks):
            self._on_all_put(outgoing)

    def _on_all_put(self, outgoing: Outgoing) -> None:
        nbytes, seconds = outgoing.nbytes, self._loop.time() - outgoing.computed_at
        assert outgoing.session.sender is not None
        self.counters["transfers"] += 1
        self.counters["transfer_seconds"] += seconds
        self.counters[f"kv_bytes_{outgoing.session.sender.path}"] += nbytes
        nonce = outgoing.message.nonce
        self._stop(outgoing, KvReady(nonce=nonce, nbytes=nbytes, transfer_s=seconds))

    # ---- the ways out ---------------------------------------------------------------------------

    def _expire(self, outgoing: Outgoing) -> None:
        text = f"not done within {outgoing.message.deadline_s:g} s"
        self._fail(outgoing, text, 504)

    def _fail(self, outgoing: Outgoing, text: str, status: int, code: str | None = None) -> None:
        leg: Literal["prefill", "transfer"] = "transfer" if outgoing.computed_at else "prefill"
        _log.warning("%s: failed (%d, %s): %s", outgoing.engine_id, status, leg, text)
        failed = PrefillFailed(
            nonce=outgoing.message.nonce, message=text, status=status, leg=leg, code=code
        )
        self._stop(outgoing, failed)

    def _stop(self, outgoing: Outgoing, answer: Answer | None) -> None:
        """End the request with this answer (None: the session is gone), once no put runs. First
        call wins.
        """
        if outgoing.stopped:
            return
        outgoing.stopped = True
        outgoing.answer = answer
        if isinstance(answer, PrefillFailed):
            self.counters["transfer_failures"] += 1
        if outgoing.deadline:
            outgoing.deadline.cancel()
        for copy in outgoing.copies:
            copy.cancel()
        self._close_if_quiet(outgoing)

    def _close_if_quiet(self, outgoing: Outgoing) -> None:
        if outgoing.copies:
            return
        session = outgoing.session
        session.outgoing.pop(outgoing.message.nonce, None)
        self._by_engine_id.pop(outgoing.engine_id, None)
        if outgoing.answer is not None:
            self._tell_terminal(session, outgoing.answer)
        if outgoing.in_engine:
            outgoing.in_engine = False
            self._engine.drop(outgoing.engine_id)

    # ---- what is held ---------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        engine = self._engine.stats()
        return Ledger(
            requests=len(self._by_engine_id),
            waiting=engine.waiting,
            running=engine.running,
            device_blocks=engine.device_blocks_held,
            outgoing=len(self._by_engine_id),
            copies=sum(session.lane.pending for session in self._sessions.values()),
        )

    def peers(self) -> dict[str, PeerState]:
        return {
            s.hello.instance: PeerState(
                name=s.hello.instance,
                path=s.sender.path if s.sender else None,
                incarnation=s.hello.incarnation,
            )
            for s in self._sessions.values()
            if not s.lost
        }


def _failed_put(sender: Sender, nonce: int, error: TransferError) -> PrefillFailed:
    return PrefillFailed(
        nonce=nonce, message=str(error), status=502, leg="transfer", fenced=sender.put_fences
    )

"""The requests of a decode instance, and the ways out: what each one holds is given back on all of
them, and the front hears its last word.

Owns which requests there are. What moves them forward is handoff_decode's. For the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

from runtime.engine.contract import EngineControl
from runtime.errors import Leg
from runtime.protocol import (
    Cancel,
    Event,
    Failed,
    FinishReason,
    OutputToken,
    RequestId,
    Tokens,
)
from runtime.transfer.accounts import Accounts
from runtime.transfer.decode_request import DecodeRequest, DecodeSession
from runtime.transfer.reservations import Reservations
from runtime.transfer.swap_in import SwapIn

_log = logging.getLogger(__name__)


class DecodeTable(Mapping[RequestId, DecodeRequest]):
    """Those under way, by the front's id. `send` takes events for the front."""

    def __init__(
        self,
        engine: EngineControl,
        reservations: Reservations,
        swap: SwapIn,
        accounts: Accounts,
        send: Callable[[Event], None],
    ) -> None:
        self._engine = engine
        self._reservations = reservations
        self._swap = swap
        self._accounts = accounts
        self._send = send
        self._by_id: dict[RequestId, DecodeRequest] = {}
        self._by_engine_id: dict[RequestId, DecodeRequest] = {}
        self.closing: set[DecodeRequest] = set()
        """Over for the front, with a copy that still runs or a writer that still may write."""

    def __getitem__(self, request_id: RequestId) -> DecodeRequest:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: DecodeRequest) -> None:
        self._by_id[request.message.id] = self._by_engine_id[request.engine_id] = request

    def of_engine(self, engine_id: RequestId) -> DecodeRequest | None:
        """By the id that the engine knows it by."""
        return self._by_engine_id.get(engine_id)

    def load(self, session: DecodeSession) -> int:
        """How many still need its peer."""
        return sum(1 for r in self._by_id.values() if r.session is session and not r.resumed)

    # ---- the ways out ---------------------------------------------------------------------------

    def finish(
        self,
        request: DecodeRequest,
        tokens: tuple[OutputToken, ...],
        finish: FinishReason,
        *,
        cancel_peer: bool = True,
    ) -> None:
        served = self._accounts.served(request)
        self._close(request, cancel_peer=cancel_peer)
        self._send(Tokens(id=request.message.id, tokens=tokens, finish=finish, served=served))
        self._reservations.pump()

    def fail(
        self,
        request: DecodeRequest,
        message: str,
        status: int,
        leg: Leg = "transfer",
        retry_after_s: float | None = None,
        code: str | None = None,
    ) -> None:
        self._accounts.hand_over_failed(request, leg)
        self._close(request, cancel_peer=True)
        self.refuse(
            Failed(
                id=request.message.id,
                message=message,
                status=status,
                leg=leg,
                instance=self._accounts.instance if leg == "decode" else request.session.peer,
                retry_after_s=retry_after_s,
                code=code,
            )
        )
        self._reservations.pump()

    def fail_all(self, requests: list[DecodeRequest], message: str, leg: Leg) -> None:
        # None of them is served with what another one gives back.
        self._reservations.leave(*(r.waiter for r in requests if r.waiter))
        for request in requests:
            self.fail(request, message, 502, leg)

    def refuse(self, failed: Failed) -> None:
        """The last word on one that holds nothing."""
        _log.warning(
            "%s: failed (%d, %s): %s", failed.id, failed.status, failed.leg, failed.message
        )
        self._accounts.failed()
        self._send(failed)

    def close(self) -> None:
        """The process ends: no timer fires and no event is sent after this."""
        for request in list(self._by_id.values()):
            self._close(request, cancel_peer=False)

    def _close(self, request: DecodeRequest, *, cancel_peer: bool) -> None:
        """Give back all it holds; what a copy or the writer still uses goes when that ends."""
        request.over = True
        del self._by_id[request.message.id], self._by_engine_id[request.engine_id]
        _cancel_timer(request.deadline_timer)
        _cancel_timer(request.reserve_timer)
        if request.waiter:
            self._reservations.leave(request.waiter)
            request.waiter = None
        if landing := request.landing:
            session, reservation = request.session, landing.reservation
            session.requests.pop(reservation.nonce, None)
            if cancel_peer and reservation.nonce in session.writer.open:
                session.tell(Cancel(reservation.nonce))
            self._reservations.abandon(session.writer, reservation)
        self._swap.cancel(request)
        self.closing.add(request)
        self.release_engine(request)

    def release_engine(self, request: DecodeRequest) -> None:
        """Of one that is over: only when neither a copy nor prefill writes into its device blocks
        any more.
        """
        if request.copies or (request.landing and request.landing.written):
            return
        self.closing.discard(request)
        if request.submitted:
            request.submitted = False
            self._engine.drop(request.engine_id)


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()

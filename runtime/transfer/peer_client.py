"""Decode's side of the sessions with one prefill peer: dial, prove, test the path, watch, dial
again.

Owns the connections and their deadlines, and tells DecodeHandoff when a session is welcomed, up and
lost. A session counts as up only after real bytes of a path test were found in the buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import msgspec

from runtime.config import Address, PeerConfig
from runtime.errors import RuntimeFailure, TransferError
from runtime.kv.swap import Post
from runtime.link import Link, LinkClosed, authenticate_client
from runtime.protocol import (
    Hello,
    PeerReply,
    Ping,
    Refused,
    Welcome,
)
from runtime.transfer.base import ReceiverEvents
from runtime.transfer.decode_request import DecodeSession
from runtime.transfer.handoff_decode import DecodeHandoff
from runtime.transfer.paths import CONNECT_S, ReceiverPaths
from runtime.transfer.rdma import RdmaOffer
from runtime.transfer.reservations import Writer
from runtime.transfer.tcp import STALL_S
from runtime.transfer.trial import fail_answers, prove_path, took_answer

_log = logging.getLogger(__name__)

# Prefill may first have to fence an older session and to map a buffer of many gigabytes.
WELCOME_S = 30.0
PATH_TEST_S = 15.0
PING_S = 0.5
SILENCE_S = 5.0
TERMINAL_S = 20.0
"""A writer that does not give back blocks within this long, though told to, is cut off."""
DISTRUST_S = 60.0
"""For how long a path that failed to open, or its path test, is not tried again: with `auto`, or to
the device pool."""
_RDMA_POOL = "rdma to the device pool"
"""Stands for it among the paths."""
_BACKOFF_S = (0.1, 0.2, 0.4, 0.8, 1.0)


@dataclass(slots=True, eq=False)
class _Session(DecodeSession):
    """With what only this file needs."""

    writer_stream: asyncio.StreamWriter = field(kw_only=True)
    heard: float = field(kw_only=True)
    awaited: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By nonce of what was put and is not all here: how many blocks are, and since when."""
    why_lost: str = ""
    was_up: bool = False

    def abort(self, why: str) -> None:
        """End the session: its receive loop sees a closed connection at once, whatever is still
        unsent.
        """
        self.why_lost = self.why_lost or why
        self.writer_stream.transport.abort()

    def failed(self, error: Exception) -> None:
        """Boundary of one session: a bug ends it, and what needs it, but nothing else."""
        _log.error("%s: the session failed", self.peer, exc_info=error)
        self.abort(f"{type(error).__name__}: {error}")

    def stalled(self, now: float) -> bool:
        """Whether KV that was put has stopped coming, though the peer answers; asked now and then.

        A data connection may die alone, and with something between the two that acknowledges for
        the other, no kernel sees it.
        """
        before, self.awaited = self.awaited, {}
        for nonce, request in self.requests.items():
            if request.ready and request.landing and not request.all_landed:
                landed = request.landing.landed
                count, since = before.get(nonce, (landed, now))
                self.awaited[nonce] = (landed, since if landed == count else now)
        return any(now - since > STALL_S for _, since in self.awaited.values())


@dataclass(frozen=True, slots=True)
class LocalDecode:
    """What this decode instance is, and over which paths it can receive."""

    hello: Hello
    token: bytes
    paths: ReceiverPaths


class PeerClient:
    def __init__(
        self, peer: PeerConfig, local: LocalDecode, handoff: DecodeHandoff, post: Post
    ) -> None:
        self._peer = peer
        self._hello = local.hello
        self._token = local.token
        self._paths = local.paths
        self._handoff = handoff
        self._buffer = handoff.reservations.buffer
        self._post = post
        self._distrusted: dict[str, tuple[float, str]] = {}
        """Not to be opened, or its test failed: until when it is not offered, and why."""
        self._loop = asyncio.get_running_loop()
        self.wanted = True
        """Somebody names this peer. When nobody does, the session still ends by itself."""
        self.why_left = "this instance stops"
        """Of a session that ends because `run` is cancelled."""

    @property
    def address(self) -> Address:
        return self._peer.address

    async def run(self) -> None:
        """Keep a session with the peer, for as long as it is wanted."""
        attempt = 0
        while self.wanted:
            reason = "not connected"
            try:
                async with contextlib.AsyncExitStack() as stack:
                    session = await self._open(stack)
                    if await self._serve(session):
                        attempt = 0
                    reason = session.why_lost
            except TimeoutError:
                reason = f"{self._peer.address}: no answer in time"
            except (RuntimeFailure, OSError) as e:
                reason = f"{self._peer.address}: {e}"
            except Exception as e:
                # Boundary of one session: a bug ends it, and what it held, but not the dialling.
                _log.exception("%s: the session failed", self._peer.name)
                reason = f"{self._peer.address}: {type(e).__name__}: {e}"
            self._handoff.peers.down(self._peer.name, reason)
            if not self.wanted:
                return
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    # ---- opening --------------------------------------------------------------------------------

    async def _open(self, stack: contextlib.AsyncExitStack) -> _Session:
        async with asyncio.timeout(CONNECT_S):
            link, stream = await self.dial(stack)
        hello, offer = self._offer(stack)
        link.send(hello)
        async with asyncio.timeout(WELCOME_S):
            welcome = await link.receive()
        if isinstance(welcome, Refused):
            raise TransferError(f"refused ({welcome.field}): {welcome.message}")
        if not isinstance(welcome, Welcome):
            raise LinkClosed(f"{type(welcome).__name__} instead of Welcome")
        if welcome.instance != self._peer.name:
            raise TransferError(f"this is {welcome.instance}, not {self._peer.name}")
        if welcome.streams > hello.streams or hello.transfer not in ("auto", welcome.path):
            asked = f"{hello.transfer} and at most {hello.streams} streams"
            raise TransferError(f"welcomed to {welcome.streams} by {welcome.path} for {asked}")
        opened: list[_Session] = []
        if offer and welcome.path != offer.path:
            offer.close()
        try:
            receiver = await self._paths.open(welcome, offer, self.dial, self._events(opened))
        except TransferError as e:
            self._put_aside(welcome.path, str(e))
            raise
        writer = Writer(self._peer.name, welcome.incarnation, receiver)
        session = _Session(
            self._peer.name,
            welcome,
            link,
            writer,
            no_pool=offer.no_pool if offer and welcome.path == offer.path else "",
            writer_stream=stream,
            heard=self._loop.time(),
        )
        opened.append(session)
        self._handoff.session_opened(session)
        return session

    async def dial(
        self, stack: contextlib.AsyncExitStack
    ) -> tuple[Link[PeerReply], asyncio.StreamWriter]:
        """One more connection, which has proven the token; closed with the stack."""
        address: Address = self._peer.address
        reader, stream = await asyncio.open_connection(address.host, address.port)
        stack.callback(stream.transport.abort)
        await authenticate_client(reader, stream, self._token)
        return Link(reader, stream, PeerReply), stream

    def _offer(self, stack: contextlib.AsyncExitStack) -> tuple[Hello, RdmaOffer | None]:
        """Hello, with what a peer needs for the paths that may be used."""
        hello = self._hello
        if hello.gpu and (why := self._distrust("cuda_ipc")):
            hello = msgspec.structs.replace(hello, gpu=None, no_gpu=why)
        if hello.transfer not in ("auto", "rdma"):
            return hello, None
        try:
            if why := self._distrust("rdma"):
                raise TransferError(why)
            offer = self._paths.offer_rdma(self._distrust(_RDMA_POOL))
        except TransferError as e:
            return msgspec.structs.replace(hello, no_rdma=str(e)), None
        stack.callback(offer.close)
        return msgspec.structs.replace(hello, rdma=offer.end), offer

    def _distrust(self, path: str) -> str:
        """Why it is not to be tried now."""
        until, why = self._distrusted.get(path, (0.0, ""))
        return why if self._loop.time() < until else ""

    def _events(self, opened: list[_Session]) -> ReceiverEvents:
        # `opened` is filled before the first message that could lead to an event is sent.
        def guarded(call: Callable[..., None], *args: object) -> None:
            try:
                call(opened[0], *args)
            except Exception as e:
                opened[0].failed(e)

        return ReceiverEvents(
            self._post,
            on_landed=lambda nonce: guarded(self._handoff.on_received, nonce),
            on_refused=lambda nonce, why: guarded(self._handoff.on_bad_put, nonce, why),
            on_closed=lambda why: guarded(self._path_lost, why),
        )

    def _path_lost(self, session: _Session, why: str) -> None:
        # First to the path test, if one is under way: it failed.
        fail_answers(session, TransferError(why))
        session.abort(why)

    # ---- an open session ------------------------------------------------------------------------

    async def _serve(self, session: _Session) -> bool:
        """Until the session is lost. Returns whether it was ever up."""
        helpers = [
            asyncio.create_task(self._beside(session, self._watch)),
            asyncio.create_task(self._beside(session, self._prove)),
        ]
        try:
            while True:
                message = await session.link.receive()
                session.heard = self._loop.time()
                if not took_answer(session, message):
                    self._handoff.on_peer(session, message)
        except LinkClosed as e:
            session.why_lost = session.why_lost or str(e)
        except Exception as e:
            session.failed(e)
        finally:
            # Before anything is awaited: requests fail in the turn in which the loss was seen.
            session.why_lost = session.why_lost or self.why_left
            self._handoff.session_down(session, session.why_lost)
            fail_answers(session, LinkClosed(f"{session.peer} was lost: {session.why_lost}"))
            await asyncio.sleep(0)  # an answer that came just before is still looked at
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return session.was_up

    async def _beside(
        self, session: _Session, work: Callable[[_Session], Coroutine[None, None, None]]
    ) -> None:
        try:
            await work(session)
        except Exception as e:
            session.failed(e)

    async def _watch(self, session: _Session) -> None:
        seq = 0
        while True:
            await asyncio.sleep(PING_S)
            now = self._loop.time()
            if now - session.heard > SILENCE_S:
                session.abort(f"silent for {SILENCE_S:g} s")
                return
            if session.writer.overdue(now - TERMINAL_S):
                session.abort(f"blocks that nobody wants not given back for {TERMINAL_S:g} s")
                return
            if session.stalled(now):
                session.abort(f"nothing of the KV that it has put came for {STALL_S:g} s")
                return
            seq += 1
            with contextlib.suppress(LinkClosed):  # the receive loop sees it too
                session.link.send(Ping(seq))

    # ---- the path test --------------------------------------------------------------------------

    async def _prove(self, session: _Session) -> None:
        what = session.path
        try:
            async with asyncio.timeout(PATH_TEST_S):
                await prove_path(session, self._handoff.reservations)
                if session.path == "rdma":
                    what = _RDMA_POOL
                await self._handoff.prove_pool(session)
        except TimeoutError:
            self._test_failed(session, what, f"no answer within {PATH_TEST_S:g} s")
        except TransferError as e:
            self._test_failed(session, what, str(e))
        except LinkClosed as e:
            # A failed write may end the session before anybody says so.
            if what == _RDMA_POOL:
                self._test_failed(session, what, str(e))
            else:
                session.abort(f"path test over {what}: {e}")
        else:
            if session.writer.lost:
                return  # in the turn in which the answer came
            reason = session.reason
            _log.info("%s is up over %s%s", session.peer, session.path, reason and f" ({reason})")
            session.was_up = True
            self._handoff.peers.up(session)

    def _test_failed(self, session: _Session, what: str, why: str) -> None:
        self._put_aside(what, f"its path test failed: {why}")
        session.abort(f"path test over {what}: {why}")

    def _put_aside(self, what: str, why: str) -> None:
        """Do not offer this path for a while, where another will do."""
        # With `auto` both have a device, but there is no way between them. Without the pool, rdma
        # is as good as it is asked for.
        auto = what in ("cuda_ipc", "rdma") and self._hello.transfer == "auto"
        if auto or what == _RDMA_POOL:
            self._distrusted[what] = (self._loop.time() + DISTRUST_S, why)

"""Decode's side of the sessions with one prefill peer: dial, prove, test the path, watch, dial
again.

Owns the connections and their deadlines, and tells DecodeHandoff when a session is welcomed, up and
lost. A session counts as up only after real bytes of a path test were found in the buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

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
from runtime.transfer.base import Receiver, ReceiverEvents
from runtime.transfer.decode_request import DecodeSession
from runtime.transfer.handoff_decode import DecodeHandoff
from runtime.transfer.paths import ReceiverPaths
from runtime.transfer.reservations import Writer
from runtime.transfer.trial import fail_answers, prove_path, took_answer

_log = logging.getLogger(__name__)

CONNECT_S = 5.0
# Prefill may first have to fence an older session and to map a buffer of many gigabytes.
WELCOME_S = 30.0
PATH_TEST_S = 15.0
PING_S = 0.5
SILENCE_S = 5.0
_BACKOFF_S = (0.1, 0.2, 0.4, 0.8, 1.0)


@dataclass(slots=True, eq=False)
class _Session(DecodeSession):
    """With what only this file needs."""

    writer_stream: asyncio.StreamWriter = field(kw_only=True)
    heard: float = field(kw_only=True)
    why_lost: str = ""
    was_up: bool = False

    def abort(self, why: str) -> None:
        """End the session: its receive loop sees a closed connection at once, whatever is still
        unsent.
        """
        self.why_lost = self.why_lost or why
        self.writer_stream.transport.abort()


class PeerClient:
    def __init__(
        self, peer: PeerConfig, hello: Hello, token: bytes, handoff: DecodeHandoff, post: Post
    ) -> None:
        self._peer = peer
        self._hello = hello
        self._token = token
        self._handoff = handoff
        self._buffer = handoff.reservations.buffer
        self._paths = ReceiverPaths(self._buffer)
        self._post = post
        self._loop = asyncio.get_running_loop()
        self.wanted = True
        """Somebody names this peer. When nobody does, the session still ends by itself."""

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
        link.send(self._hello)
        async with asyncio.timeout(WELCOME_S):
            welcome = await link.receive()
        if isinstance(welcome, Refused):
            raise TransferError(f"refused ({welcome.field}): {welcome.message}")
        if not isinstance(welcome, Welcome):
            raise LinkClosed(f"{type(welcome).__name__} instead of Welcome")
        if welcome.instance != self._peer.name:
            raise TransferError(f"this is {welcome.instance}, not {self._peer.name}")
        opened: list[_Session] = []
        receiver = await self._receiver(welcome, opened)
        writer = Writer(self._peer.name, welcome.incarnation, receiver)
        session = _Session(
            self._peer.name, welcome, link, writer, writer_stream=stream, heard=self._loop.time()
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

    async def _receiver(self, welcome: Welcome, opened: list[_Session]) -> Receiver:
        # `opened` is filled before the first message that could lead to an event is sent.
        events = ReceiverEvents(
            self._post,
            on_landed=lambda nonce: self._handoff.on_received(opened[0], nonce),
            on_refused=lambda nonce, why: self._handoff.on_bad_put(opened[0], nonce, why),
            on_closed=lambda why: opened[0].abort(why),
        )
        async with asyncio.timeout(CONNECT_S):
            return await self._paths.open(welcome, self.dial, events)

    # ---- an open session ------------------------------------------------------------------------

    async def _serve(self, session: _Session) -> bool:
        """Until the session is lost. Returns whether it was ever up."""
        helpers = [
            asyncio.create_task(self._watch(session)),
            asyncio.create_task(self._prove(session)),
        ]
        try:
            while True:
                message = await session.link.receive()
                session.heard = self._loop.time()
                if not took_answer(session, message):
                    self._handoff.on_peer(session, message)
        except LinkClosed as e:
            session.why_lost = session.why_lost or str(e)
        finally:
            # Before anything is awaited: requests fail in the turn in which the loss was seen.
            session.why_lost = session.why_lost or "this instance stops"
            self._handoff.session_down(session, session.why_lost)
            fail_answers(session, session.why_lost)
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return session.was_up

    async def _watch(self, session: _Session) -> None:
        seq = 0
        while True:
            await asyncio.sleep(PING_S)
            if self._loop.time() - session.heard > SILENCE_S:
                session.abort(f"silent for {SILENCE_S:g} s")
                return
            seq += 1
            with contextlib.suppress(LinkClosed):  # the receive loop sees it too
                session.link.send(Ping(seq))

    # ---- the path test --------------------------------------------------------------------------

    async def _prove(self, session: _Session) -> None:
        try:
            async with asyncio.timeout(PATH_TEST_S):
                await prove_path(session, self._handoff.reservations)
        except TimeoutError:
            session.abort(f"the path test got no answer within {PATH_TEST_S:g} s")
        except (TransferError, LinkClosed) as e:
            session.abort(f"path test over {session.path}: {e}")
        else:
            reason = session.welcome.path_reason
            _log.info("%s is up over %s%s", session.peer, session.path, reason and f" ({reason})")
            session.was_up = True
            self._handoff.peers.up(session)

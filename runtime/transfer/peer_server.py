"""Prefill's listener: decode instances connect here for control and, over tcp, with a data
connection.

Owns authentication, the checks of Hello and each session's receive loop. The choice of the path is
paths.py's; what a request does belongs to handoff_prefill.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from weakref import WeakValueDictionary

from runtime.config import Address
from runtime.errors import ConfigError, RuntimeFailure, TransferError
from runtime.kv.swap import CopyLane, Post
from runtime.link import Link, LinkClosed, authenticate_server
from runtime.protocol import (
    PROTOCOL_VERSION,
    Hello,
    HelloData,
    HelloPlain,
    PeerRequest,
    Pong,
    Refused,
    Welcome,
)
from runtime.transfer.handoff_prefill import PrefillHandoff
from runtime.transfer.identity import own_identity
from runtime.transfer.paths import OpenedPath, SenderPaths
from runtime.transfer.plain_stream import MOST_BYTES, send_plain
from runtime.transfer.prefill_request import PrefillSession
from runtime.transfer.tcp import STALL_S, TcpSender, detach, own_streams

_log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
SILENCE_S = 10.0
"""Decode pings twice a second: one that is silent for this long is gone, or cut off."""


@dataclass(frozen=True, slots=True)
class Local:
    """What this prefill instance is."""

    deployment: str
    instance: str
    incarnation: str
    fingerprint: dict[str, str | int]
    block_bytes: int
    token: bytes


class _RefusedHello(RuntimeFailure):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PeerServer:
    def __init__(
        self, local: Local, paths: SenderPaths, handoff: PrefillHandoff, post: Post
    ) -> None:
        self._local = local
        self._paths = paths
        self._identity = own_identity()
        self._handoff = handoff
        self._post = post
        self._server: asyncio.Server | None = None
        self._next_session = 0
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By instance; each for as long as somebody opens or waits."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Of each connection."""
        self._endings: set[asyncio.Task[None]] = set()
        """Of sessions whose connection is gone."""
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def start(self, address: Address) -> int:
        """Listen on this address only; returns the port. Raises ConfigError when that cannot be."""
        try:
            self._server = await asyncio.start_server(
                self._connected, address.host, address.port, family=_family(address.host)
            )
        except OSError as e:
            raise ConfigError(
                f"peer {address}: cannot listen: {e.strerror or e}",
                hint="choose another peer port, or stop what holds this one",
            ) from e
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening and end every session; returns when nothing is written any more, or a put
        does not end.
        """
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._endings:
            await asyncio.wait(self._endings, timeout=STALL_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        # OSError: of a connection that breaks in the middle of what is no message.
        except (LinkClosed, TransferError, OSError) as e:
            where = writer.get_extra_info("peername")
            _log.info("connection from %s ended: %s", where, str(e) or "no answer in time")
        except Exception:
            # Boundary of one connection.
            _log.exception("connection from %s failed", writer.get_extra_info("peername"))
        except asyncio.CancelledError:
            # Our own `close`; this task is nobody else's, so there is no one to tell.
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            await authenticate_server(reader, writer, self._local.token)
            link: Link[PeerRequest] = Link(reader, writer, PeerRequest)
            first = await link.receive()
        if isinstance(first, HelloData):
            await self._join(first, link, writer)
        elif isinstance(first, HelloPlain):
            await self._plain(first, link, writer)
        elif isinstance(first, Hello):
            await self._control(first, link, writer)
        else:
            raise LinkClosed(f"{type(first).__name__} before Hello")

    # ---- control connections --------------------------------------------------------------------

    async def _control(
        self, hello: Hello, link: Link[PeerRequest], writer: asyncio.StreamWriter
    ) -> None:
        try:
            session, welcome = await self._open(hello, link, writer)
        except _RefusedHello as e:
            _log.error("%s refused: %s: %s", hello.instance, e.field, e)
            link.send(Refused(e.field, str(e)))
            async with asyncio.timeout(HANDSHAKE_S):
                writer.close()
                await writer.wait_closed()
            return
        try:
            link.send(welcome)
            _log.info("session %d with %s over %s", session.number, hello.instance, welcome.path)
            while True:
                async with asyncio.timeout(SILENCE_S):
                    message = await link.receive()
                self._handoff.on_peer(session, message)
        finally:
            self._writers.pop(session.number, None)
            writer.transport.abort()
            ending = asyncio.create_task(self._end(session))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end(self, session: PrefillSession) -> None:
        """A session is over only behind its fence, however long a put takes."""
        try:
            while not await self._handoff.end_session(session):
                pass
        except Exception:
            _log.exception("session %d cannot be ended", session.number)
        else:
            _log.info("session %d with %s ended", session.number, session.hello.instance)

    async def _open(
        self, hello: Hello, link: Link[PeerRequest], writer: asyncio.StreamWriter
    ) -> tuple[PrefillSession, Welcome]:
        """The caller ends it, whatever becomes of the connection. Raises _RefusedHello."""
        self._check(hello)
        # One at a time for each instance: the older session is fenced before the newer one is
        # welcomed.
        async with self._opening.setdefault(hello.instance, asyncio.Lock()):
            for older in self._handoff.sessions_of(hello.instance):
                if old_writer := self._writers.pop(older.number, None):
                    old_writer.transport.abort()
                if not await self._handoff.end_session(older):
                    raise _RefusedHello("session", "the older session still writes; try again")
            opened = await self._path(hello)
            self._next_session += 1
            lane = CopyLane(f"kv-put-{self._next_session}", self._post)
            streams = max(1, min(hello.streams, own_streams()))
            session = PrefillSession(self._next_session, hello, link, lane, opened.sender, streams)
            self._handoff.open_session(session)
            self._writers[session.number] = writer
        return session, Welcome(
            instance=self._local.instance,
            incarnation=self._local.incarnation,
            session=session.number,
            path=opened.path,
            path_reason=opened.reason,
            streams=streams,
            rdma=opened.rdma,
            pid=self._identity.pid,
            start_ticks=self._identity.start_ticks,
            boot_id=self._identity.boot_id,
        )

    def _check(self, hello: Hello) -> None:
        local = self._local
        pairs: list[tuple[str, object, object]] = [
            ("version", hello.version, PROTOCOL_VERSION),
            ("deployment", hello.deployment, local.deployment),
        ]
        for name in sorted(hello.fingerprint.keys() | local.fingerprint.keys()):
            pairs.append((name, hello.fingerprint.get(name), local.fingerprint.get(name)))
        pairs.append(("block_bytes", hello.block_bytes, local.block_bytes))
        for field, theirs, ours in pairs:
            if theirs != ours:
                raise _RefusedHello(
                    field, f"{hello.instance} has {theirs!r}, {local.instance} has {ours!r}"
                )

    async def _path(self, hello: Hello) -> OpenedPath:
        try:
            return await self._paths.open(hello)
        except TransferError as e:
            raise _RefusedHello("transfer", str(e)) from e

    # ---- data connections -----------------------------------------------------------------------

    async def _join(
        self, first: HelloData, link: Link[PeerRequest], writer: asyncio.StreamWriter
    ) -> None:
        session = self._handoff.session(first.session)
        if session is None or session.lost or session.sender is not None:
            raise LinkClosed(f"a data connection for session {first.session}, which wants none")
        # The last bytes that asyncio writes here; from now on the socket belongs to the sender.
        link.send(Pong(first.session))
        async with asyncio.timeout(HANDSHAKE_S):
            await link.drain()
        if session.lost:
            raise LinkClosed(f"session {first.session} has ended")
        session.joined.append(detach(writer.get_extra_info("socket").fileno()))
        if len(session.joined) == session.streams:
            session.sender = TcpSender(session.joined)

    async def _plain(
        self, first: HelloPlain, link: Link[PeerRequest], writer: asyncio.StreamWriter
    ) -> None:
        """What this network gives to a plain socket loop."""
        if not 0 < first.piece <= MOST_BYTES or not 0 < first.nbytes <= MOST_BYTES:
            raise LinkClosed(f"a plain stream of {first.nbytes:,} bytes")
        # What comes next is for the thread, not for asyncio.
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        link.send(Pong(0))
        async with asyncio.timeout(HANDSHAKE_S):
            await link.drain()
        sock = detach(writer.get_extra_info("socket").fileno())
        await asyncio.to_thread(send_plain, sock, first.nbytes, min(first.piece, first.nbytes))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_UNSPEC

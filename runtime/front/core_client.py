"""Starts the engine core and talks to it: requests in, events out, over an inherited socket pair.

Owns the core's process, the routing of events to the HTTP requests that wait for them, and what is
known of the core's state. A core that dies fails every request at once. Knows nothing of HTTP or
text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence

import msgspec

from runtime.errors import CapacityError, Leg, LegError
from runtime.link import Link, LinkClosed
from runtime.protocol import (
    Abort,
    CoreReady,
    Event,
    Failed,
    Generate,
    GetStats,
    Measure,
    Measured,
    PeerAddress,
    PeerGone,
    PeerState,
    RequestId,
    SetPeers,
    Stats,
    Tokens,
)

log = logging.getLogger(__name__)

SPIN_COUNT = "1000"
"""How long an OpenMP thread of the core spins before it sleeps. libgomp's default spins for
milliseconds: when another process takes one of the cores, each of a step's hundreds of parallel
regions then waits that long, and decoding is ten times slower (docs/decisions/0002). On an idle
machine this value costs nothing. Set before torch loads; the service's own environment wins.
"""

CoreEvent = Tokens | Failed
CoreArgv = Callable[[int], Sequence[str]]
"""The core's command line, given the number of the descriptor it inherits."""


class Flow:
    """The events of one HTTP request's choices. Closing it aborts what has not ended."""

    def __init__(self, core: CoreClient, ids: Sequence[RequestId]) -> None:
        self._core = core
        self._index = {id_: i for i, id_ in enumerate(ids)}
        self._open = set(ids)
        self._events: list[tuple[int, CoreEvent]] = []
        self._wake = asyncio.Event()

    def put(self, event: CoreEvent) -> None:
        if isinstance(event, Failed) or event.finish is not None:
            self._open.discard(event.id)
        self._events.append((self._index[event.id], event))
        self._wake.set()

    async def events(self) -> list[tuple[int, CoreEvent]]:
        """All events since the last call, at least one, each with its choice's index.

        The deadline is the caller's.
        """
        while not self._events:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        return events

    def abort(self, index: int) -> None:
        """Stop one choice. Its last event, which says how it was served, still comes."""
        for id_, i in self._index.items():
            if i == index and id_ in self._open:
                self._core.abort(id_)

    def close(self) -> None:
        """Idempotent."""
        for id_ in self._open:
            self._core.forget(id_)
            self._core.abort(id_)
        self._open.clear()


class CoreClient:
    """One engine core. Not thread-safe: it lives on the front's loop."""

    def __init__(self, argv: CoreArgv, *, own_leg: Leg, instance: str) -> None:
        self._argv = argv
        self._own_leg: Leg = own_leg
        self._instance = instance
        self._link: Link[Event] | None = None
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._flows: dict[RequestId, Flow] = {}
        self._answers: dict[int, asyncio.Future[Stats | Measured]] = {}
        self._seq = itertools.count()
        self._stopping = False
        self.may_end = False
        """This instance was told to stop: its core, told by the same signal, may end by itself."""
        self.ready: CoreReady | None = None
        self.peers: dict[str, PeerState] = {}
        self._told_peers: dict[str, PeerAddress] = {}
        self.peer_was_linked = False
        self.dead = asyncio.Event()
        self.listeners: list[Callable[[], None]] = []
        """Called when the core becomes ready, a peer changes, or the core dies."""

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={"GOMP_SPINCOUNT": SPIN_COUNT} | os.environ,
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._link = Link(reader, writer, Event)
        self._reader = asyncio.create_task(self._read(self._link), name="core-events")

    @property
    def alive(self) -> bool:
        return self._link is not None and not self.dead.is_set()

    async def stop(self, timeout: float) -> None:
        """Close the link, which tells the core to end; kill it after `timeout` seconds."""
        self._stopping = True
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            await self._end(self._process, timeout)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader], timeout=1.0)

    def kill(self) -> None:
        """End the core without waiting for what it does; `stop` still has to be awaited."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _end(self, process: Process, timeout: float) -> int:
        try:
            async with asyncio.timeout(timeout):
                return await process.wait()
        except TimeoutError:
            log.warning("the engine core did not end within %.1f s: killed", timeout)
            process.kill()
            return await process.wait()

    async def _read(self, link: Link[Event]) -> None:
        try:
            while True:
                self._dispatch(await link.receive())
        except LinkClosed as e:
            if not self._stopping:
                await self._died(str(e))

    async def _died(self, reason: str) -> None:
        self.dead.set()
        failures = [
            Failed(
                id=id_,
                message=f"the engine core of {self._instance} ended",
                status=502,
                leg=self._own_leg,
                instance=self._instance,
            )
            for id_ in self._flows
        ]
        for failure in failures:
            self._flows.pop(failure.id).put(failure)
        for waiting in self._answers.values():
            waiting.cancel()
        self._notify()
        assert self._process is not None
        code = await self._end(self._process, 2.0)
        if code == 0 and self.may_end and not failures:
            log.info("the engine core has ended")
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        log.error("the engine core ended %s (%s); %d requests failed", how, reason, len(failures))

    # ---- events ---------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        match event:
            case Tokens() | Failed():
                flow = self._flows.get(event.id)
                if flow is not None:  # else aborted while this was under way
                    if isinstance(event, Failed) or event.finish is not None:
                        del self._flows[event.id]
                    flow.put(event)
            case CoreReady():
                self.ready = event
                self._notify()
            case PeerState():
                self.peers[event.name] = event
                self.peer_was_linked |= event.path is not None
                self._notify()
            case PeerGone():
                self.peers.pop(event.name, None)
                self._notify()
            case Stats() | Measured():
                waiting = self._answers.pop(event.seq, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(event)

    def _notify(self) -> None:
        for listener in self.listeners:
            listener()

    # ---- commands -------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Generate]) -> Flow:
        """Hand over one HTTP request's choices. Raises when the core is gone or an id taken."""
        taken = next((r.id for r in requests if r.id in self._flows), None)
        if taken is not None:
            raise CapacityError(f"request {taken} is still under way here")
        flow = Flow(self, [r.id for r in requests])
        link = self._alive_link()
        try:
            for request in requests:
                self._flows[request.id] = flow
                link.send(request)
        except LinkClosed as e:
            flow.close()
            raise self._gone() from e
        return flow

    def forget(self, id_: RequestId) -> None:
        """Events that still come for it are dropped."""
        self._flows.pop(id_, None)

    def abort(self, id_: RequestId) -> None:
        if self.alive and self._link is not None:
            try:
                self._link.send(Abort(id_))
            except LinkClosed:
                log.debug("request %s: not aborted, the core is gone", id_)

    def set_peers(self, peers: dict[str, PeerAddress]) -> None:
        """Decode role: the prefill instances there are now. Nothing is sent when that is known."""
        if peers == self._told_peers or not self.alive or self._link is None:
            return
        try:
            self._link.send(SetPeers(peers))
            self._told_peers = peers
        except LinkClosed:
            log.debug("the peers were not told: the core is gone")

    async def stats(self, timeout: float) -> Stats:
        """What the core holds now. Raises LegError when it is gone or does not answer in time."""
        answer = await self._ask(GetStats(next(self._seq)), timeout)
        assert isinstance(answer, Stats)
        return answer

    async def measure(self, ask: Measure, timeout: float) -> Measured:
        """Raises LegError like `stats`; what else goes wrong is in the answer."""
        answer = await self._ask(msgspec.structs.replace(ask, seq=next(self._seq)), timeout)
        assert isinstance(answer, Measured)
        return answer

    async def _ask(self, command: GetStats | Measure, timeout: float) -> Stats | Measured:
        link = self._alive_link()
        answer = self._answers[command.seq] = asyncio.get_running_loop().create_future()
        try:
            link.send(command)
            done, _ = await asyncio.wait([answer], timeout=timeout)
        except LinkClosed as e:
            raise self._gone() from e
        finally:
            self._answers.pop(command.seq, None)
        if not done or answer.cancelled():
            raise LegError(
                "the engine core does not answer",
                leg=self._own_leg,
                instance=self._instance,
                timeout=not done,
            )
        result: Stats | Measured = answer.result()
        return result

    def _alive_link(self) -> Link[Event]:
        if self._link is None or not self.alive:
            raise self._gone()
        return self._link

    def _gone(self) -> LegError:
        message = f"the engine core of {self._instance} is not running"
        return LegError(message, leg=self._own_leg, instance=self._instance)

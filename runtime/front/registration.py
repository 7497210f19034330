"""Tells the router that this instance is here: at once on every change, and with each heartbeat.

Owns the retry rules. A router that is down costs one log line and a try a second; it never stops
serving. One that cannot be reached just once may be a deployment that is brought down, router
first: that costs no line.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from runtime.config import Address
from runtime.errors import LegError
from runtime.front.instance import Instance
from runtime.protocol import (
    PROTOCOL_VERSION,
    CoreReady,
    PeerAddress,
)
from runtime.reasons import reason
from runtime.router_protocol import Registration, RegistrationReply

log = logging.getLogger(__name__)

RETRY_S = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_LEAVING_TIMEOUT_S = 2.0
_STATS_TIMEOUT_S = 0.5


class Registrar:
    """One instance's registration at one router. `run` is its task."""

    def __init__(self, instance: Instance, router_url: str, token: bytes) -> None:
        self._instance = instance
        self._url = f"{router_url.rstrip('/')}/internal/register"
        self._headers = {
            "Authorization": f"Bearer {token.decode('utf-8', 'surrogateescape')}",
            "Content-Type": "application/json",
        }
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._trouble: str | None = None
        self._missed = 0
        """Tries in a row that did not reach it."""

    def changed(self) -> None:
        """Send now: readiness or a peer link is not what was last said."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. Silent until the core is ready: before, it has no incarnation."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as self._session:
            while True:
                pause: float | None = None
                self._changed.clear()
                ready = self._instance.core.ready
                if ready is not None:
                    pause = await self._send(ready, leaving=False)
                try:
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
                except TimeoutError:
                    pass  # the next heartbeat

    async def leave(self) -> None:
        """Tell the router to send nothing more. Best effort within a short deadline."""
        ready = self._instance.core.ready
        if ready is None or self._session is None:
            return
        try:
            async with asyncio.timeout(_LEAVING_TIMEOUT_S):
                await self._send(ready, leaving=True)
        except TimeoutError:
            log.info("the router did not hear that this instance is leaving")

    async def _send(self, ready: CoreReady, *, leaving: bool) -> float:
        """Seconds to the next one."""
        body = msgspec.json.encode(await self._registration(ready, leaving=leaving))
        assert self._session is not None
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as answer:
                raw = await answer.read()
                if answer.status != 200:
                    self._failed(f"it answered {answer.status}: {_message(raw)}")
                    return RETRY_S
                reply = msgspec.json.decode(raw, type=RegistrationReply)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as e:
            self._missed += 1
            if self._missed > 1 and not self._instance.draining:
                self._failed(reason(e))
            return RETRY_S
        if self._trouble is not None:
            log.info("registered with the router again")
        self._trouble, self._missed = None, 0
        self._instance.drained = reply.draining
        if self._instance.config.role == "decode":
            self._instance.core.set_peers(reply.peers)
        return max(0.1, reply.heartbeat_s)

    def _failed(self, reason: str) -> None:
        if reason != self._trouble:
            log.warning("cannot register with the router at %s: %s", self._url, reason)
        self._trouble = reason

    async def _registration(self, ready: CoreReady, *, leaving: bool) -> Registration:
        instance, config = self._instance, self._instance.config
        running, waiting = await self._load()
        return Registration(
            version=PROTOCOL_VERSION,
            name=config.name,
            role=config.role,
            url=Address(config.advertise, config.listen.port).url,
            incarnation=ready.incarnation,
            ready=instance.waiting_for() is None,
            leaving=leaving or instance.draining,
            draining=instance.drained,
            peer=PeerAddress(config.advertise, config.peer.port) if config.peer else None,
            model=config.model.name,
            fingerprint=ready.fingerprint,
            max_model_len=ready.max_model_len,
            running=running,
            waiting=waiting,
            peers={name: peer.path for name, peer in instance.core.peers.items()},
        )

    async def _load(self) -> tuple[int, int]:
        """(running, waiting) from the core, which also knows of a prefill instance's work."""
        try:
            ledger = (await self._instance.core.stats(_STATS_TIMEOUT_S)).ledger
            return ledger.running, ledger.waiting
        except LegError:
            started = sum(self._instance.active.values())
            return started, len(self._instance.active) - started


def _message(raw: bytes) -> str:
    try:
        return str(msgspec.json.decode(raw)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")

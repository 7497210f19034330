"""Which prefill peers a decode instance dials: those its configuration names, and those the router
knows.

Only these: a request can name one of them, never an address. A peer that nobody names any more
keeps its session until that ends, so a router that has just been restarted, and knows nobody yet,
costs no link. For the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.config import Address, PeerConfig
from runtime.kv.swap import Post
from runtime.protocol import PeerAddress
from runtime.transfer.handoff_decode import DecodeHandoff
from runtime.transfer.paths import Dial
from runtime.transfer.peer_client import LocalDecode, PeerClient

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Dialled:
    client: PeerClient
    task: asyncio.Task[None]


class PeerSessions:
    """One PeerClient per peer."""

    def __init__(
        self,
        local: LocalDecode,
        handoff: DecodeHandoff,
        post: Post,
        configured: Sequence[PeerConfig],
    ) -> None:
        self._local = local
        self._handoff = handoff
        self._post = post
        self._configured = {peer.name: peer.address for peer in configured}
        self._dialled: dict[str, _Dialled] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Dial what the configuration names."""
        self.set({})

    def dial(self, name: str) -> Dial | None:
        """What opens one more connection to this peer."""
        dialled = self._dialled.get(name)
        return dialled.client.dial if dialled else None

    def set(self, known: Mapping[str, PeerAddress]) -> None:
        """The router knows these. What the configuration says of a name counts more."""
        wanted = {n: Address(p.host, p.port) for n, p in known.items()} | self._configured
        for name, dialled in list(self._dialled.items()):
            dialled.client.wanted = name in wanted
            if name in wanted and dialled.client.address != wanted[name]:
                # The old one is gone.
                dialled.client.why_left = f"it registered anew, from {wanted[name]}"
                self._drop(name)
        for name, address in wanted.items():
            if name not in self._dialled:
                self._dial(PeerConfig(name, address))

    def _dial(self, peer: PeerConfig) -> None:
        _log.info("prefill peer %s is at %s", peer.name, peer.address)
        self._handoff.peers.expect(peer.name)
        client = PeerClient(peer, self._local, self._handoff, self._post)
        task = asyncio.create_task(client.run(), name=f"peer {peer.name}")
        dialled = self._dialled[peer.name] = _Dialled(client, task)
        task.add_done_callback(lambda _: self._ended(peer.name, dialled))

    def _drop(self, name: str) -> None:
        task = self._dialled.pop(name).task
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        task.cancel()

    def _ended(self, name: str, dialled: _Dialled) -> None:
        """It had no session and nobody named it, or it was dropped."""
        if self._dialled.get(name) is not dialled:
            return
        del self._dialled[name]
        if dialled.client.wanted:  # named again in that very moment
            self._dial(PeerConfig(name, dialled.client.address))
        else:
            self._handoff.peers.forget(name)

    async def close(self) -> None:
        for name in list(self._dialled):
            self._drop(name)
        await asyncio.gather(*self._leaving, return_exceptions=True)

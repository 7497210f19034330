"""The roles of a deployment apart: prefill for others, or decode what others prefilled; and the
choice.

Owns how the pieces of each role are put together and taken apart. The process around them is
process.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from runtime.engine.contract import (
    EngineEvent,
)
from runtime.engine.mixed import MixedRole
from runtime.engine.role import Parts, Role
from runtime.errors import ConfigError, TransferError
from runtime.kv.swap import SwapLanes
from runtime.protocol import (
    PROTOCOL_VERSION,
    Failed,
    Generate,
    Hello,
    Ledger,
    Measure,
    Measured,
    PeerAddress,
    PeerState,
    RequestId,
)
from runtime.transfer.cuda_ipc import offer_pool
from runtime.transfer.handoff_decode import DecodeHandoff
from runtime.transfer.handoff_prefill import PrefillHandoff
from runtime.transfer.measure import Measurer
from runtime.transfer.paths import ReceiverPaths, SenderPaths
from runtime.transfer.peer_client import LocalDecode
from runtime.transfer.peer_server import Local, PeerServer
from runtime.transfer.peer_sessions import PeerSessions
from runtime.transfer.rdma_adapter import Rdma
from runtime.transfer.tcp import own_streams

_log = logging.getLogger(__name__)

_SHM = Path("/dev/shm")
_LANE_CLOSE_S = 5.0


def make_role(parts: Parts) -> Role:
    kinds: dict[str, type[MixedRole] | type[PrefillRole] | type[DecodeRole]] = {
        "mixed": MixedRole,
        "prefill": PrefillRole,
        "decode": DecodeRole,
    }
    return kinds[parts.config.role](parts)


class PrefillRole(Role):
    """Listens for decode instances; has nothing to say to its own front but its statistics."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        if config.peer is None:
            raise ConfigError("a prefill instance needs `peer`, the address decode connects to")
        self._address = config.peer
        self._name = config.name
        self._send = parts.send
        self._handoff = PrefillHandoff(parts.engine)
        local = Local(
            deployment=config.deployment,
            instance=config.name,
            incarnation=parts.incarnation,
            fingerprint=parts.fingerprint,
            block_bytes=parts.engine.layout.block_bytes,
            token=parts.token,
        )
        self._rdma = Rdma(config, parts.engine.copies)
        gpu = parts.engine.copies.engine
        paths = SenderPaths(config.name, config.transfer, self._rdma, gpu)
        self._server = PeerServer(local, paths, self._handoff, parts.mailbox.post)

    async def start(self) -> None:
        await self._rdma.open()
        await self._server.start(self._address)

    def serve(self) -> None:
        """Decode instances may have connected already: nothing is told to the front."""

    async def close(self) -> None:
        await self._server.close()
        await self._rdma.close()

    def generate(self, message: Generate) -> None:
        self._send(
            Failed(
                id=message.id,
                message=f"{self._name} only prefills: ask a decode instance, or the router",
                status=400,
                instance=self._name,
            )
        )

    def abort(self, request_id: RequestId) -> None:
        """There is none to stop: `generate` refuses them all."""

    def set_peers(self, peers: Mapping[str, PeerAddress]) -> None:
        """Decode instances come by themselves."""

    def on_engine(self, event: EngineEvent) -> None:
        self._handoff.on_engine(event)

    def ledger(self) -> Ledger:
        return self._handoff.ledger()

    def peers(self) -> dict[str, PeerState]:
        return self._handoff.peers()

    def counters(self) -> Mapping[str, float]:
        return self._handoff.counters


class DecodeRole(Role):
    """Has the CPU buffer and a session with each prefill peer."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._parts = parts
        assert parts.buffer is not None
        self._buffer = parts.buffer
        self.num_buffer_blocks = self._buffer.num_blocks
        self._lanes = SwapLanes.start(parts.mailbox.post)
        self._handoff = DecodeHandoff(config, parts.engine, self._buffer, self._lanes, parts.send)
        self._rdma = Rdma(config, parts.engine.copies, self._buffer.region)
        local = LocalDecode(self._hello(), parts.token, ReceiverPaths(self._buffer, self._rdma))
        self._sessions = PeerSessions(
            local, self._handoff, parts.mailbox.post, config.prefill_peers
        )
        self._measurer = Measurer(self._handoff, self._lanes.swap_in, self._sessions.dial)

    async def start(self) -> None:
        """Decode listens to nobody; it dials, once it may send events."""
        await self._rdma.open()

    def serve(self) -> None:
        self._sessions.start()

    def _hello(self) -> Hello:
        config = self._parts.config
        gpu, no_gpu = None, ""
        if config.transfer in ("auto", "cuda_ipc"):
            try:
                gpu = offer_pool(self._parts.engine.copies, self._parts.engine.pool_map)
            except TransferError as e:
                no_gpu = str(e)
        return Hello(
            version=PROTOCOL_VERSION,
            deployment=config.deployment,
            instance=config.name,
            incarnation=self._parts.incarnation,
            fingerprint=self._parts.fingerprint,
            transfer=config.transfer,
            segment=self._buffer.name,
            segment_bytes=self._buffer.nbytes,
            block_bytes=self._buffer.block_bytes,
            streams=own_streams(),
            gpu=gpu,
            no_gpu=no_gpu,
        )

    async def measure(self, ask: Measure) -> Measured:
        return await self._measurer.measure(ask)

    def set_peers(self, peers: Mapping[str, PeerAddress]) -> None:
        self._sessions.set(peers)

    async def close(self) -> None:
        self._handoff.stop()
        await self._sessions.close()
        self._handoff.close()
        await self._lanes.close(_LANE_CLOSE_S)
        await self._rdma.close()

    def generate(self, message: Generate) -> None:
        self._handoff.generate(message)

    def abort(self, request_id: RequestId) -> None:
        self._handoff.abort(request_id)

    def on_engine(self, event: EngineEvent) -> None:
        self._handoff.on_engine(event)

    def ledger(self) -> Ledger:
        return self._handoff.ledger()

    def peers(self) -> dict[str, PeerState]:
        return self._handoff.peer_states()

    def counters(self) -> Mapping[str, float]:
        return self._handoff.accounts.counters

"""The RDMA port of an instance, opened, with the memory that it moves registered once.

Owns the device and its keys for as long as the instance lives; each session has a queue pair of it.
Prefill's device pool is read; decode's CPU buffer is written, and its device pool, where that is on
a GPU. A pool that cannot be registered is done without: KV then goes through the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.config import WorkerConfig
from runtime.errors import ConfigError, TransferError
from runtime.kv.copies import CopyEngine, PoolCopies
from runtime.kv.region import Region
from runtime.protocol import RdmaEnd, RdmaMemory
from runtime.transfer import verbs
from runtime.transfer.gpu_memory import register_gpu
from runtime.transfer.rdma_ports import RdmaPort, choose_port, own_addresses
from runtime.transfer.verbs import Device, Memory, PortFacts, Queue, Route

_log = logging.getLogger(__name__)

_PSN_BITS = 24


@dataclass(frozen=True, slots=True)
class Registered:
    region: Region
    memory: Memory
    how: str = ""
    """GPU memory: by which way."""

    @property
    def remote(self) -> RdmaMemory:
        """What a peer must know to write there."""
        region = self.region
        return RdmaMemory(address=region.address, nbytes=region.nbytes, key=self.memory.rkey)


@dataclass(frozen=True, slots=True)
class RdmaAdapter:
    port: RdmaPort
    facts: PortFacts
    device: Device
    copies: PoolCopies
    buffer: Registered | None
    """Decode's."""
    pool: Registered | None
    """None, at decode on a CPU: its pool is in the buffer's segment, or nobody writes there."""
    gpu: CopyEngine | None
    """Of the GPU that `pool` is on."""
    no_pool: str = ""
    """Why a pool on a GPU is not registered."""
    _staging: dict[int, Memory] = field(default_factory=dict, init=False)
    """Registered when first sent from, by its address."""

    @classmethod
    def open(cls, port: RdmaPort, copies: PoolCopies, buffer: Region | None = None) -> RdmaAdapter:
        """Of the instance with this device pool and, at decode, CPU buffer. Takes as long as
        pinning them does. Raises TransferError.
        """
        device = verbs.load(dmabuf=copies.engine is not None).open(port.device)
        written: Registered | None = None
        try:
            facts = device.port(port.number)
            if buffer is not None:
                written = _pinned(device, buffer, remote_write=True)
            if copies.engine is None:
                pool = None if buffer else _pinned(device, copies.pool, remote_write=False)
                return cls(port, facts, device, copies, written, pool, None)
            try:
                found = register_gpu(
                    device, copies.pool, copies.engine, remote_write=buffer is not None
                )
            except TransferError as e:
                return cls(port, facts, device, copies, written, None, None, str(e))
            pool = Registered(copies.pool, *found)
            return cls(port, facts, device, copies, written, pool, copies.engine)
        except TransferError:
            device.close()
            raise

    @contextlib.contextmanager
    def readable(self, region: Region) -> Iterator[int]:
        """Key of memory to send from, whose bytes are final: registered for good, where it stays,
        or for this while.
        """
        if self.pool and region == self.pool.region:
            if self.gpu:
                self.gpu.await_model()
            yield self.pool.memory.lkey
            return
        if staging := self.copies.staging_of(region):
            # Whoever has it is alone with it.
            if staging.address not in self._staging:
                memory = self.device.register(staging, remote_write=False)
                self._staging[staging.address] = memory
            yield self._staging[staging.address].lkey
            return
        memory = self.device.register(region, remote_write=False)
        try:
            yield memory.lkey
        finally:
            memory.close()

    def end(self, queue: Queue, *, pool: bool = False) -> RdmaEnd:
        """What the peer must know of a new queue pair of ours; and of decode's `pool`, if told."""
        return RdmaEnd(
            device=str(self.port),
            fabric=self.port.family,
            gid=self.port.gid,
            lid=self.facts.lid,
            mtu=self.facts.mtu,
            number=queue.number,
            psn=secrets.randbits(_PSN_BITS),
            address=self.buffer.region.address if self.buffer else 0,
            key=self.buffer.memory.rkey if self.buffer else 0,
            pool=self.pool.remote if self.pool and pool else None,
        )

    def connect(self, queue: Queue, ours: RdmaEnd, peers: RdmaEnd) -> None:
        """Raises TransferError, also when the peer's address cannot be reached from this port."""
        if ours.fabric != peers.fabric:
            raise TransferError(
                f"{ours.device} is {ours.fabric}, the peer's {peers.device} is {peers.fabric}"
            )
        route = Route(
            port=self.port.number,
            gid_index=self.port.gid_index,
            mtu=min(ours.mtu, peers.mtu),
            peer_gid=peers.gid,
            peer_lid=peers.lid,
            peer_number=peers.number,
            peer_psn=peers.psn,
            psn=ours.psn,
        )
        try:
            queue.connect(route)
        except TransferError as e:
            raise TransferError(f"{ours.device} to {peers.device}: {e}") from e

    def close(self) -> None:
        """After all queue pairs. Raises TransferError when one is still open."""
        lasting = [each.memory for each in (self.buffer, self.pool) if each]
        for memory in (*lasting, *self._staging.values()):
            memory.close()
        self.device.close()


class Rdma:
    """Whether this instance has RDMA, and why not. For the asyncio thread."""

    def __init__(
        self, config: WorkerConfig, copies: PoolCopies, buffer: Region | None = None
    ) -> None:
        """`buffer`: decode's."""
        self._config = config
        self._copies = copies
        self._buffer = buffer
        self.adapter: RdmaAdapter | None = None
        self.missing = "not opened yet"

    async def open(self) -> None:
        """Raises ConfigError when the configuration asks for rdma and there is none."""
        asked = self._config.transfer
        if asked not in ("auto", "rdma"):
            self.missing = f"{self._config.name} is configured for {asked}"
            return
        try:
            # In a thread: pinning gigabytes takes a while.
            self.adapter = await asyncio.to_thread(self._open)
        except TransferError as e:
            if asked == "rdma":
                raise ConfigError(
                    f"transfer: rdma, but {e}",
                    hint=e.hint or "name a device under `rdma:`, or use transfer: auto",
                ) from e
            self.missing = str(e)
        else:
            _log.info("rdma: %s", self.adapter.port)
            if self.adapter.pool and self.adapter.gpu:
                _log.info("rdma: the GPU's memory itself, by %s", self.adapter.pool.how)
            elif self.adapter.no_pool:
                _log.warning("rdma: KV goes through the CPU: %s", self.adapter.no_pool)

    def _open(self) -> RdmaAdapter:
        config = self._config
        peers = [peer.address.host for peer in config.prefill_peers]
        port = choose_port(config.rdma, own_addresses(config.advertise, peers))
        return RdmaAdapter.open(port, self._copies, self._buffer)

    async def close(self) -> None:
        if self.adapter is None:
            return
        adapter, self.adapter, self.missing = self.adapter, None, "this instance stops"
        try:
            await asyncio.to_thread(adapter.close)
        except TransferError as e:
            # The kernel takes it all back when the process ends.
            _log.warning("rdma: %s", e)


def _pinned(device: Device, region: Region, *, remote_write: bool) -> Registered:
    """Host memory."""
    try:
        return Registered(region, device.register(region, remote_write=remote_write))
    except TransferError as e:
        raise TransferError(
            f"{region.nbytes:,} bytes of host memory cannot be registered: {e}",
            hint="raise the limit of locked memory (`ulimit -l`, LimitMEMLOCK=) above it",
        ) from e

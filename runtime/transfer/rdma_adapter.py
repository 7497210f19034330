"""The RDMA port of an instance, opened, with the memory that it moves registered once.

Owns the device and its keys for as long as the instance lives; each session has a queue pair of it.
How memory becomes reachable, host or GPU, is `_register`'s alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.config import WorkerConfig
from runtime.errors import ConfigError, TransferError
from runtime.kv.region import Region
from runtime.protocol import RdmaEnd
from runtime.transfer import verbs
from runtime.transfer.rdma_ports import RdmaPort, choose_port, own_addresses
from runtime.transfer.verbs import Device, Memory, PortFacts, Queue, Route

_log = logging.getLogger(__name__)

_PSN_BITS = 24
_DMA_BUF_FD = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""


@dataclass(frozen=True, slots=True)
class RdmaAdapter:
    port: RdmaPort
    facts: PortFacts
    region: Region
    device: Device
    memory: Memory

    @classmethod
    def open(
        cls, port: RdmaPort, region: Region, *, remote_write: bool, gpu: bool = False
    ) -> RdmaAdapter:
        """Takes as long as pinning the region does. Raises TransferError."""
        device = verbs.load().open(port.device)
        try:
            facts = device.port(port.number)
            memory = _register(device, region, remote_write=remote_write, gpu=gpu)
        except TransferError:
            device.close()
            raise
        return cls(port, facts, region, device, memory)

    @contextlib.contextmanager
    def local_key(self, region: Region) -> Iterator[int]:
        """Key of memory to send from: registered at the start, or for this while."""
        if region == self.region:
            yield self.memory.lkey
            return
        memory = self.device.register(region, remote_write=False)
        try:
            yield memory.lkey
        finally:
            memory.close()

    def end(self, queue: Queue) -> RdmaEnd:
        """What the peer must know of a new queue pair of ours."""
        return RdmaEnd(
            device=str(self.port),
            fabric=self.port.family,
            gid=self.port.gid,
            lid=self.facts.lid,
            mtu=self.facts.mtu,
            number=queue.number,
            psn=secrets.randbits(_PSN_BITS),
            address=self.region.address,
            key=self.memory.rkey,
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
        self.memory.close()
        self.device.close()


class Rdma:
    """Whether this instance has RDMA, and why not. For the asyncio thread."""

    def __init__(self, config: WorkerConfig, region: Region, *, remote_write: bool) -> None:
        self._config = config
        self._region = region
        self._remote_write = remote_write
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

    def _open(self) -> RdmaAdapter:
        config = self._config
        peers = [peer.address.host for peer in config.prefill_peers]
        port = choose_port(config.rdma, own_addresses(config.advertise, peers))
        return RdmaAdapter.open(
            port,
            self._region,
            remote_write=self._remote_write,
            gpu=not self._remote_write and config.device != "cpu",
        )

    async def close(self) -> None:
        if self.adapter is None:
            return
        adapter, self.adapter, self.missing = self.adapter, None, "this instance stops"
        try:
            await asyncio.to_thread(adapter.close)
        except TransferError as e:
            # The kernel takes it all back when the process ends.
            _log.warning("rdma: %s", e)


def _register(device: Device, region: Region, *, remote_write: bool, gpu: bool) -> Memory:
    """Host memory is pinned. GPU memory is exported as a dmabuf, or else left to nvidia-peermem,
    with which the driver takes its addresses like any other.
    """
    tried = []
    if gpu:
        try:
            fd = _export_dmabuf(region)
        except TransferError as e:
            tried.append(str(e))
        else:
            try:
                return device.register_dmabuf(region, fd, remote_write=remote_write)
            except TransferError as e:
                tried.append(str(e))
            finally:
                os.close(fd)
    try:
        return device.register(region, remote_write=remote_write)
    except TransferError as e:
        where = "GPU" if gpu else "host"
        reasons = "; ".join([*tried, str(e)])
        hint = (
            "load nvidia-peermem, or a driver and kernel with dmabuf export"
            if gpu
            else "raise the limit of locked memory (`ulimit -l`, LimitMEMLOCK=) above it"
        )
        raise TransferError(
            f"{region.nbytes:,} bytes of {where} memory cannot be registered: {reasons}", hint=hint
        ) from e


def _export_dmabuf(region: Region) -> int:
    """A descriptor of this range of GPU memory, by the CUDA driver."""
    try:
        export = ctypes.CDLL("libcuda.so.1").cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as e:
        raise TransferError(f"dmabuf export: {e}") from e
    fd = ctypes.c_int(-1)
    address, nbytes = ctypes.c_uint64(region.address), ctypes.c_size_t(region.nbytes)
    status = export(ctypes.byref(fd), address, nbytes, _DMA_BUF_FD, ctypes.c_uint64(0))
    if status != 0:
        raise TransferError(f"dmabuf export: CUDA driver status {status}")
    return fd.value

"""Which path a session takes, and how its two ends are made.

Owns the order of preference and the reasons. A new transport is one more branch in `SenderPaths`
and one in `ReceiverPaths`; the links know only Sender and Receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from runtime.config import TransferKind
from runtime.errors import TransferError
from runtime.kv.buffer import CpuBuffer
from runtime.kv.copies import CopyEngine
from runtime.link import Link, LinkClosed
from runtime.protocol import Hello, HelloData, PeerReply, Pong, RdmaEnd, Welcome
from runtime.transfer.base import PathKind, Receiver, ReceiverEvents, Sender
from runtime.transfer.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from runtime.transfer.identity import ProcessIdentity
from runtime.transfer.rdma import RdmaOffer, RdmaReceiver, RdmaSender
from runtime.transfer.rdma_adapter import Rdma, RdmaAdapter
from runtime.transfer.shm import ShmReceiver, ShmSender
from runtime.transfer.tcp import TcpReceiver, detach

_log = logging.getLogger(__name__)

CONNECT_S = 5.0
UNREACHABLE_S = 30.0
_BEST_FIRST: tuple[PathKind, ...] = ("cuda_ipc", "shm", "rdma", "tcp")
_NO_GPU = "its KV cache is not on a GPU"

Dial = Callable[
    [contextlib.AsyncExitStack], Awaitable[tuple[Link[PeerReply], asyncio.StreamWriter]]
]
"""Opens one more authenticated connection to the peer; closed with the stack."""


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """Prefill's end."""

    path: PathKind
    sender: Sender | None
    """None: tcp, whose data connection is still to come."""
    reason: str = ""
    """Why it is not a better one, or not as good as it could be."""
    rdma: RdmaEnd | None = None


class SenderPaths:
    """For a prefill instance."""

    def __init__(
        self, instance: str, transfer: TransferKind, rdma: Rdma, gpu: CopyEngine | None
    ) -> None:
        self._instance = instance
        self._transfer = transfer
        self._rdma = rdma
        self._gpu = gpu
        self._unreachable: dict[bytes, tuple[float, str]] = {}
        """Addresses that could not be connected to: until when that is believed, and why."""

    async def open(self, hello: Hello) -> OpenedPath:
        """The best path that both sides allow; what one of them names is never replaced by another.

        Raises TransferError saying why there is none.
        """
        wanted = {hello.transfer, self._transfer} - {"auto"}
        if len(wanted) > 1:
            raise TransferError(
                f"{hello.instance} wants {hello.transfer}, {self._instance} wants {self._transfer}"
            )
        passed: list[str] = []
        for path in _BEST_FIRST:
            if wanted and path not in wanted:
                continue
            if path == "cuda_ipc" and not wanted and not (hello.gpu or hello.no_gpu):
                continue  # nobody expects it between CPUs
            try:
                opened = await self._open(path, hello)
            except TransferError as e:
                if wanted:
                    raise TransferError(f"{path} was asked for: {e}") from e
                _log.info("%s: no %s: %s", hello.instance, path, e)
                passed.append(f"no {path}: {e}")
            else:
                passed += [opened.reason] if opened.reason else []
                return replace(opened, reason="; ".join(passed))
        raise TransferError("; ".join(passed))

    async def _open(self, path: PathKind, hello: Hello) -> OpenedPath:
        if path == "cuda_ipc":
            if hello.gpu is None:
                raise TransferError(f"{hello.instance}: {hello.no_gpu or _NO_GPU}")
            if self._gpu is None:
                raise TransferError(f"{self._instance}: {_NO_GPU}")
            name, nbytes = hello.segment, hello.segment_bytes
            ipc = await asyncio.to_thread(CudaIpcSender.open, name, nbytes, self._gpu, hello.gpu)
            return OpenedPath(path, ipc)
        if path == "shm":
            # In a thread: mapping, and locking, gigabytes takes a while.
            shm = await asyncio.to_thread(ShmSender.open, hello.segment, hello.segment_bytes)
            return OpenedPath(path, shm)
        if path == "rdma":
            if hello.rdma is None:
                raise TransferError(f"{hello.instance}: {hello.no_rdma}")
            adapter = self._rdma.adapter
            if adapter is None:
                raise TransferError(f"{self._instance}: {self._rdma.missing}")
            sender = await self._rdma_sender(adapter, hello.rdma, hello.segment_bytes)
            why = f"{self._instance} reads its GPU by way of the CPU: {adapter.no_pool}"
            return OpenedPath(path, sender, why if adapter.no_pool else "", sender.end)
        return OpenedPath(path, None)

    async def _rdma_sender(self, adapter: RdmaAdapter, peer: RdmaEnd, nbytes: int) -> RdmaSender:
        now = asyncio.get_running_loop().time()
        until, why = self._unreachable.get(peer.gid, (0.0, ""))
        if now < until:
            raise TransferError(why)
        try:
            # In a thread: an address that does not answer is waited for.
            return await asyncio.to_thread(RdmaSender, adapter, peer, nbytes)
        except TransferError as e:
            # And not again for each time that a decode instance dials: a binding that keeps the
            # interpreter's lock while it waits would stop the engine.
            self._unreachable[peer.gid] = (now + UNREACHABLE_S, str(e))
            raise


class ReceiverPaths:
    """For a decode instance."""

    def __init__(self, buffer: CpuBuffer, rdma: Rdma) -> None:
        self._buffer = buffer
        self._rdma = rdma

    def offer_rdma(self, no_pool: str) -> RdmaOffer:
        """A queue pair for the next session; without the device pool if there is a reason for that.
        Raises TransferError saying why there is none.
        """
        if self._rdma.adapter is None:
            raise TransferError(self._rdma.missing)
        return RdmaOffer(self._rdma.adapter, no_pool)

    async def open(
        self, welcome: Welcome, offer: RdmaOffer | None, dial: Dial, events: ReceiverEvents
    ) -> Receiver:
        """Decode's end of the path that prefill chose."""
        if welcome.path in ("shm", "cuda_ipc"):
            kind = ShmReceiver if welcome.path == "shm" else CudaIpcReceiver
            return kind(ProcessIdentity(welcome.pid, welcome.start_ticks, welcome.boot_id))
        if welcome.path == "rdma":
            if offer is None or welcome.rdma is None:
                raise LinkClosed("welcomed over rdma, with an end missing")
            return RdmaReceiver(offer, welcome.rdma, events)
        buffer = self._buffer
        async with contextlib.AsyncExitStack() as dialled, asyncio.timeout(CONNECT_S):
            with contextlib.ExitStack() as joined:
                socks = [
                    joined.enter_context(await _join(welcome, dial, dialled))
                    for _ in range(welcome.streams)
                ]
                receiver = TcpReceiver(socks, buffer.region, buffer.block_bytes, events)
                joined.pop_all()
        return receiver


async def _join(welcome: Welcome, dial: Dial, stack: contextlib.AsyncExitStack) -> socket.socket:
    link, stream = await dial(stack)
    link.send(HelloData(session=welcome.session))
    answer = await link.receive()
    if not isinstance(answer, Pong):
        raise LinkClosed(f"{type(answer).__name__} to a data connection")
    # Nothing comes on it before we ask for something: asyncio has no byte of it in a buffer.
    return detach(stream.get_extra_info("socket").fileno())

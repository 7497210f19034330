"""A sender and a receiver of each transport, joined; as a program, a sender that never stops."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from gpu_stand_in import StandIn, device_memory, free_device_memory, peermem
from numpy.typing import NDArray
from rdma_lab import DECODE_DEVICE, PREFILL_DEVICE, on_gpus, path_of

from runtime.config import RdmaConfig
from runtime.kv.buffer import CpuBuffer
from runtime.kv.copies import HostCopies, PoolCopies
from runtime.kv.gpu_swap import GpuCopies
from runtime.kv.layout import KvLayout, PoolMap
from runtime.kv.region import Region
from runtime.protocol import GpuPool, RdmaEnd
from runtime.transfer import verbs
from runtime.transfer.base import Receiver, ReceiverEvents, Runs, Sender
from runtime.transfer.cuda_ipc import CudaIpcReceiver, CudaIpcSender, offer_pool
from runtime.transfer.identity import ProcessIdentity, own_identity
from runtime.transfer.rdma import RdmaOffer, RdmaReceiver, RdmaSender
from runtime.transfer.rdma_adapter import RdmaAdapter
from runtime.transfer.rdma_ports import choose_port
from runtime.transfer.shm import ShmReceiver, ShmSender
from runtime.transfer.tcp import TcpReceiver, TcpSender, memory


def block_runs(source: list[int], target: list[int], size: int) -> Runs:
    rows = [(s * size, t * size, size) for s, t in zip(source, target, strict=True)]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def eventually(condition: Callable[[], object], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass(eq=False)
class Rig:
    """`pool` is prefill's memory, `buffer` decode's; `blocks` blocks of `size` bytes each."""

    kind: str
    blocks: int
    size: int
    streams: int
    buffer: CpuBuffer
    pool: NDArray[np.uint8]
    device: NDArray[np.uint8] | None = None
    """On GPUs, which are stood in for: decode's device pool, all blocks but the first. Over rdma
    `pool` is on one, too."""
    gpu: StandIn = field(default_factory=StandIn)
    """Prefill's,"""
    decode_gpu: StandIn = field(default_factory=StandIn)
    """and decode's."""
    landed: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    child: subprocess.Popen[str] | None = None
    adapters: list[RdmaAdapter] = field(default_factory=list)
    sender: Sender = field(init=False)
    receiver: Receiver = field(init=False)

    @classmethod
    def make(cls, kind: str, blocks: int, size: int, streams: int = 1) -> Rig:
        """`kind`: a path, or rdma_gpu."""
        gpu = on_gpus(kind)
        buffered = 1 if gpu else blocks
        buffer = CpuBuffer.create(f"pdctl-test-{secrets.token_hex(6)}", buffered * size, size)
        device = device_memory((blocks - 1) * size) if gpu else None
        rng = np.random.default_rng(blocks * size)
        pool = rng.integers(0, 256, blocks * size, dtype=np.uint8)
        if kind == "rdma_gpu":
            there = device_memory(pool.nbytes)
            there[:] = pool
            pool = there
        rig = cls(path_of(kind), blocks, size, streams, buffer, pool, device)
        rig.fill(0xEE)
        return rig

    @property
    def on_gpus(self) -> bool:
        return self.device is not None

    @property
    def device_region(self) -> Region:
        assert self.device is not None
        return Region(self.device.ctypes.data, self.device.nbytes)

    @property
    def source(self) -> Region:
        return Region(self.pool.ctypes.data, self.pool.nbytes)

    def fill(self, value: int) -> None:
        """All of decode's memory."""
        memory(self.buffer.region)[:] = bytes([value]) * self.buffer.nbytes
        if self.device is not None:
            self.device[:] = value

    def bytes_of(self, blocks: list[int] | None = None) -> bytes:
        """The bytes of decode's memory, of these blocks in this order."""
        everything = bytes(memory(self.buffer.region))
        if self.device is not None:
            everything += self.device.tobytes()
        if blocks is None:
            return everything
        return b"".join(everything[b * self.size : (b + 1) * self.size] for b in blocks)

    def pool_bytes(self, blocks: list[int]) -> bytes:
        return b"".join(self.pool[b * self.size : (b + 1) * self.size].tobytes() for b in blocks)

    def connect(self) -> None:
        """Both ends in this process."""
        if self.kind == "cuda_ipc":
            self.receiver = CudaIpcReceiver(own_identity())
            name, nbytes = self.buffer.name, self.buffer.nbytes
            self.sender = CudaIpcSender.open(name, nbytes, self.gpu, self._gpu_pool())
        elif self.kind == "shm":
            self.receiver = ShmReceiver(own_identity())
            self.sender = ShmSender.open(self.buffer.name, self.buffer.nbytes)
        elif self.kind == "rdma":
            offer = self._rdma_offer()
            copies = GpuCopies(self.source, self.gpu) if self.on_gpus else HostCopies(self.source)
            self.adapters.append(open_adapter(PREFILL_DEVICE, copies))
            sender = RdmaSender(self.adapters[-1], offer.end, self.buffer.nbytes)
            self.receiver = RdmaReceiver(offer, sender.end, self._events())
            self.sender = sender
        else:
            ours, theirs = _tcp_pairs(self.streams)
            self.receiver = self._tcp_receiver(ours)
            self.sender = TcpSender(theirs)

    def connect_child(self) -> None:
        """The sender in a process of its own, which puts into one block again and again."""
        argv = [sys.executable, __file__, self.kind]
        if self.kind in ("shm", "cuda_ipc"):
            argv += [self.buffer.name, str(self.buffer.nbytes), str(self.size)]
            if self.kind == "cuda_ipc":
                argv.append(msgspec.msgpack.encode(self._gpu_pool()).hex())
            self.child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            assert self.child.stdout is not None
            pid, ticks, boot = self.child.stdout.readline().split()
            receiver = ShmReceiver if self.kind == "shm" else CudaIpcReceiver
            self.receiver = receiver(ProcessIdentity(int(pid), int(ticks), boot))
            return
        if self.kind == "rdma":
            offer = self._rdma_offer()
            end = msgspec.msgpack.encode(offer.end).hex()
            argv += [end, str(self.buffer.nbytes), str(self.size), *verbs.BINDINGS]
            pipe = subprocess.PIPE
            self.child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)
            assert self.child.stdin is not None and self.child.stdout is not None
            theirs = bytes.fromhex(self.child.stdout.readline())
            peer = msgspec.msgpack.decode(theirs, type=RdmaEnd)
            self.receiver = RdmaReceiver(offer, peer, self._events())
            self.child.stdin.close()
            return
        with socket.create_server(("127.0.0.1", 0)) as server:
            argv += ["127.0.0.1", str(server.getsockname()[1]), str(self.size)]
            self.child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            server.settimeout(20)
            self.receiver = self._tcp_receiver([server.accept()[0]])

    def _gpu_pool(self) -> GpuPool:
        layout = KvLayout(1, 1, self.size // 8, 1, "float32")
        offered = offer_pool(
            GpuCopies(self.device_region, self.decode_gpu), PoolMap(layout, self.blocks - 1)
        )
        assert offered is not None
        return offered

    def _rdma_offer(self) -> RdmaOffer:
        buffer = self.buffer.region
        copies: PoolCopies = HostCopies(buffer)
        if self.on_gpus:
            copies = GpuCopies(self.device_region, self.decode_gpu)
        self.adapters.append(open_adapter(DECODE_DEVICE, copies, buffer))
        return RdmaOffer(self.adapters[-1])

    def _tcp_receiver(self, socks: list[socket.socket]) -> TcpReceiver:
        return TcpReceiver(socks, self.buffer.region, self.size, self._events())

    def _events(self) -> ReceiverEvents:
        return ReceiverEvents(
            lambda call: call(),
            self.landed.append,
            lambda nonce, why: self.refused.append((nonce, why)),
            self.closed.append,
        )

    def close(self) -> None:
        if self.child:
            self.child.kill()
            self.child.wait()
            assert self.child.stdout is not None
            self.child.stdout.close()
        else:
            self.sender.abort()
            self.sender.close()
        self.receiver.close()
        for adapter in self.adapters:
            adapter.close()
        self.buffer.close()
        if self.device is not None:
            free_device_memory(self.device)
            if self.kind == "rdma":
                free_device_memory(self.pool)


def open_adapter(device: str, copies: PoolCopies, buffer: Region | None = None) -> RdmaAdapter:
    port = choose_port(RdmaConfig(device=device), [])
    with peermem():
        return RdmaAdapter.open(port, copies, buffer)


def _tcp_pairs(count: int) -> tuple[list[socket.socket], list[socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = [socket.create_connection(server.getsockname()) for _ in range(count)]
        return [server.accept()[0] for _ in range(count)], theirs


def use_bindings(names: Iterable[str]) -> None:
    """Of verbs, only these."""
    verbs.BINDINGS = {name: verbs.BINDINGS[name] for name in names}


def main() -> None:
    """`transport_rig.py shm NAME BYTES BLOCK_BYTES`, `cuda_ipc NAME BYTES BLOCK_BYTES POOL`, `tcp
    HOST PORT BLOCK_BYTES` or `rdma END BYTES BLOCK_BYTES BINDING...`; END and POOL are the
    receiver's, in msgpack and hex.
    """
    kind, where, number, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    pool = np.zeros(size, dtype=np.uint8)
    sender: Sender
    target = 0
    if kind in ("shm", "cuda_ipc"):
        sender = ShmSender.open(where, number)
        if kind == "cuda_ipc":
            theirs = msgspec.msgpack.decode(bytes.fromhex(sys.argv[5]), type=GpuPool)
            sender, target = CudaIpcSender(sender, StandIn(), theirs), 1
        me = own_identity()
        print(me.pid, me.start_ticks, me.boot_id, flush=True)
    elif kind == "rdma":
        use_bindings(sys.argv[5:])
        adapter = open_adapter(PREFILL_DEVICE, HostCopies(Region(pool.ctypes.data, size)))
        peer = msgspec.msgpack.decode(bytes.fromhex(where), type=RdmaEnd)
        target = 1 if peer.pool else 0
        rdma = RdmaSender(adapter, peer, number)
        print(msgspec.msgpack.encode(rdma.end).hex(), flush=True)
        sys.stdin.read()  # until the receiver is connected
        sender = rdma
    else:
        sender = TcpSender([socket.create_connection((where, number))])
    nonce = 0
    while True:
        nonce += 1
        pool[:] = nonce % 256
        sender.put(nonce, Region(pool.ctypes.data, size), block_runs([0], [target], size), 1)


if __name__ == "__main__":
    main()

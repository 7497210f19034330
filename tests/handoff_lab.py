"""Both halves of the hand-over in one process: real roles, sockets, segment and copy threads, fake
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from free_ports import free_port
from gpu_stand_in import peermem
from rdma_lab import devices_for, on_gpus, path_of

from runtime.config import Address, ModelConfig, PeerConfig, RdmaConfig, WorkerConfig
from runtime.engine.contract import EngineEvent
from runtime.engine.role import Parts, Role
from runtime.engine.roles import DecodeRole, PrefillRole, make_role
from runtime.engine.segment import Segment
from runtime.kv.swap import Copy, CopyLane
from runtime.protocol import (
    Event,
    Failed,
    Generate,
    Ledger,
    PeerState,
    RequestId,
    SamplingParams,
    Tokens,
)
from runtime.transfer.mailbox import Mailbox

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * 2 * 1 * 8 * 4 * BLOCK_SIZE
TOKEN = b"a token of tests"


def config(name: str, role: str, **more: Any) -> WorkerConfig:
    values: dict[str, Any] = {
        "deployment": "test",
        "name": name,
        "role": role,
        "token_file": "",
        "listen": Address("127.0.0.1", 1),
        "advertise": "127.0.0.1",
        "model": ModelConfig("fake", "fake"),
        # A fake engine stands in for a GPU's: its pool is out of other processes' reach.
        "device": "cuda:0",
        "block_size": BLOCK_SIZE,
        "kv_cache_bytes": 128 * BLOCK_BYTES,
        "shm_prefix": f"pdctl-test-{secrets.token_hex(6)}",
        **more,
    }
    return WorkerConfig(**values)


@dataclass(eq=False)
class Instance:
    """One role with its fake engine, and what it told its front."""

    config: WorkerConfig
    role: Role
    engine: FakeEngine
    thread: threading.Thread
    segment: Segment
    events: list[Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], object], timeout: float = 10.0) -> None:
        """Poll: what is waited for may be in the other instance or on a thread."""
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.002)

    def ask(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 4,
        deadline_s: float = 30.0,
        prefill: str | None = None,
        id_: RequestId | None = None,
    ) -> RequestId:
        id_ = id_ or RequestId(secrets.token_hex(6))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.role.generate(
            Generate(id=id_, prompt=prompt, params=params, prefill=prefill, deadline_s=deadline_s)
        )
        return id_

    def events_of(self, id_: RequestId) -> list[Tokens | Failed]:
        return [e for e in self.events if isinstance(e, Tokens | Failed) and e.id == id_]

    def tokens_of(self, id_: RequestId) -> list[int]:
        return [t.token for e in self.events_of(id_) if isinstance(e, Tokens) for t in e.tokens]

    def last_of(self, id_: RequestId) -> Tokens | Failed | None:
        """The last message for this id, once it came."""
        events = self.events_of(id_)
        if events and (isinstance(events[-1], Failed) or events[-1].finish is not None):
            return events[-1]
        return None

    async def answer(self, id_: RequestId, timeout: float = 20.0) -> Tokens | Failed:
        await self.until(lambda: self.last_of(id_), timeout)
        last = self.last_of(id_)
        assert last is not None
        return last

    @property
    def ledger(self) -> Ledger:
        return self.role.ledger()

    @property
    def peer_path(self) -> str | None:
        states = [e for e in self.events if isinstance(e, PeerState)]
        return states[-1].path if states else None

    async def idle(self, timeout: float = 10.0) -> None:
        async with asyncio.timeout(timeout):
            while not self.ledger.idle():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.role.close()
        self.engine.stop()
        self.thread.join(5)
        self.engine.close()
        self.segment.close(quiet=True)


async def start(
    settings: WorkerConfig, *, incarnation: str | None = None, **engine: Any
) -> Instance:
    mailbox = Mailbox(asyncio.get_running_loop())
    events: list[Event] = []
    roles: list[Role] = []

    def emit(event: EngineEvent) -> None:
        mailbox.post(lambda: roles[0].on_engine(event))

    incarnation = incarnation or secrets.token_hex(8)
    segment = Segment(settings, incarnation)
    fake = FakeEngine(settings, emit, None, segment.make, **engine)
    roles.append(
        make_role(
            Parts(
                settings,
                TOKEN,
                incarnation,
                fake.fingerprint,
                fake,
                mailbox,
                events.append,
                segment.buffer,
            )
        )
    )
    thread = threading.Thread(target=fake.run, daemon=True)
    thread.start()
    await roles[0].start()
    roles[0].serve()
    return Instance(settings, roles[0], fake, thread, segment, events)


@dataclass(eq=False)
class Pair:
    prefill: Instance
    decode: Instance
    port: int

    async def idle(self) -> None:
        await self.decode.idle()
        await self.prefill.idle()

    async def linked(self) -> None:
        await self.decode.until(lambda: self.decode.peer_path)

    def nothing_kept(self) -> None:
        """Memory does not grow by requests that are over."""
        assert isinstance(self.prefill.role, PrefillRole)
        prefill, decode = self.prefill.role._handoff, self.handoff
        assert not decode._requests and not decode._requests.closing and not prefill._by_engine_id
        for session in decode.peers._up.values():
            assert not session.requests and not session.writer.open
            assert not getattr(session.receiver, "_live", None)
        for outgoing in prefill._sessions.values():
            assert not outgoing.outgoing
        assert not decode.reservations._lost and not decode.reservations._queue

    def swap_out(self, id_: RequestId) -> None:
        """Have decode's engine make room by this request, if it is still there."""
        if request := self.handoff._requests.get(id_):
            self.decode.engine.swap_out(request.engine_id)

    def cut(self) -> None:
        """Break the control connection, as a network would: prefill lives on."""
        assert isinstance(self.prefill.role, PrefillRole)
        for writer in self.prefill.role._server._writers.values():
            writer.transport.abort()

    @property
    def handoff(self) -> Any:
        assert isinstance(self.decode.role, DecodeRole)
        return self.decode.role._handoff


@contextlib.asynccontextmanager
async def pair(
    kind: str,
    *,
    buffer_blocks: int = 64,
    tp_sizes: tuple[int, int] = (1, 1),
    prefill: Any = None,
    gpu: bool = False,
    **decode: Any,
) -> AsyncIterator[Pair]:
    """A linked prefill and decode instance, of these tp_sizes; when the block ends, both are idle
    and leave no segment. `gpu`, and over cuda_ipc and rdma_gpu: on what stands in for GPUs.
    """
    port = free_port()
    devices = [RdmaConfig(**names) for names in devices_for(kind)]
    gpu = gpu or on_gpus(kind)
    with peermem() if kind == "rdma_gpu" else contextlib.nullcontext():
        p = await start(
            config(
                "prefill-0",
                "prefill",
                peer=Address("127.0.0.1", port),
                tp_size=tp_sizes[0],
                rdma=devices[0],
            ),
            gpu=gpu,
            **(prefill or {}),
        )
        d = await start(
            config(
                "decode-0",
                "decode",
                cpu_buffer_bytes=buffer_blocks * BLOCK_BYTES,
                prefill_peers=[PeerConfig("prefill-0", Address("127.0.0.1", port))],
                tp_size=tp_sizes[1],
                rdma=devices[1],
                **{"transfer": path_of(kind), **decode},
            ),
            gpu=gpu,
        )
    made = Pair(p, d, port)
    try:
        await made.linked()
        assert d.peer_path == path_of(kind)
        yield made
        await made.idle()
        made.nothing_kept()
    finally:
        await d.close()
        await made.prefill.close()
    assert not segments(d.config.shm_prefix)


@contextlib.contextmanager
def held(lane: CopyLane) -> Iterator[threading.Event]:
    """Copies that are submitted meanwhile wait for the block's end; the event: one has begun."""
    go, begun = threading.Event(), threading.Event()
    submit = lane.submit

    def submit_held(copy: Copy) -> None:
        first, *rest = copy._pieces

        def late() -> None:
            begun.set()
            go.wait(20)
            first()

        copy._pieces = [late, *rest]
        submit(copy)

    lane.submit = submit_held  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        lane.submit = submit  # type: ignore[method-assign]
        go.set()


def drive(kind: str, scenario: Callable[[Pair], Awaitable[None]], **options: Any) -> None:
    """Run the scenario on a pair of its own."""

    async def main() -> None:
        async with pair(kind, **options) as both:
            await scenario(both)

    asyncio.run(main())


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed * 100_003 + tokens)
    return tuple(rng.randrange(500) for _ in range(tokens))


def segments(prefix: str) -> list[str]:
    return [name for name in os.listdir(Path("/dev/shm")) if name.startswith(prefix)]

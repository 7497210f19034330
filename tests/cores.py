"""Core processes for tests, driven over their front link as the worker front drives them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.link import Link
from runtime.protocol import (
    CoreReady,
    Event,
    Failed,
    Generate,
    GetStats,
    Ledger,
    PeerState,
    RequestId,
    SamplingParams,
    Stats,
    Tokens,
)

START_S = 60.0
FAKE = Path(__file__).parent / "fake_engine.py"


@dataclass(slots=True)
class Answer:
    """All that came for one request."""

    tokens: list[int] = field(default_factory=list)
    last: Tokens | Failed | None = None
    first: Tokens | None = None
    times: list[float] = field(default_factory=list)


class Core:
    """One running core."""

    def __init__(self, process: asyncio.subprocess.Process, link: Link[Event]) -> None:
        self.process = process
        self.link = link
        self.ready: CoreReady | None = None
        self.peers: dict[str, PeerState] = {}
        self.answers: dict[str, Answer] = {}
        self.changed = asyncio.Condition()
        self._stats: dict[int, asyncio.Future[Stats]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            event = await self.link.receive()
            match event:
                case CoreReady():
                    self.ready = event
                case PeerState():
                    self.peers[event.name] = event
                case Stats():
                    self._stats.pop(event.seq).set_result(event)
                case Tokens() | Failed():
                    answer = self.answers.setdefault(event.id, Answer())
                    answer.last = event
                    if isinstance(event, Tokens):
                        answer.first = answer.first or event
                        answer.tokens += [t.token for t in event.tokens]
                        answer.times.append(asyncio.get_running_loop().time())
            async with self.changed:
                self.changed.notify_all()

    async def until(self, condition: Callable[[], object], timeout: float = 30.0) -> None:
        async with asyncio.timeout(timeout), self.changed:
            await self.changed.wait_for(lambda: bool(condition()))

    async def linked(self, peer: str) -> None:
        await self.until(lambda: peer in self.peers and self.peers[peer].path)

    async def ask(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 8,
        deadline_s: float = 60.0,
        prefill: str | None = None,
        **params: Any,
    ) -> Answer:
        id_ = self.send(
            prompt, max_tokens=max_tokens, deadline_s=deadline_s, prefill=prefill, **params
        )
        return await self.wait(id_)

    def send(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int = 8,
        deadline_s: float = 60.0,
        prefill: str | None = None,
        **params: Any,
    ) -> RequestId:
        id_ = RequestId(secrets.token_hex(6))
        self.answers[id_] = Answer()
        params = {"temperature": 0.0, **params}
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        self.link.send(
            Generate(id=id_, prompt=prompt, params=sampling, prefill=prefill, deadline_s=deadline_s)
        )
        return id_

    async def wait(self, id_: RequestId, timeout: float = 60.0) -> Answer:
        answer = self.answers[id_]

        def ended() -> bool:
            last = answer.last
            return isinstance(last, Failed) or (last is not None and last.finish is not None)

        await self.until(ended, timeout)
        return answer

    async def stats(self) -> Stats:
        seq = len(self._stats) + secrets.randbelow(1 << 30)
        future = self._stats[seq] = asyncio.get_running_loop().create_future()
        self.link.send(GetStats(seq))
        async with asyncio.timeout(10):
            return await future

    async def ledger(
        self, condition: Callable[[Ledger], bool] = Ledger.idle, timeout: float = 10.0
    ) -> Ledger:
        """The ledger, once it reads so; fails showing what it reads."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not condition(ledger := (await self.stats()).ledger):
            assert asyncio.get_running_loop().time() < deadline, ledger
            await asyncio.sleep(0.02)
        return ledger

    async def idle(self, timeout: float = 10.0) -> Ledger:
        return await self.ledger(timeout=timeout)

    async def close(self, timeout: float = 15.0) -> int:
        """As a front that stops: close the link, the core ends."""
        self._reader.cancel()
        self.link.close()
        try:
            async with asyncio.timeout(timeout):
                return await self.process.wait()
        finally:
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()


class Cores:
    """Starts cores of one deployment in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = f"pdctl-test-{secrets.token_hex(4)}"
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(16))
        self.token.chmod(0o600)
        self.all: list[Core] = []

    def config(self, name: str, role: str, model: str, **more: Any) -> Path:
        path = self.folder / f"{name}.json"
        body = {
            "deployment": "test",
            "name": name,
            "role": role,
            "token_file": str(self.token),
            "listen": {"host": "127.0.0.1", "port": 1},
            "advertise": "127.0.0.1",
            "model": {"path": model, "name": "test"},
            # Registered with an RDMA device it is all touched: slow in the guest when it is much.
            "kv_cache_bytes": (32 if more.get("rdma") else 256) << 20,
            "shm_prefix": f"{self.prefix}.{name}",
            "threads": 1,
            **more,
        }
        path.write_text(json.dumps(body))
        return path

    async def start(
        self,
        config: Path,
        *,
        fake: bool = False,
        script: Path | None = None,
        ready: bool = True,
        env: dict[str, str] | None = None,
        within: tuple[str, ...] = (),
    ) -> Core:
        """`fake`: with FakeEngine in place of the model. `script`: in place of `-m runtime`.
        `within`: a command that runs the core.
        """
        ours, theirs = socket.socketpair()
        script = FAKE if fake else script
        argv = (sys.executable, str(script)) if script else (sys.executable, "-m", "runtime")
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *within,
                *argv,
                "core",
                "--config",
                str(config),
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stderr=asyncio.subprocess.PIPE if not ready else None,
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        core = Core(process, Link(reader, writer, Event))
        self.all.append(core)
        if ready:
            await core.until(lambda: core.ready, START_S)
        return core

    def segments(self) -> list[str]:
        return [n for n in os.listdir("/dev/shm") if n.startswith(self.prefix)]

    async def close(self) -> None:
        for core in self.all:
            with contextlib.suppress(TimeoutError):
                await core.close()


@contextlib.asynccontextmanager
async def running_cores(folder: Path) -> AsyncIterator[Cores]:
    cores = Cores(folder)
    try:
        yield cores
    finally:
        await cores.close()

"""Rank 0's side of a tensor-parallel instance: the other ranks' processes, and the words to them.

`RankProcesses` (asyncio thread) starts them, notices the end of any, and ends them. `RankLinks`
(engine thread) has them load and compute. The processes themselves are follower.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from dataclasses import dataclass
from pathlib import Path

from runtime.engine.rank_protocol import FromRank, RankLoaded, RankStart, RankUp, Step
from runtime.errors import RankError
from runtime.link import BlockingLink, LinkClosed

STEP_S = 30.0
"""A rank that does not do its part of a step, or take the next one, for this long is lost."""
_NAME_S = 2.0


@dataclass(frozen=True, slots=True)
class RankLinks:
    """What the engine needs of the other ranks."""

    links: tuple[BlockingLink[FromRank], ...]
    """Of ranks 1, 2, ..."""
    meeting: int
    pool: int
    """Descriptors of memory files: see follower.Inherited."""

    def start(self) -> None:
        """Wait until they have come up, however long that takes, and have them load."""
        for rank, link in enumerate(self.links, start=1):
            self._hear(rank, link, RankUp)
        for link in self.links:
            link.send(RankStart())

    def wait_loaded(self) -> None:
        for rank, link in enumerate(self.links, start=1):
            self._hear(rank, link, RankLoaded)
            link.set_timeout(STEP_S)

    def compute(self, step: Step) -> None:
        """Returns when they have been told, not when they are done."""
        for link in self.links:
            link.send(step)

    def _hear(
        self, rank: int, link: BlockingLink[FromRank], kind: type[RankUp] | type[RankLoaded]
    ) -> None:
        try:
            message = link.receive()
        except LinkClosed as e:
            raise RankError(f"rank {rank} of {len(self.links) + 1}: {e}") from e
        assert isinstance(message, kind), message


class RankProcesses:
    """Ranks 1..tp_size-1 of this instance. For the asyncio thread."""

    def __init__(self, config_path: Path, tp_size: int) -> None:
        self._config_path = config_path
        self._tp_size = tp_size
        self._processes: list[Process] = []
        self._sockets: list[socket.socket] = []
        self._watches: list[asyncio.Task[None]] = []
        self._ending = False
        self.lost: asyncio.Future[RankError] = asyncio.get_running_loop().create_future()
        """Done when the first of them has ended unasked."""

    async def start(self) -> RankLinks:
        """Must be called on the main thread: a child dies with the thread that started it."""
        meeting, pool = (os.memfd_create(f"pdctl-{what}") for what in ("meeting", "pool"))
        for rank in range(1, self._tp_size):
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            with theirs:
                descriptors = {"--fd": theirs.fileno(), "--meeting": meeting, "--pool": pool}
                await self._spawn(rank, descriptors)
        links = tuple(BlockingLink[FromRank](sock, FromRank) for sock in self._sockets)
        return RankLinks(links, meeting, pool)

    async def _spawn(self, rank: int, descriptors: dict[str, int]) -> None:
        arguments = [f"{name}={fd}" for name, fd in descriptors.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "runtime",
            "rank",
            "--config",
            str(self._config_path),
            f"--rank={rank}",
            *arguments,
            pass_fds=tuple(descriptors.values()),
            stdin=asyncio.subprocess.DEVNULL,
        )
        self._processes.append(process)
        self._watches.append(asyncio.create_task(self._watch(rank, process), name=f"rank {rank}"))

    async def _watch(self, rank: int, process: Process) -> None:
        code = await process.wait()
        if self._ending or self.lost.done():
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        message = f"rank {rank} of {self._tp_size} (pid {process.pid}) ended {how}"
        self.lost.set_result(RankError(message, hint="its own last lines are above"))

    async def close(self, failure: Exception | None) -> None:
        """End them all. The engine sends no step any more, because of `failure` perhaps."""
        if isinstance(failure, RankError):
            # The engine may have heard first; how the process ended says more.
            await asyncio.wait([self.lost], timeout=_NAME_S)
        self._ending = True
        for process in self._processes:
            if process.returncode is None:
                process.kill()  # it may be in the middle of loading, and holds nothing
        if self._watches:
            await asyncio.wait(self._watches)
        # Sockets and files go with this process: the engine's thread may still be at them.

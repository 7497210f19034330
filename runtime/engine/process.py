"""The engine core's process: engine thread, asyncio thread, front link, and an end that leaves
nothing.

Owns start and stop. It dies with its front: the link's end, a signal, or the death of the parent
stop it. What it serves is the role's (roles.py); what it computes is the engine's (core.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from runtime.config import WorkerConfig, load, read_token
from runtime.engine.contract import EngineEvent
from runtime.engine.core import Engine
from runtime.engine.engine_thread import EngineThread, Tested, engine_runs
from runtime.engine.lifetime import die_with_parent
from runtime.engine.ranks import RankProcesses
from runtime.engine.role import Parts, Role
from runtime.engine.roles import make_role
from runtime.engine.segment import Segment
from runtime.errors import RuntimeFailure
from runtime.link import Link, LinkClosed
from runtime.protocol import (
    Abort,
    Command,
    CoreReady,
    Event,
    Failed,
    Generate,
    GetStats,
    Ledger,
    Measure,
    Measured,
    SetPeers,
    Stats,
)
from runtime.transfer.mailbox import Mailbox

_log = logging.getLogger(__name__)

_ENGINE_STOP_S = 10.0
_FRONT_DIED = signal.SIGUSR1
"""From the kernel, and from nobody else: so the log can tell it from a SIGTERM."""
_LOST_STOP_S = 1.0
"""After the loss of a rank: the engine waits for it in a step, and may do so for long."""


def run_core(config_path: Path, fd: int) -> int:
    """Serve until the front goes. Raises RuntimeFailure when the core cannot start."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s core %(levelname)s %(name)s: %(message)s",
    )
    config = load(config_path, WorkerConfig)
    token = read_token(config.token_file)
    if config.device == "cpu":
        # Pinning the buffer would else create a context on GPU 0 of a host that has one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    die_with_parent(_FRONT_DIED)
    front = socket.socket(fileno=fd)
    try:
        code = asyncio.run(_Core(config, token, config_path).run(front))
    except RuntimeFailure as e:
        if not engine_runs():
            raise
        print(f"core: {e.line}", file=sys.stderr, flush=True)
        code = 1
    if engine_runs():
        # All that outlives a process was given back; an interpreter that shuts down under running
        # torch code may crash instead of ending.
        logging.shutdown()
        os._exit(code)
    return code


class _Core:
    def __init__(self, config: WorkerConfig, token: bytes, config_path: Path) -> None:
        self._config = config
        self._token = token
        self._config_path = config_path
        self._incarnation = secrets.token_hex(8)
        self._segment = Segment(config, self._incarnation)
        self._role: Role | None = None
        self._engine: Engine | None = None
        self._link: Link[Command] | None = None
        self._stop = asyncio.Event()
        self._measuring: set[asyncio.Task[None]] = set()

    async def run(self, front: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, _FRONT_DIED):
            loop.add_signal_handler(number, self._on_signal, number)
        reader, writer = await asyncio.open_connection(sock=front)
        self._link = Link(reader, writer, Command)
        mailbox = Mailbox(loop)
        ranks = RankProcesses(self._config_path, self._config.tp_size)
        links = await ranks.start() if self._config.tp_size > 1 else None
        # Events go straight to the role once there is one; before that the engine has no requests.
        thread = EngineThread(
            self._config,
            mailbox,
            lambda event: mailbox.post(lambda: self._on_engine(event)),
            links,
            self._segment,
        )
        receiving = asyncio.create_task(self._receive(self._link), name="front")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await _first(thread.loaded, thread.ended, stopping, ranks.lost)
            if thread.loaded.done() and not stopping.done() and not ranks.lost.done():
                await self._serve(thread.loaded.result(), mailbox)
                await _first(thread.ended, stopping, ranks.lost)
        finally:
            receiving.cancel()
            stopping.cancel()
            for task in self._measuring:
                task.cancel()
            await asyncio.gather(*self._measuring, return_exceptions=True)
            if self._role:
                await self._role.close()
            await thread.stop(_LOST_STOP_S if ranks.lost.done() else _ENGINE_STOP_S)
            self._segment.close(quiet=not thread.alive)
            await ranks.close(thread.failure())
            # Last: the front gives this process little time from here on.
            writer.transport.abort()
        return self._exit_code(thread, ranks)

    def _exit_code(self, thread: EngineThread, ranks: RankProcesses) -> int:
        failure: Exception | None
        failure = ranks.lost.result() if ranks.lost.done() else thread.failure()
        if isinstance(failure, RuntimeFailure):
            raise failure
        return 0 if failure is None else 1

    async def _serve(self, loaded: Tested, mailbox: Mailbox) -> None:
        engine = self._engine = loaded.engine
        self._role = make_role(
            Parts(
                self._config,
                self._token,
                self._incarnation,
                engine.fingerprint,
                engine,
                mailbox,
                self._send,
                self._segment.buffer,
            )
        )
        await self._role.start()
        self._send(
            CoreReady(
                incarnation=self._incarnation,
                fingerprint=engine.fingerprint,
                max_model_len=engine.max_model_len,
                vocab_size=engine.vocab_size,
                eos_token_ids=tuple(engine.eos_token_ids),
                num_device_blocks=engine.num_blocks,
                num_buffer_blocks=self._role.num_buffer_blocks,
                load_s=loaded.load_s,
                self_test_s=loaded.self_test_s,
            )
        )
        _log.info(
            "%s (%s) ready: loaded in %.1f s, tested in %.2f s",
            self._config.name,
            self._config.role,
            loaded.load_s,
            loaded.self_test_s,
        )
        self._role.serve()

    def _on_signal(self, number: signal.Signals) -> None:
        self._end("the front has died" if number == _FRONT_DIED else number.name)

    def _end(self, why: str) -> None:
        """Said before all that follows from it is."""
        if not self._stop.is_set():
            _log.info("this instance stops: %s", why)
        self._stop.set()

    def _on_engine(self, event: EngineEvent) -> None:
        if self._role:
            self._role.on_engine(event)

    # ---- the front link -------------------------------------------------------------------------

    async def _receive(self, link: Link[Command]) -> None:
        try:
            while True:
                command = await link.receive()
                try:
                    self._on_command(command)
                except Exception:
                    # Boundary of one command: a bug fails one request, not the instance.
                    _log.exception("a command failed: %s", type(command).__name__)
                    if isinstance(command, Generate):
                        self._fail(command, "internal error", 500)
        except LinkClosed as e:
            self._end(f"the front is gone: {e}")
        finally:
            self._stop.set()

    def _on_command(self, command: Command) -> None:
        match command:
            case Generate() if self._role:
                self._role.generate(command)
            case Generate():
                self._fail(command, f"{self._config.name} is still starting", 503)
            case Abort():
                if self._role:
                    self._role.abort(command.id)
            case SetPeers():
                if self._role:
                    self._role.set_peers(command.peers)
            case Measure():
                task = asyncio.create_task(self._measure(command), name="measure")
                self._measuring.add(task)
                task.add_done_callback(self._measuring.discard)
            case GetStats():
                self._send(self._stats(command.seq))

    def _fail(self, command: Generate, message: str, status: int) -> None:
        retry = 1.0 if status == 503 else None
        name = self._config.name
        self._send(
            Failed(
                id=command.id, message=message, status=status, instance=name, retry_after_s=retry
            )
        )

    def _send(self, event: Event) -> None:
        assert self._link is not None
        try:
            self._link.send(event)
        except LinkClosed as e:
            self._end(f"the front is gone: {e}")

    async def _measure(self, ask: Measure) -> None:
        if self._role is None:
            error = f"{self._config.name} is still starting"
            self._send(Measured(seq=ask.seq, error=error, status=503))
        else:
            self._send(await self._role.measure(ask))

    def _stats(self, seq: int) -> Stats:
        if self._role is None or self._engine is None:
            return Stats(
                seq=seq,
                ledger=Ledger(),
                device_blocks_total=0,
                device_blocks_cached=0,
                buffer_blocks_total=0,
                peers={},
                counters={},
            )
        engine = self._engine.stats()
        counters = dict(engine.counters)
        for name, value in self._role.counters().items():
            counters[name] = counters.get(name, 0.0) + value
        return Stats(
            seq=seq,
            ledger=self._role.ledger(),
            device_blocks_total=engine.device_blocks_total,
            device_blocks_cached=engine.device_blocks_cached,
            buffer_blocks_total=self._role.num_buffer_blocks,
            peers=self._role.peers(),
            counters=counters,
        )


async def _first(*waits: asyncio.Future[Any]) -> None:
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

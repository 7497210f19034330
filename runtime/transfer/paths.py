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
from dataclasses import dataclass

from runtime.config import TransferKind
from runtime.errors import TransferError
from runtime.kv.buffer import CpuBuffer
from runtime.link import Link, LinkClosed
from runtime.protocol import Hello, HelloData, PeerReply, Pong, Welcome
from runtime.transfer.base import PathKind, Receiver, ReceiverEvents, Sender
from runtime.transfer.identity import ProcessIdentity
from runtime.transfer.shm import ShmReceiver, ShmSender
from runtime.transfer.tcp import TcpReceiver, detach

_log = logging.getLogger(__name__)

_BEST_FIRST: tuple[PathKind, ...] = ("shm", "tcp")

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
    """Why it is not a better one."""


class SenderPaths:
    """For a prefill instance."""

    def __init__(self, instance: str, transfer: TransferKind) -> None:
        self._instance = instance
        self._transfer = transfer

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
            try:
                sender = await self._sender(path, hello)
            except TransferError as e:
                if wanted:
                    raise TransferError(f"{path} was asked for: {e}") from e
                _log.info("%s: no %s: %s", hello.instance, path, e)
                passed.append(f"no {path}: {e}")
            else:
                return OpenedPath(path, sender, "; ".join(passed))
        raise TransferError("; ".join(passed))

    async def _sender(self, path: PathKind, hello: Hello) -> Sender | None:
        if path == "shm":
            # In a thread: mapping, and locking, gigabytes takes a while.
            return await asyncio.to_thread(ShmSender.open, hello.segment, hello.segment_bytes)
        return None


class ReceiverPaths:
    """For a decode instance."""

    def __init__(self, buffer: CpuBuffer) -> None:
        self._buffer = buffer

    async def open(self, welcome: Welcome, dial: Dial, events: ReceiverEvents) -> Receiver:
        """Decode's end of the path that prefill chose."""
        if welcome.path == "shm":
            return ShmReceiver(ProcessIdentity(welcome.pid, welcome.start_ticks, welcome.boot_id))
        buffer = self._buffer
        async with contextlib.AsyncExitStack() as dialled:
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

"""Prefill's sessions end with their connection, whatever was under way: nothing of decode's memory
stays mapped.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from handoff_lab import BLOCK_BYTES, TOKEN, Instance, config, held, prompt, start

from runtime.config import Address, PeerConfig
from runtime.engine.roles import DecodeRole, PrefillRole
from runtime.link import Link, authenticate_client
from runtime.protocol import Hello, PeerReply
from runtime.transfer import handoff_prefill
from runtime.transfer.handoff_prefill import PrefillHandoff
from runtime.transfer.paths import OpenedPath
from runtime.transfer.peer_server import PeerServer
from runtime.transfer.prefill_request import PrefillSession


def handoff_of(p: Instance) -> PrefillHandoff:
    assert isinstance(p.role, PrefillRole)
    return p.role._handoff


def mapped(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_connection_that_is_reset_while_its_path_opens_leaves_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_path, gone = PeerServer._path, asyncio.Event()
    opened: list[PrefillSession] = []

    async def path(self: PeerServer, hello: Hello) -> OpenedPath:
        """Takes until the connection is lost."""
        found = await real_path(self, hello)
        await gone.wait()
        return found

    real_open = PeerServer._open

    async def open_session(self: PeerServer, hello: Hello, link: Any, writer: Any) -> Any:
        async def watch() -> None:
            while not writer.is_closing():
                await asyncio.sleep(0.001)
            gone.set()

        watching = asyncio.create_task(watch())
        made = await real_open(self, hello, link, writer)
        await watching
        return made

    real_opened = PrefillHandoff.open_session
    monkeypatch.setattr(PeerServer, "_path", path)
    monkeypatch.setattr(PeerServer, "_open", open_session)
    monkeypatch.setattr(
        PrefillHandoff, "open_session", lambda self, s: (opened.append(s), real_opened(self, s))
    )

    async def main() -> None:
        port = free_port()
        p = await start(config("prefill-0", "prefill", peer=Address("127.0.0.1", port)))
        d = await start(config("decode-0", "decode", cpu_buffer_bytes=8 * BLOCK_BYTES))
        assert isinstance(d.role, DecodeRole)
        hello = d.role._hello()
        before = mapped(hello.segment)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await authenticate_client(reader, writer, TOKEN)
        link: Link[PeerReply] = Link(reader, writer, PeerReply)
        link.send(hello)
        await link.drain()
        # Closed like this a connection is reset.
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await p.until(lambda: opened and not handoff_of(p)._sessions)
        assert not p.role.peers() and mapped(hello.segment) == before
        await d.close()
        await p.close()

    asyncio.run(main())


def test_a_put_that_takes_long_to_end_keeps_its_session_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handoff_prefill, "STALL_S", 0.05)

    async def main() -> None:
        port = free_port()
        p = await start(config("prefill-0", "prefill", peer=Address("127.0.0.1", port)))
        address = PeerConfig("prefill-0", Address("127.0.0.1", port))
        d = await start(
            config(
                "decode-0",
                "decode",
                cpu_buffer_bytes=16 * BLOCK_BYTES,
                prefill_peers=[address],
                transfer="shm",
            )
        )
        await d.until(lambda: d.peer_path)
        handoff = handoff_of(p)
        [session] = handoff._sessions.values()
        ends: list[bool] = []
        real = handoff.end_session

        async def end_session(session: PrefillSession) -> bool:
            ends.append(await real(session))
            return ends[-1]

        monkeypatch.setattr(handoff, "end_session", end_session)
        with held(session.lane) as begun:
            d.ask(prompt(9))
            await p.until(begun.is_set)
            await d.close()
            await p.until(lambda: False in ends)
            assert handoff._sessions
        await p.until(lambda: not handoff._sessions)
        await p.close()

    asyncio.run(main())

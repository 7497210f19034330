"""What a failed exchange is called: the system's words, not a library's."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from runtime.reasons import reason


def failure(port: int) -> Exception:
    async def go() -> None:
        url = f"http://127.0.0.1:{port}/"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            await response.read()

    with pytest.raises(aiohttp.ClientError) as caught:
        asyncio.run(go())
    return caught.value


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert reason(failure(unused.getsockname()[1])) == "Connection refused"


def test_an_answer_that_breaks_off() -> None:
    async def serve() -> str:
        async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            writer.close()

        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return reason(await asyncio.to_thread(failure, port))

    assert asyncio.run(serve()) == "the connection ended in the middle of the answer"


def test_what_has_no_words_has_its_name() -> None:
    assert reason(aiohttp.ServerDisconnectedError()) == "Server disconnected"
    assert reason(TimeoutError()) == "TimeoutError"

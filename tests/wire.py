"""A TCP forwarder that can be cut: connections stay open and silent, as when a network drops every
packet, and go on where they were when it is mended."""

from __future__ import annotations

import asyncio


class Wire:
    """Listens on `port` of the loopback and forwards to `target`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            await self._whole.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(far_writer)
            # The first side that ends takes the other with it.
            await asyncio.gather(
                self._forward(reader, far_writer), self._forward(far_reader, writer)
            )
        except (OSError, asyncio.CancelledError):
            pass  # an end of one side, or `close`
        finally:
            self._tasks.discard(task)
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 18):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        await self._whole.wait()
        raise ConnectionResetError("one side ended")

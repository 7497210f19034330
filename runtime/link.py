"""Framed, typed message streams over a connected socket, for asyncio and for a thread.

Owns the frame format and the mutual proof of the deployment's token. Knows no message's meaning.
A closed or broken stream surfaces at once as LinkClosed: a peer's death is an event, not a timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from runtime.errors import RuntimeFailure

MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")
_NONCE = 32
_MAGIC = b"pdctl/1\n"

M = TypeVar("M")


class LinkClosed(RuntimeFailure):
    """The other side is gone, or sent something that is not ours."""


class Link(Generic[M]):
    """One stream. `receive` decodes to `incoming`; `send` takes any protocol struct.

    `send` is safe from any task of the loop: a frame is written whole. It does not wait for the
    peer;
    `drain` does.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: msgspec.Struct) -> None:
        if self._writer.is_closing():
            raise LinkClosed("the connection is closed")
        payload = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as e:
            raise LinkClosed(str(e) or "connection lost") from e

    async def receive(self) -> M:
        """The next message. Raises LinkClosed at the end of the stream or on bytes that do not
        decode."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_FRAME:
                raise LinkClosed(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as e:
            raise LinkClosed("the other side closed the connection") from e
        except msgspec.MsgspecError as e:
            raise LinkClosed(f"not a message of this protocol: {e}") from e

    def close(self) -> None:
        self._writer.close()


class BlockingLink(Generic[M]):
    """The same frames over a blocking socket, for a thread that has nothing else to do."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    def set_timeout(self, seconds: float) -> None:
        """Of sending and receiving; without it there is none."""
        self._socket.settimeout(seconds)

    def send(self, message: msgspec.Struct) -> None:
        payload = self._encoder.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as e:
            raise LinkClosed(str(e) or "connection lost") from e

    def receive(self) -> M:
        """The next message. Raises LinkClosed at the end of the stream or on bytes that do not
        decode."""
        try:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if size > MAX_FRAME:
                raise LinkClosed(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            return self._decoder.decode(self._read(size))
        except OSError as e:
            raise LinkClosed(str(e) or "connection lost") from e
        except msgspec.MsgspecError as e:
            raise LinkClosed(f"not a message of this protocol: {e}") from e

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise LinkClosed("the other side closed the connection")
            at += got
        return data


def _proof(token: bytes, side: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.new(token, _MAGIC + side + client + server, hashlib.sha256).digest()


async def authenticate_client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """Prove the token to the server and have it proven back; the token itself is never sent."""
    client = secrets.token_bytes(_NONCE)
    writer.write(_MAGIC + client)
    try:
        answer = await reader.readexactly(2 * _NONCE)
    except (asyncio.IncompleteReadError, OSError) as e:
        raise LinkClosed("the other side closed the connection during authentication") from e
    server, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(token, b"server", client, server)):
        raise LinkClosed("the other side does not know this deployment's token")
    writer.write(_proof(token, b"client", client, server))


async def authenticate_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """The server's half. Raises LinkClosed on a wrong token, after which the caller closes the
    connection."""
    try:
        head = await reader.readexactly(len(_MAGIC) + _NONCE)
        if not head.startswith(_MAGIC):
            raise LinkClosed("not this protocol")
        client, server = head[len(_MAGIC) :], secrets.token_bytes(_NONCE)
        writer.write(server + _proof(token, b"server", client, server))
        proof = await reader.readexactly(_NONCE)
    except (asyncio.IncompleteReadError, OSError) as e:
        raise LinkClosed("the other side closed the connection during authentication") from e
    if not hmac.compare_digest(proof, _proof(token, b"client", client, server)):
        raise LinkClosed("the other side does not know this deployment's token")

"""The transport contract: how bytes get from prefill's pool into reserved blocks of decode's CPU
buffer, or of its device pool.

A Sender and a Receiver belong to one session between one prefill and one decode instance. Blocks of
a nonce become whole in the order in which they were reserved. Each of their bytes is put once, in
as many puts and runs as the sender likes, such as some layers of many blocks. tests/contract/ holds
every transport to this file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from runtime.kv.region import Region
from runtime.kv.swap import Post

PathKind = Literal["cuda_ipc", "shm", "rdma", "tcp"]
"""Best first: in this order they are tried when both sides leave the choice (`auto`)."""

Runs = NDArray[np.int64]
"""(n, 3): source offset, destination offset, length in bytes; as `copy_runs` takes them."""


class Sender(ABC):
    """Prefill's end."""

    path: ClassVar[PathKind]
    put_lands: ClassVar[bool]
    """The bytes are in place when `put` returns; otherwise only the receiver knows."""
    put_fences: ClassVar[bool] = True
    """Nothing of a put that raised is written once a terminal message about it has arrived, and the
    next put may do better. False: only the end of the session is proof of that, and so it ends.
    """
    reads_gpu: bool = False
    """`put` takes the device pool on this process's GPU as its source, too."""
    pool_bytes: int = 0
    """Of decode's device pool on a GPU, where `put` reaches it: numbered after the buffer's."""

    @abstractmethod
    def put(self, nonce: int, source: Region, runs: Runs, whole: int) -> int:
        """Copy or send the runs; blocks, with the interpreter lock released. One thread at a time.
        `whole`: how many of the nonce's first blocks have all their bytes with this put.

        Returns the bytes. Raises TransferError; whether or not it does, this put writes nothing
        afterwards.
        """

    def target(self) -> Region | None:
        """Decode's buffer, where this process can write it by itself. Raises TransferError once
        aborted.
        """
        return None

    @abstractmethod
    def abort(self) -> None:
        """From any thread: a waiting put soon ends in TransferError, as does each later one."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the sender holds. Only after the last put has returned. Idempotent."""


@dataclass(frozen=True, slots=True)
class ReceiverEvents:
    """What a receiver that sees bytes arrive tells: on the asyncio thread, through `post`."""

    post: Post
    on_landed: Callable[[int], None]
    """(nonce): more of its blocks are complete."""
    on_refused: Callable[[int, str], None]
    """(nonce, why): what came was not for the next blocks of this live nonce."""
    on_closed: Callable[[str], None]
    """(why), once, unless `close` was called first: the connection ended."""


class Receiver(ABC):
    """Decode's end. For the asyncio thread; no method waits for the peer."""

    path: ClassVar[PathKind]
    reaches_pool: bool = False
    """Blocks may also be of the device pool on a GPU, numbered after the buffer's."""

    @abstractmethod
    def expect(self, nonce: int, blocks: tuple[int, ...]) -> None:
        """From now on bytes for `nonce` may land in these blocks."""

    @abstractmethod
    def landed(self, nonce: int, reported: int) -> int:
        """How many of the first blocks hold their final bytes, given how many the sender has
        reported.
        """

    @abstractmethod
    def revoke(self, nonce: int) -> bool:
        """Nothing for `nonce` is wanted any more. True: from now on its blocks are never written.

        False: a writer may be at them until it sends a terminal message or `writer_gone` is True.
        """

    @abstractmethod
    def writer_gone(self) -> bool:
        """Proven: nothing of this session is written any more. Stays True."""

    @abstractmethod
    def close(self) -> None:
        """End of the session. Idempotent; ask `writer_gone` afterwards."""

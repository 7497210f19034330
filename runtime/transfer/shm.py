"""Transport over shared memory: prefill maps decode's buffer by name and copies into it.

That the segment opens by its unguessable name, with its size, proves that both processes see the
same /dev/shm. A writer here can be stopped by nobody but itself, so decode's fence is the writer's
proven death.
"""

from __future__ import annotations

from typing import ClassVar

from runtime._native import PinnedShm, free_pinned_shm, open_pinned_shm
from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.kv.swap import copy_region
from runtime.transfer.base import PathKind, Receiver, Runs, Sender
from runtime.transfer.identity import ProcessIdentity, proven_dead, seen_alive


class ShmSender(Sender):
    path = "shm"
    put_lands = True

    def __init__(self, segment: PinnedShm) -> None:
        self._segment = segment
        self._aborted = False

    @classmethod
    def open(cls, name: str, nbytes: int) -> ShmSender:
        """Raises TransferError saying why the segment cannot be used from here."""
        try:
            return cls(open_pinned_shm(name, nbytes))
        except FileNotFoundError as e:
            raise TransferError(f"segment {name} is not in this host's /dev/shm") from e
        except (OSError, ValueError) as e:
            raise TransferError(f"segment {name}: {e}") from e

    def put(self, nonce: int, source: Region, runs: Runs, whole: int) -> int:
        return copy_region(self.target(), source, runs)

    def target(self) -> Region:
        if self._aborted:
            raise TransferError("the session is closed")
        return Region(self._segment.address, self._segment.nbytes)

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True
        free_pinned_shm(self._segment, unlink=False)


class ShmReceiver(Receiver):
    path: ClassVar[PathKind] = "shm"

    def __init__(self, writer: ProcessIdentity) -> None:
        self._writer = writer
        # Asked while the session opens, when the writer certainly lives: if it cannot be seen now,
        # its absence later proves nothing, and only a new session of the same incarnation is a
        # fence.
        self._visible = seen_alive(writer)
        self._gone = False

    def expect(self, nonce: int, blocks: tuple[int, ...]) -> None:
        pass

    def landed(self, nonce: int, reported: int) -> int:
        return reported

    def revoke(self, nonce: int) -> bool:
        return self.writer_gone()

    def writer_gone(self) -> bool:
        if not self._gone:
            self._gone = self._visible and proven_dead(self._writer)
        return self._gone

    def close(self) -> None:
        pass

"""The few verbs that the rdma transport needs, the same over either Python binding.

Debian's `pyverbs` (python3-pyverbs) is taken where it can be imported, else PyPI's `ibverbs`; for
memory of a GPU the other way round. Every failure of a call is a TransferError that names the call.
Knows nothing of blocks and sessions.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import TransferError
from runtime.kv.region import Region

BINDINGS = {
    "pyverbs": "runtime.transfer.verbs_pyverbs",
    "ibverbs": "runtime.transfer.verbs_ibverbs",
}
"""The module of each adapter, in the order of preference."""
TAKES_DMABUF = "ibverbs"
"""The one that can register a dmabuf by the address which it has in this process."""

RETRIES = 6
"""For ever is 7, in some drivers: a dead peer must end a write."""
ACK_TIMEOUT = 16
"""4.096 us * 2**16, about a quarter second between retries: a peer counts as gone after two
seconds, a link that flaps for less is waited for."""
RNR_RETRIES = 7
"""A receiver that has no receive posted is stopped, not gone: the put's own deadline ends that."""
RNR_TIMER = 12
HOP_LIMIT = 64
RECEIVE_BYTES = 16
MAX_PIECES = 16

_STATUS = (
    *("SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR"),
    *("MW_BIND_ERR", "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR"),
    *("REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR"),
    *("REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR", "INV_EEC_STATE_ERR", "FATAL_ERR"),
    *("RESP_TIMEOUT_ERR", "GENERAL_ERR"),
)
"""In the order of ibv_wc_status."""
_MEANING = {
    "WR_FLUSH_ERR": "the queue pair was closed, or its port went down",
    "LOC_PROT_ERR": "the source memory is not registered",
    "REM_ACCESS_ERR": "the peer's memory is not open to this key",
    "RETRY_EXC_ERR": "the peer does not acknowledge: it is gone, or the network is cut",
    "RNR_RETRY_EXC_ERR": "the peer posts no receives",
}


@dataclass(frozen=True, slots=True)
class Completion:
    tag: int
    status: int
    nbytes: int

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def error(self) -> str:
        """The status by its name, and what it usually means."""
        known = self.status < len(_STATUS)
        name = _STATUS[self.status] if known else f"status {self.status}"
        return f"{name} ({_MEANING[name]})" if name in _MEANING else name


@dataclass(frozen=True, slots=True)
class PortFacts:
    """`mtu` is ibv_mtu's number, 1 to 5 for 256 to 4096 bytes; `lid` is 0 on Ethernet."""

    mtu: int
    lid: int
    max_message: int


@dataclass(frozen=True, slots=True)
class Route:
    """From a port of ours to a queue pair of a peer."""

    port: int
    gid_index: int
    mtu: int
    peer_gid: bytes
    peer_lid: int
    peer_number: int
    peer_psn: int
    psn: int


Write = tuple[int, list[tuple[int, int]]]
"""To an address of the peer: (address, length) of each piece here, MAX_PIECES at most."""


class Memory(ABC):
    """Registered memory. `close` only when no queue uses it."""

    lkey: int
    rkey: int

    @abstractmethod
    def close(self) -> None: ...


class Queue(ABC):
    """A reliable connection's queue pair, with one completion queue and its channel.

    `poll`, `arm` and `disarm` are for one thread; whoever shares the rest locks. `close` destroys
    the queue pair alone: from then on nothing is sent, and nothing that the peer sent is written.
    `close_events` gives back what is left. Both are idempotent.
    """

    number: int
    fd: int
    """Readable once a completion came after `arm`."""

    @abstractmethod
    def connect(self, route: Route) -> None:
        """Ready to receive and to send."""

    @abstractmethod
    def write(self, writes: Sequence[Write], keys: tuple[int, int], tag: int) -> None:
        """Post these writes; keys are the sources' lkey and the peer's rkey. The last one completes
        with `tag`, and stands for all.
        """

    @abstractmethod
    def send(self, source: tuple[int, int, int], tag: int) -> None:
        """Post a message of (address, length, lkey); completes with `tag`."""

    @abstractmethod
    def receive(self, room: tuple[int, int, int], tag: int) -> None:
        """Post room for one message, (address, length, lkey); completes with `tag`."""

    @abstractmethod
    def poll(self, most: int) -> list[Completion]: ...

    @abstractmethod
    def arm(self) -> None: ...

    @abstractmethod
    def disarm(self) -> None:
        """Take one event off the channel; only when `fd` is readable."""

    @abstractmethod
    def fail(self) -> None:
        """Move to the error state: all that is posted completes with WR_FLUSH_ERR."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def close_events(self) -> None: ...


class Device(ABC):
    """An opened device with one protection domain."""

    @abstractmethod
    def port(self, number: int) -> PortFacts: ...

    @abstractmethod
    def register(self, region: Region, *, remote_write: bool) -> Memory: ...

    @abstractmethod
    def register_dmabuf(
        self, region: Region, fd: int, offset: int, *, remote_write: bool
    ) -> Memory:
        """`fd` exports memory of another device; the region begins so many bytes into that."""

    @abstractmethod
    def queue(self, *, sends: int, receives: int) -> Queue:
        """With room for so many posted at once."""

    @abstractmethod
    def close(self) -> None:
        """Only after all queues and memory are closed."""


class Verbs(ABC):
    name: str

    @abstractmethod
    def open(self, device: str) -> Device: ...


def load(*, dmabuf: bool = False) -> Verbs:
    """The first binding that can be imported; of two, the one that takes a `dmabuf` if told so.

    Raises TransferError saying what to install.
    """
    missing: list[str] = []
    for binding in sorted(BINDINGS, key=lambda name: dmabuf and name != TAKES_DMABUF):
        try:
            adapter = importlib.import_module(BINDINGS[binding])
        except ImportError as e:
            missing.append(f"{binding}: {e}")
        else:
            verbs: Verbs = adapter.VERBS
            return verbs
    raise TransferError(
        f"no Python binding for RDMA verbs can be imported ({'; '.join(missing)})",
        hint="pip install 'pdctl[rdma]', and libibverbs1 with ibverbs-providers from the system",
    )

"""Types of the C++ extension (native/). What copies or computes releases the interpreter lock."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

class PinnedShm:
    """A mapped segment of POSIX shared memory, from create_pinned_shm or open_pinned_shm.

    Its destructor unmaps and never unlinks.
    """

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int:
        """Start of the mapping. ValueError after free_pinned_shm: the memory is gone."""
    @property
    def nbytes(self) -> int: ...
    @property
    def pinned(self) -> bool:
        """The pages cannot leave memory: `lock` is not none."""
    @property
    def lock(self) -> Literal["cuda", "mlock", "none"]:
        """cuda: registered with the driver, so GPU copies are asynchronous; mlock: no GPU here,
        locked by the kernel; none: no GPU here and RLIMIT_MEMLOCK is too small (the pages are
        present all the same, but may be swapped).
        """

def create_pinned_shm(name: str, nbytes: int) -> PinnedShm:
    """Make the segment /dev/shm/<name>, 0600, its space reserved and its pages in memory.

    `name` has no slash. OSError (FileExistsError, ENOSPC, ...) with errno and a message naming the
    segment and the sizes asked and free; then nothing is left. ValueError on a bad name or size.
    """

def open_pinned_shm(name: str, nbytes: int) -> PinnedShm:
    """Map an existing segment of exactly `nbytes`: OSError EINVAL otherwise; FileNotFoundError."""

def free_pinned_shm(shm: PinnedShm, unlink: bool) -> None:
    """Unmap, and with `unlink` remove the name. Idempotent; a name already gone is fine.

    Nothing may be copying into or out of the segment any more.
    """

def copy_runs(
    dst_address: int,
    dst_nbytes: int,
    src_address: int,
    src_nbytes: int,
    runs: NDArray[np.int64],
) -> int:
    """Copy each (src_offset, dst_offset, length) of `runs`, C-contiguous int64 (n, 3).

    Every run is checked against both sizes before the first byte moves: ValueError names the first
    bad one. Returns the bytes copied.
    """

def send_put(fd: int, nonce: int, address: int, nbytes: int, runs: NDArray[np.int64]) -> None:
    """Send one put: a header, then each (source offset, destination offset, length) of `runs`,
    C-contiguous int64 (n, 3).

    The socket must block, with SO_SNDTIMEO. ValueError, before the first byte, names a run that is
    empty or outside of the memory. OSError: TimeoutError when no byte moved for that long. A
    shutdown of the socket from another thread ends it.
    """

class PutHeader:
    """What the next put is; its bytes follow in the stream."""

    @property
    def nonce(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def receive_header(fd: int) -> PutHeader | None:
    """Wait, as long as it takes, for the next put; None at the end of the stream. OSError when the
    connection ends inside, or what comes is no header.
    """

def discard_put(fd: int, put: PutHeader) -> None:
    """Receive the put's bytes and throw them away."""

class Landing:
    """The blocks of one reservation, which a put's bytes may be written into until it is closed.
    For any thread.
    """

    def __init__(
        self, address: int, nbytes: int, block_bytes: int, blocks: Sequence[int]
    ) -> None: ...
    @property
    def complete(self) -> int:
        """How many of the first blocks have arrived whole."""
    def close(self) -> None:
        """On return nothing is written any more; takes one recv at most."""
    def claim(self, put: PutHeader) -> str:
        """Take the put's bytes, each of which may come once; else why they may not come."""
    def receive(self, fd: int, put: PutHeader) -> None:
        """Receive a claimed put, without a deadline; what comes after `close` is thrown away.

        OSError when the connection ends first.
        """

def paged_attention(
    query: Any,
    kv: Any,
    block_tables: Any,
    seq_index: Any,
    positions: Any,
    out: Any,
    scale: float,
    num_threads: int,
) -> None:
    """Causal attention on the CPU, straight from the paged pool.

    Arrays are torch tensors on the CPU or numpy arrays; a numpy array is taken over in a fraction
    of a microsecond, a tensor in about three.

    query         (num_tokens, num_heads, head_dim), float32 or bfloat16, C-contiguous; num_heads is
                  a multiple of num_kv_heads, at most 64 times as many
    kv            (num_blocks, 2, num_kv_heads, block_size, head_dim), float32 or bfloat16: one
                  layer's strided view of the pool (KvLayout order, tokens and dims contiguous)
    block_tables  (num_seqs, max_blocks) int32, C-contiguous; entries past a sequence's end are not
                  read
    seq_index     (num_tokens,) int32: the row of block_tables a token belongs to
    positions     (num_tokens,) int32: a token attends to positions 0..its own, whose K and V are in
                  the pool already
    out           like query; written

    Softmax and sums are float32. A token's result has the same bits whatever else is in the batch
    and whatever num_threads is. ValueError on wrong shapes, rows, positions or block ids, before
    anything is written. Neighbouring tokens of one sequence share the reading of K and V.
    """

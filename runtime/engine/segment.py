"""The shared memory of a decode instance: its CPU buffer and, on a CPU, the device pool before it.

Owns the segment's name and life: made on the engine thread before the model is loaded, closed when
that thread has ended, or while it still makes the segment and the process ends. With the pool in
it, KV for a request that has its device blocks already is put straight there; where /dev/shm is too
small for that, all KV goes through the buffer.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from runtime.config import WorkerConfig
from runtime.errors import ConfigError
from runtime.kv.buffer import CpuBuffer
from runtime.kv.layout import PoolMap
from runtime.kv.region import Region

_log = logging.getLogger(__name__)

_SHM = Path("/dev/shm")
_SHARE = 0.25
"""Of what is free there, for the pool."""


class Segment:
    """Of the other roles: nothing."""

    def __init__(self, config: WorkerConfig, incarnation: str) -> None:
        self._config = config
        self._name = f"{config.shm_prefix}.0.{incarnation}"
        self._closed = False
        self.buffer: CpuBuffer | None = None

    def make(self, pools: PoolMap) -> Region | None:
        """The memory for the device pool; None: the engine takes its own. Raises ConfigError."""
        config = self._config
        if config.role != "decode":
            return None
        sweep_segments(config.shm_prefix)
        # Ranks have parts of each block, so that no block of theirs can be put whole.
        shared = config.device == "cpu" and pools.tp_size == 1 and self._is_room(pools.nbytes)
        if self._closed:
            raise ConfigError(f"{config.name} was told to stop while it started")
        self.buffer = CpuBuffer.create(
            self._name,
            config.cpu_buffer_bytes,
            pools.model.block_bytes,
            pools.num_blocks if shared else 0,
        )
        return self.buffer.pool_region if shared else None

    def _is_room(self, pool_bytes: int) -> bool:
        """The pool is a guest in /dev/shm: others must find room there for their buffers."""
        disk = os.statvfs(_SHM)
        free = disk.f_bavail * disk.f_frsize - self._config.cpu_buffer_bytes
        if pool_bytes <= free * _SHARE:
            return True
        _log.info(
            "kv_cache of %d bytes is not put into /dev/shm, where %d are free: KV is copied once "
            "more, from the CPU buffer",
            pool_bytes,
            max(0, free),
        )
        return False

    def close(self, *, quiet: bool) -> None:
        """`quiet`: the engine's thread has ended. Else the memory ends with the process, and only
        the name goes now: also one that `make` has just given to memory it still waits for.
        """
        self._closed = True
        if self.buffer and quiet:
            self.buffer.close()
        else:
            Path(_SHM, self._name).unlink(missing_ok=True)


def sweep_segments(prefix: str, folder: Path = _SHM) -> None:
    """Unlink what former incarnations left when they were killed. The prefix is this instance's
    alone.
    """
    for entry in os.scandir(folder):
        ours = entry.name.startswith(f"{prefix}.")
        if ours and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
            _log.warning("removing %s, left by a former incarnation", entry.path)
            Path(entry.path).unlink(missing_ok=True)

"""The collectives of a tensor-parallel group, over torch.distributed: gloo on CPUs, NCCL on GPUs.

All ranks are processes of one host. They meet in an anonymous memory file that rank 0 made and the
others inherited, and talk over the loopback interface only. Knows no model and no step.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.engine.ranks import STEP_S
from runtime.errors import RankError
from runtime.kv.layout import Shard


class Group:
    """Implements runtime.models.decoder.Ranks. For the thread that computes."""

    def __init__(self, shard: Shard, meeting: int, device: torch.device) -> None:
        """`meeting` is the descriptor of the memory file. Waits for the others to come.

        Raises RankError when they do not.
        """
        self._shard = shard
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        for library in ("GLOO", "NCCL"):
            os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                self._backend,
                store=dist.FileStore(f"/proc/self/fd/{meeting}", shard.size),  # type: ignore[attr-defined]
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=STEP_S),
            )
        except RuntimeError as e:
            first_line = str(e).partition("\n")[0]
            raise RankError(f"the {shard.size} ranks did not meet: {first_line}") from e

    @property
    def shard(self) -> Shard:
        return self._shard

    def sum_(self, x: Tensor) -> None:
        dist.all_reduce(x)

    def meet(self) -> None:
        dist.barrier()

    def gather(self, part: Tensor) -> Tensor:
        if self._shard.rank:
            dist.gather(part, dst=0)
            return part
        parts = [torch.empty_like(part) for _ in range(self._shard.size)]
        dist.gather(part, parts, dst=0)
        return torch.cat(parts, -1)

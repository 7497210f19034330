"""A rank of a tensor-parallel instance other than 0: computes its part of each step rank 0 sends.

It holds weights and KV and decides nothing. It ends with rank 0, whichever way that one ends, and
leaves nothing: all its memory is anonymous.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.config import WorkerConfig
from runtime.config import load as load_config
from runtime.engine.group import Group
from runtime.engine.lifetime import die_with_parent
from runtime.engine.load import frame_of, load
from runtime.engine.pool_file import map_pool
from runtime.engine.rank_protocol import RankLoaded, RankStart, RankUp, Step, ToRank
from runtime.engine.runner import Runner
from runtime.kv.layout import Shard
from runtime.link import BlockingLink, LinkClosed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inherited:
    """Descriptors from rank 0."""

    link: int
    meeting: int
    """The memory file in which the ranks find each other."""
    pool: int
    """The memory file with the KV pools of all ranks (on a CPU)."""


def run_follower(config_path: Path, rank: int, inherited: Inherited) -> int:
    """Follow until rank 0 goes. Raises RuntimeFailure when this rank cannot start."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s core rank {rank} %(levelname)s %(name)s: %(message)s",
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # Sent to every process of the service: rank 0 ends what is under way and then this process.
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    config = load_config(config_path, WorkerConfig)
    link: BlockingLink[ToRank] = BlockingLink(socket.socket(fileno=inherited.link), ToRank)
    try:
        link.send(RankUp())
        start = link.receive()
        if not isinstance(start, RankStart):
            raise LinkClosed(f"{type(start).__name__} before RankStart")
        runner = _load(config, rank, inherited)
        link.send(RankLoaded())
        while isinstance(step := link.receive(), Step):
            runner.compute(step.chunks)
    except LinkClosed as e:
        _log.info("rank 0 is gone: %s", e)
    # Rank 0 has ended already, so there is no one to take leave of.
    logging.shutdown()
    os._exit(0)


def _load(config: WorkerConfig, rank: int, inherited: Inherited) -> Runner:
    frame = frame_of(config, rank)
    torch.set_num_threads(frame.threads)
    group = Group(Shard(rank, config.tp_size), inherited.meeting, frame.device)
    memory = None if frame.device.type == "cuda" else map_pool(inherited.pool, frame.pool_map, rank)
    return load(frame, group, memory).runner

"""What every rank of an instance makes of the configuration: device, geometry, model and pool.

Owns the checks of the configuration that concern these. Knows no scheduler and no other process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config import WorkerConfig
from runtime.engine.group import Group
from runtime.engine.runner import Runner
from runtime.errors import ConfigError
from runtime.kv.layout import KvDtype, KvLayout, PoolMap, Shard
from runtime.kv.pool import KvPool, pool_blocks
from runtime.models.config import ModelSpec
from runtime.models.decoder import Decoder
from runtime.models.loader import load_model, read_spec
from runtime.models.shard import shard_model


@dataclass(frozen=True, slots=True)
class Frame:
    """Known before any weight is read, the same on every rank but for the device."""

    config: WorkerConfig
    spec: ModelSpec
    device: torch.device
    dtype: KvDtype
    threads: int
    pool_map: PoolMap


@dataclass(frozen=True, slots=True)
class Loaded:
    decoder: Decoder
    pool: KvPool
    runner: Runner


def frame_of(config: WorkerConfig, rank: int = 0) -> Frame:
    """Raises ConfigError and ModelError for all that can be wrong before the weights are read."""
    size = config.tp_size
    if size < 1:
        raise ConfigError(f"tp_size is {size}, and must be at least 1")
    device = _device(config, rank)
    dtype = _dtype(config, device)
    spec = read_spec(config.model.path)
    shard_model(spec, Shard(rank, size))
    try:
        layout = KvLayout(spec.layers, spec.kv_heads, spec.head_dim, config.block_size, dtype)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    num_blocks = pool_blocks(Shard(rank, size).layout(layout), config.kv_cache_bytes, size)
    return Frame(
        config=config,
        spec=spec,
        device=device,
        dtype=dtype,
        threads=config.threads or max(1, torch.get_num_threads() // size),
        pool_map=PoolMap(layout, num_blocks, size),
    )


def load(frame: Frame, group: Group | None = None, memory: Tensor | None = None) -> Loaded:
    """The model, or this rank's part of it, and its pool (in `memory`, if there is some)."""
    config, device = frame.config, frame.device
    decoder = load_model(config.model.path, getattr(torch, frame.dtype), device, group)
    pool = KvPool(frame.pool_map.rank_layout, frame.pool_map.num_blocks, device, memory)
    runner = Runner(decoder, pool, frame.threads, native=device.type == "cpu")
    return Loaded(decoder, pool, runner)


def _device(config: WorkerConfig, rank: int) -> torch.device:
    try:
        device = torch.device(config.device)
    except RuntimeError as e:
        raise ConfigError(f"device {config.device!r} is unknown", hint="use cpu or cuda:0") from e
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"device {config.device}: this host has no usable GPU", hint="use cpu")
    if config.tp_size == 1:
        return device
    if config.role != "mixed":
        # Rank 0 moves the KV of all ranks, and reaches only its own GPU's memory.
        raise ConfigError(
            f"tp_size {config.tp_size}: on GPUs only mixed instances can have more than 1",
            hint="use tp_size 1, or devices: cpu",
        )
    if torch.cuda.device_count() < config.tp_size:
        raise ConfigError(
            f"tp_size {config.tp_size}: this instance sees {torch.cuda.device_count()} GPUs",
            hint="give it one for each rank",
        )
    return torch.device("cuda", rank)


def _dtype(config: WorkerConfig, device: torch.device) -> KvDtype:
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device.type == "cpu" else "bfloat16"

"""The engine as the rest of its process sees it: a model, its pool, and a loop on one thread.

Implements EngineControl (contract.py). Other threads only touch the inbox and the last statistics;
everything else belongs to the thread that calls `run`. Knows no front, no peer, no transport.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from runtime.config import WorkerConfig
from runtime.engine.contract import (
    Adopted,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    EngineStats,
    Freed,
    Produced,
)
from runtime.engine.group import Group
from runtime.engine.load import Frame, Loaded, frame_of, load
from runtime.engine.pool_file import map_all, reserve_pools
from runtime.engine.ranks import RankLinks
from runtime.engine.runner import LeadingRunner
from runtime.engine.scheduler import Limits
from runtime.engine.stepper import Bounds, ModelRunner, Stepper
from runtime.errors import ConfigError, ModelError
from runtime.kv.copies import HostCopies, PoolCopies
from runtime.kv.layout import KvLayout, PoolMap
from runtime.kv.region import Region
from runtime.models.config import ModelSpec
from runtime.protocol import OutputToken, RequestId, SamplingParams

log = logging.getLogger(__name__)

# How long a thread keeps the interpreter lock that another one wants. With the default of 5 ms the
# asyncio thread could hold up a step by that much at each of its hundreds of operations.
_SWITCH_INTERVAL_S = 0.0005

# Blocks that each active sequence keeps to grow into when device blocks are given to a request
# whose KV is not there yet: else decoding would soon stop for one that only waits for prefill.
_ROOM_TO_GROW = 4


class Engine:
    """Build it, `self_test()`, then give a thread to `run()`."""

    def __init__(
        self,
        config: WorkerConfig,
        emit: Callable[[EngineEvent], None],
        ranks: RankLinks | None = None,
        place: Callable[[PoolMap], Region | None] = lambda _: None,
    ) -> None:
        """Loads the model, here and on the other ranks. Raises ConfigError, ModelError, RankError.

        `ranks` are there when config.tp_size is over 1. `place` gives the pool's memory, if it is
        not to be the engine's own; it outlives `run`.
        """
        self._emit = emit
        frame = frame_of(config)
        assert (ranks is None) == (config.tp_size == 1)
        spec, pools = frame.spec, frame.pool_map
        self._threads = frame.threads
        torch.set_num_threads(frame.threads)
        self._pool_map = pools
        self._limits = _limits(config)
        self._bounds = Bounds(
            context=_context(config, spec),
            capacity=pools.num_blocks * config.block_size,
            vocab=spec.vocab,
            eos_token_ids=spec.eos_token_ids,
        )
        memory = place(pools)
        if ranks is None:
            loaded = load(frame, memory=_bytes_of(memory) if memory else None)
        else:
            loaded = _load_with(ranks, frame)
        self._pool = loaded.pool
        self._copies = _copies(config, frame.device, loaded.pool.region)
        self._runner: ModelRunner = loaded.runner
        if ranks is not None:
            self._runner = LeadingRunner(loaded.runner, ranks)
        self._stepper = self._new_stepper(config.prefix_cache)

        self.num_blocks: int = pools.num_blocks
        self.max_model_len: int = min(self._bounds.context, self._bounds.capacity)
        self.eos_token_ids: tuple[int, ...] = spec.eos_token_ids
        self.fingerprint: dict[str, str | int] = {
            "model": loaded.decoder.weights.digest,
            "dtype": frame.dtype,
            **pools.model.fingerprint(),
        }

        # Shared with other threads, under the condition's lock.
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._arriving = 0
        self._adopting = 0
        self._refused: RequestId | None = None
        """By `adopt`, and Freed was not emitted since."""
        self._stopping = False
        self._stats = self._stepper.stats()

    # ---- EngineControl: any thread ----------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self._bounds.vocab

    @property
    def layout(self) -> KvLayout:
        return self._pool_map.model

    @property
    def pool(self) -> Region:
        return self._pool.region

    @property
    def copies(self) -> PoolCopies:
        return self._copies

    @property
    def pool_map(self) -> PoolMap:
        return self._pool_map

    def submit(self, request: EngineRequest) -> None:
        now = time.monotonic()
        with self._wake:
            self._arriving += 1
            self._inbox.append(lambda: self._stepper.submit(request, now))
            self._wake.notify()

    def adopt(self, request: EngineRequest, most_new: int) -> Adopted | None:
        now = time.monotonic()
        self._stepper.hash_prompt(request)  # not under the lock, which the engine's thread needs
        with self._wake:
            active = self._stats.running + self._adopting
            claim = None
            # Who waits for blocks comes first.
            if not self._stats.waiting + self._arriving and active < self._limits.max_num_seqs:
                claim = self._stepper.claim(request, _ROOM_TO_GROW * active, most_new)
            if claim is None:
                self._refused = request.id
                return None
            self._adopting += 1
            self._inbox.append(lambda: self._stepper.adopt(request, claim, now))
            self._wake.notify()
        return Adopted(request.id, claim.blocks, claim.cached)

    def resume(self, request_id: RequestId, first: OutputToken) -> None:
        self._post(lambda: self._stepper.resume(request_id, first))

    def swapped_out(self, request_id: RequestId, kept: bool) -> None:
        self._post(lambda: self._stepper.swapped_out(request_id, kept))

    def swapped_in(self, request_id: RequestId) -> None:
        self._post(lambda: self._stepper.swapped_in(request_id))

    def drop(self, request_id: RequestId) -> None:
        self._post(lambda: self._stepper.drop(request_id))

    def stats(self) -> EngineStats:
        with self._wake:
            return replace(
                self._stats,
                waiting=self._stats.waiting + self._arriving,
                running=self._stats.running + self._adopting,
            )

    def stop(self) -> None:
        """Makes `run` return after the step under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # ---- the engine thread ------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`. Sleeps when there is nothing to do."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        torch.set_num_threads(self._threads)
        busy = False
        while self._take_commands(wait=not busy):
            self._flush()
            busy = self._stepper.step(self._flush)
            self._flush()

    def _take_commands(self, wait: bool) -> bool:
        """Applies what arrived, waiting for something if told to. False: stop."""
        with self._wake:
            while wait and not self._inbox and not self._stopping:
                self._wake.wait()
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, deque()
            arriving, adopting = self._arriving, self._adopting
        for command in commands:
            command()
        with self._wake:
            self._arriving -= arriving
            self._adopting -= adopting
            self._stats = self._stepper.stats()
        return True

    def _flush(self) -> None:
        """Publishes the state, then the events that led to it: an event's effect is visible."""
        events = self._stepper.take_events()
        stats = self._stepper.stats()
        eased = self._stepper.take_eased()
        with self._wake:
            self._stats = stats
            if eased and self._refused is not None:
                events.append(Freed(self._refused))
                self._refused = None
        for event in events:
            self._emit(event)

    # ---- start ------------------------------------------------------------------------------

    def self_test(self) -> None:
        """Generates through the real path. Raises ModelError; leaves nothing behind."""
        probe = self._new_stepper(prefix_cache=False)
        prompt = tuple(range(min(8, self.max_model_len - 1)))
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        request = EngineRequest(RequestId("self-test"), prompt, params, "generate")
        probe.submit(request, time.monotonic())
        while probe.step(lambda: None):
            pass
        events = probe.take_events()
        for event in events:
            if isinstance(event, EngineFailed):
                raise ModelError(
                    f"the model loaded but cannot generate: {event.message}",
                    hint="fetch the model again, or see the log above",
                )
        assert any(isinstance(event, Produced) and event.finish for event in events)
        assert probe.stats().device_blocks_held == 0

    def _new_stepper(self, prefix_cache: bool) -> Stepper:
        pools, runner = self._pool_map, self._runner
        return Stepper(
            pools.num_blocks, self._limits, prefix_cache, self._bounds, pools.model, runner
        )


def _load_with(ranks: RankLinks, frame: Frame) -> Loaded:
    """On all ranks at once; this is rank 0."""
    memory = None
    if frame.device.type == "cpu":
        reserve_pools(ranks.pool, frame.pool_map)
        memory = map_all(ranks.pool, frame.pool_map)
    ranks.start()
    group = Group(frame.pool_map.shard(0), ranks.meeting, frame.device)
    loaded = load(frame, group, memory)
    ranks.wait_loaded()
    return loaded


def _bytes_of(region: Region) -> Tensor:
    return torch.frombuffer(
        (ctypes.c_char * region.nbytes).from_address(region.address), dtype=torch.uint8
    )


def _copies(config: WorkerConfig, device: torch.device, pool: Region) -> PoolCopies:
    if device.type == "cpu" or config.role == "mixed":  # which moves no KV
        return HostCopies(pool)
    from runtime.kv.cupy_engine import CupyEngine
    from runtime.kv.gpu_swap import GpuCopies

    number = torch.cuda.current_device() if device.index is None else device.index
    return GpuCopies(pool, CupyEngine(number))


def _limits(config: WorkerConfig) -> Limits:
    for name in ("max_num_batched_tokens", "max_num_seqs", "max_queued"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}, and must be at least 1")
    return Limits(
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_queued=config.max_queued,
    )


def _context(config: WorkerConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return spec.max_positions
    if not 2 <= wanted <= spec.max_positions:
        raise ConfigError(
            f"max_model_len {wanted} is not in 2..{spec.max_positions}, the model's range",
            hint="leave it out for the model's own context",
        )
    return wanted

"""An engine without a model, for tests of the hand-over; also runnable as a core process.

Implements EngineControl on a thread of its own. KV and tokens are pure functions of the token ids,
so a single wrong byte of KV is noticed at `resume` and every answer can be predicted. `paused`
stops kinds of work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gpu_stand_in import StandIn, device_memory, free_device_memory

from runtime.config import WorkerConfig
from runtime.engine.contract import (
    Adopted,
    Computed,
    EngineEvent,
    EngineFailed,
    EngineRequest,
    EngineStats,
    Freed,
    Produced,
    SwapOut,
)
from runtime.kv.cache import BlockCache
from runtime.kv.copies import HostCopies, PoolCopies
from runtime.kv.gpu_swap import GpuCopies
from runtime.kv.layout import KvLayout, PoolMap
from runtime.kv.prefix import block_hashes
from runtime.kv.region import Region
from runtime.protocol import OutputToken, RequestId

FORBIDDEN_TOKEN = 666
"""A prompt with this token fails in prefill with status 400."""


def kv_block(prompt: tuple[int, ...], block: int, layout: KvLayout) -> np.ndarray[Any, Any]:
    """What the block holds: it depends on every token up to its end, as real KV does."""
    upto = prompt[: (block + 1) * layout.block_size]
    seed = hashlib.sha256(np.array([block, *upto], dtype=np.int64).tobytes()).digest()
    repeats = -(-layout.block_bytes // len(seed))
    return np.frombuffer((seed * repeats)[: layout.block_bytes], dtype=np.uint8)


def next_token(tokens: tuple[int, ...]) -> int:
    return zlib.crc32(np.array(tokens, dtype=np.int64).tobytes()) % 1000


def expected(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class _Request:
    request: EngineRequest
    blocks: tuple[int, ...] = ()
    cached: int = 0
    kept: bool = False
    """Swapped out at least once, and its KV with it."""
    computed: int = 0
    output: list[int] = field(default_factory=list)
    state: str = "waiting"


class FakeEngine:
    num_blocks: int
    vocab_size = 1000
    max_model_len = 4096
    eos_token_ids: tuple[int, ...] = ()

    def __init__(
        self,
        config: WorkerConfig,
        emit: Callable[[EngineEvent], None],
        ranks: None = None,
        place: Callable[[PoolMap], Region | None] = lambda _: None,
        *,
        chunk_blocks: int = 2,
        step_s: float = 0.0,
        gpu: bool = False,
    ) -> None:
        """`gpu`: the pool is in a GPU's memory, or what stands in for it."""
        self._emit = emit
        self.layout = KvLayout(2, 2, 4, config.block_size, "float32")
        self.num_blocks = config.kv_cache_bytes // self.layout.block_bytes
        self.pool_map = PoolMap(self.layout, self.num_blocks, config.tp_size)
        if shared := place(self.pool_map):
            memory = (ctypes.c_uint8 * shared.nbytes).from_address(shared.address)
            self._memory = np.ctypeslib.as_array(memory)
        elif gpu:
            self._memory = device_memory(self.pool_map.nbytes)
        else:
            self._memory = np.zeros(self.pool_map.nbytes, dtype=np.uint8)
        self.pool = Region(self._memory.ctypes.data, self._memory.nbytes)
        self._gpu = gpu
        self.copies: PoolCopies = GpuCopies(self.pool, StandIn()) if gpu else HostCopies(self.pool)
        self.fingerprint: dict[str, str | int] = {"model": "fake", **self.layout.fingerprint()}
        self._cache = BlockCache(self.num_blocks)
        self._prefix_cache = config.prefix_cache and config.role == "decode"
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._requests: dict[RequestId, _Request] = {}
        self._stopping = False
        self._chunk_blocks = chunk_blocks
        self._step_s = step_s
        self._counts = (0, 0, 0)
        self._taken = 0
        self._adopting = 0
        self._refused: RequestId | None = None
        self._eased = False
        self.paused: set[str] = set()
        """Any of prefill, adopt, decode; `prefill_after_first` lets one chunk through."""
        self.submitted: list[RequestId] = []

    # ---- EngineControl --------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request.id)
        self._post(lambda: self._on_submit(request))

    def adopt(self, request: EngineRequest, most_new: int) -> Adopted | None:
        with self._wake:
            claim = None
            if "adopt" not in self.paused and not self.stats().waiting:
                claim = self._cache.claim(
                    self._hashes(request.prompt, request.hashes),
                    self.layout.blocks_for(len(request.prompt)),
                    most_new=most_new,
                )
            if claim is None:
                self._refused = request.id
                return None
        adopted = _Request(request, claim.blocks, claim.cached, state="adopted")
        self._adopting += 1
        self._post(lambda: self._on_adopt(adopted))
        return Adopted(request.id, claim.blocks, claim.cached)

    def _hashes(self, prompt: tuple[int, ...], known: list[bytes] | None = None) -> list[bytes]:
        if not self._prefix_cache:
            return []
        return block_hashes(prompt, self.layout.block_size, [] if known is None else known)

    def resume(self, request_id: RequestId, first: OutputToken) -> None:
        self._post(lambda: self._on_resume(request_id, first))

    def swap_out(self, request_id: RequestId) -> None:
        """As if there were no blocks for others to grow into."""
        self._post(lambda: self._on_swap_out(request_id))

    def fail(self, request_id: RequestId) -> None:
        """As if the model had failed on it."""
        self._post(lambda: self._on_fail(request_id))

    def swapped_out(self, request_id: RequestId, kept: bool) -> None:
        self._post(lambda: self._on_swapped_out(request_id, kept))

    def swapped_in(self, request_id: RequestId) -> None:
        self._post(lambda: self._on_swapped_in(request_id))

    def drop(self, request_id: RequestId) -> None:
        self._post(lambda: self._on_drop(request_id))

    def stats(self) -> EngineStats:
        waiting, running, held = self._counts
        waiting += len(self.submitted) - self._taken
        running += self._adopting
        return EngineStats(waiting, running, self.num_blocks, held, 0, {"steps": 1.0})

    # ---- life -----------------------------------------------------------------------------------

    def self_test(self) -> None:
        pass

    def run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait(0.002)
                if self._stopping:
                    return
                commands, self._commands = list(self._commands), deque()
            for command in commands:
                command()
            for request in list(self._requests.values()):
                self._step(request)
            self._tell_freed()
            if self._step_s and self._requests:
                time.sleep(self._step_s)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def close(self) -> None:
        """After `run` has returned."""
        if self._gpu:
            free_device_memory(self._memory)

    def pause(self, *kinds: str) -> None:
        self.paused = set(kinds)
        self._eased = True

    # ---- engine thread --------------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _count(self) -> None:
        held = self._cache.held
        waiting = sum(1 for r in self._requests.values() if r.state == "waiting")
        self._counts = (waiting, len(self._requests) - waiting, held)

    def _tell_freed(self) -> None:
        with self._wake:
            self._count()
            eased, self._eased = self._eased, False
            refused, self._refused = self._refused, None if eased else self._refused
        if eased and refused is not None:
            self._emit(Freed(refused))

    def _on_submit(self, request: EngineRequest) -> None:
        self._taken += 1
        self._eased = True
        assert request.id not in self._requests
        if FORBIDDEN_TOKEN in request.prompt:
            self._emit(EngineFailed(request.id, "a forbidden token", 400, "forbidden"))
            return
        self._requests[request.id] = _Request(request)
        self._count()

    def _on_adopt(self, request: _Request) -> None:
        self._adopting -= 1
        assert request.request.id not in self._requests, "as the real engine does"
        self._requests[request.request.id] = request
        self._count()

    def _on_resume(self, request_id: RequestId, first: OutputToken) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        assert request.state == "adopted", request.state
        if not self._verified(request):
            return
        prompt = request.request.prompt
        request.output = [first.token]
        request.state = "decoding"
        hashes = self._hashes(prompt)
        self._cache.index(zip(hashes, request.blocks[: len(hashes)], strict=True))
        self._eased = True

    def _verified(self, request: _Request) -> bool:
        """Its prompt's KV is right; else it has failed."""
        for number, block in enumerate(request.blocks):
            if not self._holds(block, kv_block(request.request.prompt, number, self.layout)):
                self._forget(request)
                text = f"KV differs in block {number}"
                self._emit(EngineFailed(request.request.id, text, 500))
                return False
        return True

    def _on_fail(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            self._forget(request)
            self._emit(EngineFailed(request_id, "told to fail", 500))

    def _on_swap_out(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.state == "decoding":
            request.state = "leaving"
            self._emit(SwapOut(request_id, request.blocks))

    def _on_swapped_out(self, request_id: RequestId, kept: bool) -> None:
        if request := self._requests.get(request_id):
            assert request.state == "leaving", request.state
            self._release(request)
            request.state = "waiting"
            request.kept = kept

    def _on_swapped_in(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            assert request.state == "adopted" and request.kept, request.state
            if self._verified(request):
                request.state = "decoding"

    def _on_drop(self, request_id: RequestId) -> None:
        if request := self._requests.get(request_id):
            self._forget(request)
        self._count()

    def _step(self, request: _Request) -> None:
        match request.state, request.request.mode:
            case "waiting", "decode" if request.output and not request.kept:
                self._recompute(request)
            case "waiting", mode:
                self._admit(request, "adopt" if mode == "decode" else "prefill")
            case "prefilling", _:
                self._prefill(request)
            case "decoding", _:
                self._decode(request)

    def _admit(self, request: _Request, kind: str) -> None:
        count = self.layout.blocks_for(len(request.request.prompt))
        claim = None if kind in self.paused else self._cache.claim([], count)
        if claim is None:
            return
        request.blocks = claim.blocks
        self._eased = True
        if kind == "adopt":
            request.state = "adopted"
            self._count()
            self._emit(Adopted(request.request.id, request.blocks))
        else:
            request.state = "prefilling"

    def _recompute(self, request: _Request) -> None:
        """What was swapped out and not kept."""
        count = self.layout.blocks_for(len(request.request.prompt))
        claim = None if "adopt" in self.paused else self._cache.claim([], count)
        if claim is None:
            return
        request.blocks = claim.blocks
        self._eased = True
        for number, block in enumerate(request.blocks):
            self._fill(block, kv_block(request.request.prompt, number, self.layout))
        request.state = "decoding"

    def _prefill(self, request: _Request) -> None:
        after_first = request.computed > 0 and "prefill_after_first" in self.paused
        if "prefill" in self.paused or after_first:
            return
        prompt, id_ = request.request.prompt, request.request.id
        first = request.computed // self.layout.block_size
        last = min(first + self._chunk_blocks, len(request.blocks))
        computed = min(last * self.layout.block_size, len(prompt))
        for layers in (self.layout.num_layers // 2, self.layout.num_layers):
            for number in range(first, last):
                block = kv_block(prompt, number, self.layout).copy()
                block[layers * self.layout.layer_stride :] = 0xEE
                self._fill(request.blocks[number], block)
            if 0 < layers < self.layout.num_layers and request.request.mode == "prefill":
                self._emit(Computed(id_, computed, request.blocks, layers))
        request.computed = computed
        if request.computed == len(prompt):
            token = next_token(prompt)
            request.output = [token]
            mode = request.request.mode
            finish = "length" if request.request.params.max_tokens == 1 else None
            self._emit(Produced(id_, (OutputToken(token),), finish, 0, 0.001, 0.002))
            if mode == "generate":
                request.state = "decoding"
                if finish:
                    self._forget(request)
                return
            request.state = "held"
        self._emit(Computed(id_, request.computed, request.blocks, self.layout.num_layers))

    def _decode(self, request: _Request) -> None:
        if "decode" in self.paused:
            return
        id_, limit = request.request.id, request.request.params.max_tokens
        token = next_token((*request.request.prompt, *request.output))
        request.output.append(token)
        done = len(request.output) >= limit
        if done:
            self._forget(request)
            self._count()
        self._emit(Produced(id_, (OutputToken(token),), "length" if done else None))

    def _forget(self, request: _Request) -> None:
        del self._requests[request.request.id]
        self._release(request)

    def _release(self, request: _Request) -> None:
        for block in request.blocks[request.cached :]:
            if block not in self._cache._index._hash_of:
                # A copy that still reads or writes here is found out.
                self._fill(block, np.full(self.layout.block_bytes, 0xDD, dtype=np.uint8))
        self._cache.release(request.blocks)
        self._eased = True
        request.blocks, request.cached = (), 0

    def _fill(self, block: int, whole: np.ndarray[Any, Any]) -> None:
        for source, target, size in self.pool_map.scatter([0], [block]):
            self._memory[target : target + size] = whole[source : source + size]

    def _holds(self, block: int, whole: np.ndarray[Any, Any]) -> bool:
        """On every rank."""
        return all(
            np.array_equal(self._memory[at : at + size], whole[source : source + size])
            for source, at, size in self.pool_map.scatter([0], [block])
        )


def main() -> int:
    """`fake_engine.py core --config F --fd N`, as `python -m runtime core`, with this engine."""

    def engine(*args: Any) -> FakeEngine:
        fake = FakeEngine(*args, step_s=float(os.environ.get("FAKE_STEP_S", "0")))
        fake.pause(*os.environ.get("FAKE_PAUSED", "").split())
        return fake

    # In place of the real engine's module, so that torch is not even imported: these tests start a
    # lot.
    stand_in = ModuleType("runtime.engine.core")
    stand_in.Engine = engine  # type: ignore[attr-defined]
    sys.modules[stand_in.__name__] = stand_in
    from runtime.engine import process
    from runtime.errors import RuntimeFailure

    config, fd = sys.argv[sys.argv.index("--config") + 1], sys.argv[sys.argv.index("--fd") + 1]
    try:
        return process.run_core(Path(config), int(fd))
    except RuntimeFailure as e:
        print(f"core: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

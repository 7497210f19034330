"""Instances of several ranks, as processes with gloo: the tokens of one engine, no survivors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cores import Core, Cores, free_port, running_cores
from tiny_llama import write_tiny_llama

from runtime.protocol import Failed

SMALL = {"block_size": 4, "kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


def run(folder: Path, scenario: Callable[[Cores], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_cores(folder) as cores:
            await scenario(cores)
        assert cores.segments() == []

    asyncio.run(main())


def prompts() -> list[tuple[int, ...]]:
    """Around block and chunk borders; some share a prefix."""
    rng = random.Random(7)
    stem = tuple(rng.randrange(3, 96) for _ in range(120))
    made = [stem[:n] for n in (1, 3, 4, 5, 33, 64, 120)]
    return [*made, *(tuple(rng.randrange(3, 96) for _ in range(n)) for n in (7, 40, 41))]


async def answers(core: Core, **params: Any) -> list[list[int]]:
    ids = [core.send(p, max_tokens=12, ignore_eos=True, **params) for p in prompts()]
    replies = [await core.wait(id_) for id_ in ids]
    assert not any(isinstance(reply.last, Failed) for reply in replies), replies
    return [reply.tokens for reply in replies]


def ranks_of(core: Core) -> list[psutil.Process]:
    return [c for c in psutil.Process(core.process.pid).children() if "rank" in c.cmdline()]


async def gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=15)
    assert not alive


class Deployment:
    """Prefill with 1 and 2 ranks; decode with 1 and 2 over shared memory, and with 2 over tcp."""

    def __init__(self, cores: Cores, model: str) -> None:
        self._cores = cores
        self._model = model
        self._addresses = {
            f"prefill-{size}": {"host": "127.0.0.1", "port": free_port()} for size in (1, 2)
        }
        self.cores: dict[str, Core] = {}

    async def start(self) -> None:
        peers = [{"name": name, "address": at} for name, at in self._addresses.items()]
        started = [self._start(f"mixed-{n}", "mixed", n) for n in (1, 2)]
        for n, (name, address) in enumerate(self._addresses.items(), start=1):
            started.append(self._start(name, "prefill", n, peer=address))
        decode = {"cpu_buffer_bytes": 1 << 18, "prefill_peers": peers}
        for n, path in ((1, "shm"), (2, "shm"), (2, "tcp")):
            started.append(self._start(f"decode-{n}-{path}", "decode", n, transfer=path, **decode))
        await asyncio.gather(*started)

    async def _start(self, name: str, role: str, tp_size: int, **more: Any) -> None:
        config = self._cores.config(name, role, self._model, tp_size=tp_size, **SMALL, **more)
        self.cores[name] = await self._cores.start(config)


def test_ranks_of_unequal_instances(tmp_path: Path, model: str) -> None:
    async def scenario(cores: Cores) -> None:
        deployment = Deployment(cores, model)
        await deployment.start()
        core = deployment.cores
        for name, c in core.items():
            assert len(ranks_of(c)) == (1 if "-2" in name else 0)
        await same_tokens_from_any_pair(core)
        for c in core.values():
            await c.idle()
        same_kv_from_any_size(core)
        await a_stopped_instance_ends_its_ranks(core["decode-2-tcp"])
        await an_idle_instance_ends_with_a_rank(core["prefill-2"])
        await core["decode-1-shm"].until(
            lambda: core["decode-1-shm"].peers["prefill-2"].path is None
        )
        await a_busy_instance_ends_with_a_rank(core["decode-2-shm"])
        assert not [name for name in cores.segments() if "decode-2-shm" in name]
        await ranks_end_with_rank_0(core["mixed-2"])
        # Who has lost a peer serves on.
        assert len(await answers(core["decode-1-shm"], prefill="prefill-1")) == len(prompts())

    run(tmp_path, scenario)


async def same_tokens_from_any_pair(core: dict[str, Core]) -> None:
    wanted = await answers(core["mixed-1"])
    assert len({tuple(tokens) for tokens in wanted}) > 5
    assert await answers(core["mixed-2"]) == wanted
    for name in ("decode-1-shm", "decode-2-shm", "decode-2-tcp"):
        for prefill in ("prefill-1", "prefill-2"):
            await core[name].linked(prefill)
            assert await answers(core[name], prefill=prefill) == wanted, (prefill, name)


def same_kv_from_any_size(core: dict[str, Core]) -> None:
    """All ranks together have as many bytes, and so as many blocks, as the one."""
    ready = [c.ready for c in core.values()]
    assert len({r.num_device_blocks for r in ready if r}) == 1
    assert len({r.fingerprint["model"] for r in ready if r}) == 1


async def a_stopped_instance_ends_its_ranks(core: Core) -> None:
    ranks = ranks_of(core)
    assert await core.close() == 0
    await gone(ranks)


async def an_idle_instance_ends_with_a_rank(core: Core) -> None:
    [rank] = ranks_of(core)
    rank.kill()
    async with asyncio.timeout(15):
        assert await core.process.wait() == 1


async def a_busy_instance_ends_with_a_rank(core: Core) -> None:
    [rank] = ranks_of(core)
    id_ = core.send(prompts()[-1], max_tokens=400, ignore_eos=True, prefill="prefill-1")
    await core.until(lambda: len(core.answers[id_].tokens) > 2)
    rank.kill()
    async with asyncio.timeout(15):
        assert await core.process.wait() == 1


async def ranks_end_with_rank_0(core: Core) -> None:
    ranks = ranks_of(core)
    core.process.kill()
    await gone(ranks)


async def failed_start(core: Core) -> str:
    assert core.process.stderr is not None
    async with asyncio.timeout(60):
        output = await core.process.stderr.read()
        assert await core.process.wait() == 1
    return output.decode()


def test_a_model_that_does_not_split_is_refused_once(tmp_path: Path, model: str) -> None:
    async def scenario(cores: Cores) -> None:
        config = cores.config("mixed-3", "mixed", model, tp_size=3, **SMALL)
        lines = await failed_start(await cores.start(config, ready=False))
        refusal = "core: tp_size 3 does not split this model of 4 attention heads, 2 KV heads"
        assert refusal in lines and lines.count("tp_size 3") == 1
        assert "use tp_size 1, 2 or 4" in lines

    run(tmp_path, scenario)


def test_a_rank_that_does_not_start_is_named(tmp_path: Path, model: str) -> None:
    async def scenario(cores: Cores) -> None:
        config = cores.config("mixed-2", "mixed", model, tp_size=2, **SMALL)
        core = await cores.start(config, ready=False)
        async with asyncio.timeout(60):
            while not (ranks := ranks_of(core)):
                await asyncio.sleep(0.01)
        ranks[0].kill()
        lines = await failed_start(core)
        assert f"core: rank 1 of 2 (pid {ranks[0].pid}) ended by SIGKILL" in lines

    run(tmp_path, scenario)

"""Instances of several ranks, as processes with gloo: the tokens of one engine, no survivors."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cores import Core, Cores, running_cores
from free_ports import free_port
from tiny_llama import write_tiny_llama

from runtime.config import WorkerConfig, load
from runtime.engine.contract import EngineEvent, EngineRequest, Produced
from runtime.engine.core import Engine
from runtime.protocol import Failed, RequestId, SamplingParams

SMALL = {"block_size": 4, "kv_cache_bytes": 1 << 20, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="module")
def wanted(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of one engine, in this process."""
    folder = tmp_path_factory.mktemp("one")
    config = load(Cores(folder).config("mixed-0", "mixed", model, **SMALL), WorkerConfig)
    events: list[EngineEvent] = []
    engine = Engine(config, events.append)
    thread = threading.Thread(target=engine.run)
    thread.start()
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts()):
        engine.submit(EngineRequest(RequestId(str(number)), prompt, params, "generate"))
    tokens: list[list[int]] = [[] for _ in prompts()]
    deadline, at = time.monotonic() + 60, 0
    while any(len(found) < 12 for found in tokens):
        assert time.monotonic() < deadline
        time.sleep(0.005)
        for event in events[at:]:
            assert isinstance(event, Produced), event
            tokens[int(event.id)] += [token.token for token in event.tokens]
            at += 1
    engine.stop()
    thread.join()
    # They tell: not the same whatever the KV is.
    assert sum(len(set(found)) > 3 for found in tokens) >= 7
    return tokens


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


async def answers(core: Core) -> list[list[int]]:
    ids = [core.send(p, max_tokens=12, ignore_eos=True) for p in prompts()]
    replies = [await core.wait(id_) for id_ in ids]
    assert not any(isinstance(reply.last, Failed) for reply in replies), replies
    return [reply.tokens for reply in replies]


def ranks_of(core: Core) -> list[psutil.Process]:
    return [c for c in psutil.Process(core.process.pid).children() if "rank" in c.cmdline()]


async def gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=15)
    assert not alive


async def pair(cores: Cores, model: str, sizes: tuple[int, int], path: str) -> tuple[Core, Core]:
    address = {"host": "127.0.0.1", "port": free_port()}
    decode: dict[str, Any] = {
        "cpu_buffer_bytes": 1 << 18,
        "prefill_peers": [{"name": "prefill-0", "address": address}],
        "transfer": path,
    }
    configs = (
        cores.config("prefill-0", "prefill", model, tp_size=sizes[0], peer=address, **SMALL),
        cores.config("decode-0", "decode", model, tp_size=sizes[1], **decode, **SMALL),
    )
    started = await asyncio.gather(*map(cores.start, configs))
    await started[1].linked("prefill-0")
    return started[0], started[1]


@pytest.mark.parametrize(
    ("sizes", "path"), [((2, 1), "tcp"), ((1, 2), "shm"), ((1, 2), "tcp"), ((2, 1), "shm")]
)
def test_instances_of_unequal_size(
    tmp_path: Path, model: str, wanted: list[list[int]], sizes: tuple[int, int], path: str
) -> None:
    async def scenario(cores: Cores) -> None:
        both = await pair(cores, model, sizes, path)
        assert tuple(len(ranks_of(core)) + 1 for core in both) == sizes
        assert await answers(both[1]) == wanted
        for core in both:
            await core.idle()
        # They hold as many bytes, and so as many blocks.
        ready = [core.ready for core in both if core.ready]
        assert len({r.num_device_blocks for r in ready}) == 1
        ranks = [rank for core in both for rank in ranks_of(core)]
        assert [await core.close() for core in both] == [0, 0]
        await gone(ranks)

    run(tmp_path, scenario)


def test_an_instance_ends_with_any_of_its_ranks(
    tmp_path: Path, model: str, wanted: list[list[int]]
) -> None:
    async def scenario(cores: Cores) -> None:
        prefill, decode = await pair(cores, model, (2, 2), "shm")
        assert await answers(decode) == wanted
        # While it waits for work.
        ranks_of(prefill)[0].kill()
        await ends(prefill)
        await decode.until(lambda: decode.peers["prefill-0"].path is None)
        failed = await decode.ask(prompts()[0])
        assert isinstance(failed.last, Failed)
        await decode.idle()
        ranks_of(decode)[0].kill()
        await ends(decode)
        assert cores.segments() == []

    run(tmp_path, scenario)


async def ends(core: Core) -> None:
    async with asyncio.timeout(20):
        assert await core.process.wait() == 1


def test_a_mixed_instance_of_two_ranks(tmp_path: Path, model: str, wanted: list[list[int]]) -> None:
    async def scenario(cores: Cores) -> None:
        config = cores.config("mixed-0", "mixed", model, tp_size=2, **SMALL)
        core = await cores.start(config)
        assert await answers(core) == wanted
        await core.idle()
        # While it computes.
        id_ = core.send(prompts()[-1], max_tokens=400, ignore_eos=True)
        await core.until(lambda: len(core.answers[id_].tokens) > 2)
        ranks_of(core)[0].kill()
        await ends(core)

    run(tmp_path, scenario)


def test_ranks_end_with_rank_0(tmp_path: Path, model: str) -> None:
    async def scenario(cores: Cores) -> None:
        core = await cores.start(cores.config("mixed-0", "mixed", model, tp_size=2, **SMALL))
        ranks = ranks_of(core)
        assert len(ranks) == 1
        core.process.kill()
        await gone(ranks)

    run(tmp_path, scenario)


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

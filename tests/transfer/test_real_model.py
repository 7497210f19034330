"""Prefill and decode apart, on the real model: the same greedy tokens as one engine."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from cores import Cores, running_cores
from free_ports import free_port

from runtime.protocol import Failed

pytestmark = pytest.mark.model

# Around block and chunk borders; the later ones share prefixes with earlier ones.
LENGTHS = [1, 2, 15, 16, 17, 63, 300, 600, 600]


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(7)
    stem = tuple(rng.randrange(100, 40000) for _ in range(700))
    made = [stem[:n] for n in LENGTHS]
    return [*made, *(tuple(rng.randrange(100, 40000) for _ in range(n)) for n in (5, 40, 120))]


def test_decode_over_shm_and_tcp_gives_the_tokens_of_one_engine(
    tmp_path: Path, model_path: Path
) -> None:
    async def scenario(cores: Cores) -> None:
        model = str(model_path)
        peer = {"host": "127.0.0.1", "port": free_port()}
        peers = [{"name": "prefill-0", "address": peer}]
        configs = [
            cores.config("mixed-0", "mixed", model),
            cores.config("prefill-0", "prefill", model, peer=peer),
        ]
        for kind in ("shm", "tcp"):
            configs.append(
                cores.config(
                    f"decode-{kind}",
                    "decode",
                    model,
                    cpu_buffer_bytes=64 << 20,
                    prefill_peers=peers,
                    transfer=kind,
                )
            )
        mixed, prefill, *decodes = [await cores.start(config) for config in configs]
        for decode in decodes:
            await decode.linked("prefill-0")

        ids = [mixed.send(p, max_tokens=6) for p in prompts()]
        wanted = [(await mixed.wait(id_)).tokens for id_ in ids]
        assert all(len(tokens) == 6 for tokens in wanted)
        for decode, kind in zip(decodes, ("shm", "tcp"), strict=True):
            # All at once, and again with every prefix in prefill's cache.
            for _ in range(2):
                ids = [decode.send(p, max_tokens=6) for p in prompts()]
                answers = [await decode.wait(id_) for id_ in ids]
                assert [a.tokens for a in answers] == wanted
            last = answers[-1].last
            assert last is not None and not isinstance(last, Failed) and last.served is not None
            assert last.served.path == kind and last.served.kv_bytes > 0
            assert last.served.cached_tokens > 0
        for core in (mixed, prefill, *decodes):
            await core.idle()

    async def main() -> None:
        async with running_cores(tmp_path) as cores:
            await scenario(cores)
        assert cores.segments() == []
        assert [core.process.returncode for core in cores.all] == [0, 0, 0, 0]

    asyncio.run(main())

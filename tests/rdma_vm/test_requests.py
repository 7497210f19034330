"""Whole requests between two "hosts" by RDMA: the tokens of one engine, and no silent other way."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from cores import Cores, running_cores
from free_ports import free_port
from rdma_lab import DECODE_ADDRESS, DECODE_LINK, PREFILL_ADDRESS, netem
from tiny_llama import write_tiny_llama

from runtime.protocol import Failed

pytestmark = pytest.mark.rdma

OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh")
PROMPTS = [tuple(random.Random(n).randrange(96) for _ in range(n)) for n in (1, 15, 16, 17, 200)]


def _instances(cores: Cores, model: str, **decode: Any) -> list[Path]:
    """A prefill and a decode instance, each advertised on one end of the wire. Control takes
    another way, as it may on real hosts.
    """
    peer = {"host": "127.0.0.1", "port": free_port()}
    return [
        cores.config(
            "prefill-0", "prefill", model, peer=peer, advertise=PREFILL_ADDRESS, rdma={"port": 1}
        ),
        cores.config(
            "decode-0",
            "decode",
            model,
            cpu_buffer_bytes=16 << 20,
            prefill_peers=[{"name": "prefill-0", "address": peer}],
            advertise=DECODE_ADDRESS,
            rdma={"port": 1},
            **decode,
        ),
    ]


def test_the_tokens_are_those_of_one_engine(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        (tmp_path / "model").mkdir()
        model = str(write_tiny_llama(tmp_path / "model"))
        mixed_config = cores.config("mixed-0", "mixed", model)
        mixed, prefill, decode = [
            await cores.start(config)
            for config in (mixed_config, *_instances(cores, model, transfer="rdma"))
        ]
        await decode.linked("prefill-0")
        wanted = [(await mixed.ask(p, max_tokens=8, ignore_eos=True)).tokens for p in PROMPTS]
        assert all(len(tokens) == 8 for tokens in wanted)
        ids = [decode.send(p, max_tokens=8, ignore_eos=True) for p in PROMPTS]
        answers = [await decode.wait(id_) for id_ in ids]
        assert [a.tokens for a in answers] == wanted
        moved = 0
        for answer in answers:
            last = answer.last
            assert last is not None and not isinstance(last, Failed) and last.served is not None
            assert last.served.path == "rdma" and last.served.kv_bytes > 0
            moved += last.served.kv_bytes
        assert (await decode.stats()).counters["kv_bytes_rdma"] == moved
        for core in (mixed, prefill, decode):
            await core.idle()

    _run(tmp_path, scenario)


def test_a_wire_that_is_cut_in_the_middle_is_a_named_error_and_then_heals(tmp_path: Path) -> None:
    """Decode's link to RDMA is cut, its control connection is not: as a broken RDMA network is."""

    async def scenario(cores: Cores) -> None:
        configs = _instances(cores, "fake", transfer="rdma")
        _, decode = [await cores.start(config, fake=True) for config in configs]
        await decode.linked("prefill-0")
        prompt = tuple(range(100))
        assert not isinstance((await decode.ask(prompt)).last, Failed)
        with netem(DECODE_LINK, "loss", "100%"):
            answer = await decode.ask(prompt)
            assert isinstance(answer.last, Failed)
            assert (answer.last.status, answer.last.leg) == (502, "transfer")
            assert "RETRY_EXC_ERR" in answer.last.message
            # The path test fails as the request did: nothing is sent this way, nor another.
            await decode.until(lambda: "RETRY_EXC_ERR" in decode.peers["prefill-0"].reason)
            await decode.idle()
        await decode.linked("prefill-0")
        answer = await decode.ask(prompt)
        assert not isinstance(answer.last, Failed)

    _run(tmp_path, scenario)


def test_a_stopped_writer_is_fenced_without_its_help(tmp_path: Path) -> None:
    """Unlike over shm: the queue pair is decode's, so its blocks are free while prefill sleeps."""

    async def scenario(cores: Cores) -> None:
        prefill_config, decode_config = _instances(cores, "fake", transfer="rdma")
        paused = {"FAKE_PAUSED": "prefill_after_first"}
        prefill = await cores.start(prefill_config, fake=True, env=paused)
        decode = await cores.start(decode_config, fake=True)
        await decode.linked("prefill-0")
        id_ = decode.send(tuple(range(100)))
        await decode.ledger(lambda ledger: ledger.reservations > 0)
        prefill.process.send_signal(signal.SIGSTOP)
        try:
            answer = await decode.wait(id_, timeout=30.0)
            assert isinstance(answer.last, Failed) and "silent for" in answer.last.message
            await decode.idle()
        finally:
            prefill.process.send_signal(signal.SIGCONT)
        await decode.until(lambda: decode.peers["prefill-0"].path == "rdma")
        await prefill.idle(timeout=30.0)

    _run(tmp_path, scenario)


def test_auto_takes_rdma_across_hosts_and_tcp_where_it_leads_nowhere(tmp_path: Path) -> None:
    """Prefill has a /dev/shm of its own, and so cannot open the segment: as on two hosts."""

    async def scenario(cores: Cores) -> None:
        prefill_config, decode_config = _instances(cores, "fake", transfer="auto")
        prefill = await cores.start(prefill_config, fake=True, within=OWN_SHM)
        decode = await cores.start(decode_config, fake=True)
        await decode.linked("prefill-0")
        peer = decode.peers["prefill-0"]
        assert peer.path == "rdma" and "no shm: segment" in peer.reason
        with netem(DECODE_LINK, "loss", "100%"):
            answer = await decode.ask(tuple(range(100)))
            assert isinstance(answer.last, Failed) and "RETRY_EXC_ERR" in answer.last.message
            await decode.until(lambda: decode.peers["prefill-0"].path == "tcp")
            assert "path test failed" in decode.peers["prefill-0"].reason
            answer = await decode.ask(tuple(range(100)))
            assert not isinstance(answer.last, Failed)
        await prefill.idle()

    _run(tmp_path, scenario)


def _run(folder: Path, scenario: Any) -> None:
    async def main() -> None:
        async with running_cores(folder) as cores:
            await scenario(cores)
        assert cores.segments() == []

    asyncio.run(main())

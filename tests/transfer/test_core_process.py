"""Core processes as their fronts and their host see them: start, faults of a peer, end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cores import Core, Cores, running_cores
from fake_engine import FORBIDDEN_TOKEN, expected
from free_ports import free_port
from rdma_lab import BUFFERED, devices_for

from runtime.protocol import Failed, Ledger

PROMPT = tuple(range(100))
BLOCK_BYTES = 2 * 2 * 8 * 4 * 16


def run(folder: Path, scenario: Callable[[Cores], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running_cores(folder) as cores:
            await scenario(cores)
        assert cores.segments() == []

    asyncio.run(main())


class Deployment:
    """One prefill and one decode core with fake engines."""

    def __init__(self, cores: Cores, **decode: Any) -> None:
        self.cores = cores
        self.port = free_port()
        address = {"host": "127.0.0.1", "port": self.port}
        prefill_rdma, decode_rdma = devices_for(decode["transfer"])
        self.prefill_config = cores.config(
            "prefill-0", "prefill", "fake", peer=address, rdma=prefill_rdma
        )
        self.decode_config = cores.config(
            "decode-0",
            "decode",
            "fake",
            cpu_buffer_bytes=64 * BLOCK_BYTES,
            prefill_peers=[{"name": "prefill-0", "address": address}],
            rdma=decode_rdma,
            **{"device": "cuda:0"} | decode,  # the fake stands in for a GPU's engine
        )
        self.prefill: Core
        self.decode: Core

    async def start(self, **prefill_env: str) -> None:
        self.prefill, self.decode = await asyncio.gather(
            self.cores.start(self.prefill_config, fake=True, env=prefill_env),
            self.cores.start(self.decode_config, fake=True),
        )
        await self.linked()

    async def linked(self) -> None:
        await self.decode.linked("prefill-0")


async def held_up(both: Deployment) -> str:
    """A request whose prefill has put some blocks and computes no further."""
    id_ = both.decode.send(PROMPT, deadline_s=30.0)
    # Of 7 blocks, 2 are copied out.
    await both.decode.ledger(lambda ledger: ledger.buffer_blocks == 5)
    return id_


@pytest.mark.parametrize("kind", BUFFERED)
def test_prefill_killed_in_the_middle(tmp_path: Path, kind: str) -> None:
    async def scenario(cores: Cores) -> None:
        both = Deployment(cores, transfer=kind)
        await both.start(FAKE_PAUSED="prefill_after_first")
        id_ = await held_up(both)
        loop = asyncio.get_running_loop()
        killed = loop.time()
        both.prefill.process.kill()
        answer = await both.decode.wait(id_)
        assert loop.time() - killed < 1.0
        assert isinstance(answer.last, Failed)
        assert (answer.last.status, answer.last.leg) == (502, "prefill")
        assert answer.last.instance == "prefill-0"
        # The writer is proven dead: nothing stays in quarantine.
        await both.decode.idle(timeout=3.0)

        refused = await both.decode.ask(PROMPT, prefill="prefill-0")
        assert isinstance(refused.last, Failed) and refused.last.status == 502

        old = both.decode.peers["prefill-0"]
        assert old.path is None and old.reason
        both.prefill = await cores.start(both.prefill_config, fake=True)
        await both.linked()
        answer = await both.decode.ask(PROMPT, max_tokens=5)
        assert answer.tokens == expected(PROMPT, 5)
        await both.decode.idle()
        await both.prefill.idle()

    run(tmp_path, scenario)


def test_a_stopped_writer_keeps_its_blocks_until_it_is_back(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        both = Deployment(cores, transfer="shm")
        await both.start(FAKE_PAUSED="prefill_after_first")
        await held_up(both)
        other = both.decode.send(PROMPT[:40], deadline_s=1.5)
        await asyncio.sleep(0.2)
        both.prefill.process.send_signal(signal.SIGSTOP)
        try:
            answer = await both.decode.wait(other, timeout=5.0)
            assert isinstance(answer.last, Failed)
            assert (answer.last.status, answer.last.leg) == (504, "prefill")
            held = (await both.decode.stats()).ledger
            assert held.quarantined_blocks == 1  # of 3: what has landed is final, and copied out
            # Silence makes the peer down; its blocks are still not ours.
            await both.decode.until(lambda: both.decode.peers["prefill-0"].path is None, 15.0)
            held = Ledger(buffer_blocks=6, reservations=2, quarantined_blocks=6)
            await both.decode.ledger(lambda ledger: ledger == held)
        finally:
            both.prefill.process.send_signal(signal.SIGCONT)
        await both.linked()
        await both.decode.idle()
        await both.prefill.idle()

    run(tmp_path, scenario)


@pytest.mark.parametrize("end", ["SIGCONT", "SIGKILL"])
def test_device_blocks_that_a_stopped_writer_may_write_are_not_reused(
    tmp_path: Path, end: str
) -> None:
    async def scenario(cores: Cores) -> None:
        both = Deployment(cores, transfer="shm", device="cpu", kv_cache_bytes=10 * BLOCK_BYTES)
        await both.start(FAKE_PAUSED="prefill_after_first")
        id_ = both.decode.send(PROMPT, deadline_s=1.5)
        await both.decode.ledger(lambda ledger: ledger.device_blocks == 7)
        await asyncio.sleep(0.2)
        both.prefill.process.send_signal(signal.SIGSTOP)
        try:
            answer = await both.decode.wait(id_, timeout=10.0)
            assert isinstance(answer.last, Failed) and answer.last.status == 504
            # Silence makes the peer down; its blocks are still not ours.
            await both.decode.until(lambda: both.decode.peers["prefill-0"].path is None, 15.0)
            held = Ledger(
                requests=1, running=1, device_blocks=7, reservations=1, quarantined_blocks=7
            )
            await both.decode.ledger(lambda ledger: ledger == held)
        finally:
            both.prefill.process.send_signal(getattr(signal, end))
        await both.decode.idle()
        if end == "SIGCONT":
            await both.linked()
            await both.prefill.idle()

    run(tmp_path, scenario)


def test_a_stopped_writer_that_is_killed_frees_its_blocks(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        both = Deployment(cores, transfer="shm")
        await both.start(FAKE_PAUSED="prefill")
        id_ = both.decode.send(PROMPT, deadline_s=1.0)
        await asyncio.sleep(0.2)
        both.prefill.process.send_signal(signal.SIGSTOP)
        await both.decode.wait(id_, timeout=5.0)
        assert (await both.decode.stats()).ledger.quarantined_blocks == 7
        both.prefill.process.kill()
        await both.decode.idle(timeout=3.0)

    run(tmp_path, scenario)


@pytest.mark.parametrize("kind", BUFFERED)
def test_decode_killed_in_the_middle(tmp_path: Path, kind: str) -> None:
    async def scenario(cores: Cores) -> None:
        both = Deployment(cores, transfer=kind)
        await both.start(FAKE_STEP_S="0.02")
        for _ in range(4):
            both.decode.send(PROMPT)
        await asyncio.sleep(0.03)
        both.decode.process.kill()
        await both.decode.process.wait()
        await both.prefill.idle(timeout=3.0)
        # The segment was left behind; the next incarnation sweeps it.
        left = cores.segments()
        both.decode = await cores.start(both.decode_config, fake=True)
        assert not set(left) & set(cores.segments())
        await both.linked()
        answer = await both.decode.ask(PROMPT, max_tokens=5)
        assert answer.tokens == expected(PROMPT, 5)

    run(tmp_path, scenario)


# ---- start and end -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["link", "SIGTERM", "SIGINT"])
def test_the_core_ends_with_its_front_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    async def scenario(cores: Cores) -> None:
        config = cores.config(
            "decode-0", "decode", "fake", cpu_buffer_bytes=8 * BLOCK_BYTES, prefill_peers=[]
        )
        core = await cores.start(config, fake=True)
        assert len(cores.segments()) == 1
        assert os.stat(f"/dev/shm/{cores.segments()[0]}").st_mode & 0o777 == 0o600
        if how == "link":
            assert await core.close() == 0
        else:
            core.process.send_signal(getattr(signal, how))
            async with asyncio.timeout(10):
                assert await core.process.wait() == 0
        assert cores.segments() == []

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("link", "the front is gone: "),
        ("SIGTERM", "SIGTERM\n"),
        ("SIGUSR1", "the front has died\n"),  # the kernel's word for it
    ],
)
def test_requests_under_way_fail_for_what_ends_the_core(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, why: str
) -> None:
    async def scenario(cores: Cores) -> None:
        both = Deployment(cores, transfer="tcp")
        await both.start(FAKE_STEP_S="5")
        await both.linked()
        id_ = both.decode.send(PROMPT)
        await both.decode.ledger(lambda ledger: ledger.reservations > 0)
        if how == "link":
            await both.decode.close()
        else:
            both.decode.process.send_signal(getattr(signal, how))
            failed = (await both.decode.wait(id_)).last
            assert isinstance(failed, Failed)
            assert (failed.leg, failed.message) == ("decode", "decode-0 stops")

    run(tmp_path, scenario)
    said = capfd.readouterr().err
    assert f"this instance stops: {why}" in said
    assert "was lost" not in said


async def failed_start(cores: Cores, config: Path) -> str:
    """The one line on stderr of a core that could not start."""
    core = await cores.start(config, fake=True, ready=False)
    assert core.process.stderr is not None
    async with asyncio.timeout(30):
        text = (await core.process.stderr.read()).decode()
        assert await core.process.wait() == 1
    assert cores.segments() == []
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if " core INFO " not in line]
    assert len(lines) == 1, text
    return lines[0]


def test_a_buffer_larger_than_dev_shm(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        config = cores.config("d", "decode", "fake", cpu_buffer_bytes=1 << 50)
        line = await failed_start(cores, config)
        assert "cpu_buffer" in line and str((1 << 50) // BLOCK_BYTES * BLOCK_BYTES) in line

    run(tmp_path, scenario)


def test_a_buffer_smaller_than_a_block(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        config = cores.config("d", "decode", "fake", cpu_buffer_bytes=100)
        assert "100 bytes" in await failed_start(cores, config)

    run(tmp_path, scenario)


def test_a_peer_port_that_is_taken(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        peer = {"host": "127.0.0.1", "port": port}
        line = await failed_start(cores, cores.config("p", "prefill", "fake", peer=peer))
        assert f"127.0.0.1:{port}" in line and "in use" in line
        server.close()

    run(tmp_path, scenario)


def test_rdma_that_was_asked_for_and_is_not_there(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        rdma = {"transfer": "rdma", "rdma": {"device": "none0"}}
        config = cores.config("d", "decode", "fake", cpu_buffer_bytes=8 * BLOCK_BYTES, **rdma)
        line = await failed_start(cores, config)
        assert "transfer: rdma, but" in line and "no device none0" in line

    run(tmp_path, scenario)


def test_a_token_that_others_can_read(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        cores.token.chmod(0o644)
        line = await failed_start(cores, cores.config("m", "mixed", "fake"))
        assert "readable by others" in line

    run(tmp_path, scenario)


def test_mixed_and_prefill_answer_their_own_front(tmp_path: Path) -> None:
    async def scenario(cores: Cores) -> None:
        peer = {"host": "127.0.0.1", "port": free_port()}
        mixed, prefill = await asyncio.gather(
            cores.start(cores.config("m", "mixed", "fake"), fake=True),
            cores.start(cores.config("p", "prefill", "fake", peer=peer), fake=True),
        )
        answer = await mixed.ask(PROMPT, max_tokens=5)
        assert answer.tokens == expected(PROMPT, 5)
        assert answer.last is not None and not isinstance(answer.last, Failed)
        served = answer.last.served
        assert served is not None and (served.path, served.kv_bytes) == ("local", 0)
        assert served.prefill == served.decode == "m"
        await mixed.idle()

        impossible = await mixed.ask((1, FORBIDDEN_TOKEN, 2))
        assert isinstance(impossible.last, Failed) and impossible.last.code == "forbidden"

        refused = await prefill.ask(PROMPT)
        assert isinstance(refused.last, Failed) and refused.last.status == 400

    run(tmp_path, scenario)

"""Device pools on GPUs over real verbs. The GPUs are stood in for: their memory is the host's,
which an RDMA device takes by its address, as it takes a GPU's with nvidia-peermem.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from fake_engine import expected
from gpu_stand_in import StandIn, device_memory, free_device_memory, peermem
from handoff_lab import BLOCK_BYTES, Pair, drive, prompt
from rdma_lab import BINDINGS, PREFILL_DEVICE
from transport_rig import Rig, block_runs, eventually

from runtime.config import RdmaConfig
from runtime.errors import TransferError
from runtime.kv.gpu_swap import GpuCopies
from runtime.kv.region import Region
from runtime.protocol import RdmaMemory, Tokens
from runtime.transfer import rdma_adapter, verbs
from runtime.transfer.base import Runs
from runtime.transfer.rdma import RdmaSender
from runtime.transfer.rdma_adapter import RdmaAdapter, Registered
from runtime.transfer.rdma_ports import choose_port
from runtime.transfer.verbs import Device, Write

pytestmark = pytest.mark.rdma

BLOCKS, SIZE = 8, 3 * 4096


@pytest.fixture(params=BINDINGS)
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(verbs, "BINDINGS", {request.param: verbs.BINDINGS[request.param]})
    return str(request.param)


@pytest.fixture
def rig(binding: str) -> Iterator[Rig]:
    made = Rig.make("rdma_gpu", BLOCKS, SIZE)
    made.connect()
    yield made
    made.close()


# ---- one put -----------------------------------------------------------------------------------


def test_a_wrong_key_to_the_pool(rig: Rig) -> None:
    assert isinstance(rig.sender, RdmaSender)
    before, peer = rig.bytes_of(), rig.sender._peer
    assert peer.pool is not None and peer.pool.key != peer.key
    wrong = msgspec.structs.replace(peer.pool, key=peer.pool.key ^ 0x5500)
    rig.sender._peer = msgspec.structs.replace(peer, pool=wrong)
    rig.receiver.expect(1, (3,))
    with pytest.raises(TransferError, match="REM_ACCESS_ERR"):
        rig.sender.put(1, rig.source, block_runs([0], [3], SIZE), 1)
    eventually(rig.receiver.writer_gone)
    assert rig.bytes_of() == before


@pytest.mark.parametrize("at", [SIZE - 8, BLOCKS * SIZE - 8])
def test_a_run_across_the_end_of_the_buffer_or_the_pool_writes_nothing(rig: Rig, at: int) -> None:
    before = rig.bytes_of()
    rig.receiver.expect(1, (0,))
    with pytest.raises(TransferError, match="outside of the peer's memory"):
        rig.sender.put(1, rig.source, np.array([[0, at, 16]], dtype=np.int64), 1)
    assert rig.bytes_of() == before


def test_the_gpu_sees_what_was_written_before_it_counts_as_landed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed: list[int] = []
    seen = rig.decode_gpu.see_remote_writes

    def see() -> None:
        landed.append(rig.receiver.landed(1, 0))
        seen()

    monkeypatch.setattr(rig.decode_gpu, "see_remote_writes", see)
    rig.receiver.expect(1, (3, 4))
    for n in range(2):
        rig.sender.put(1, rig.source, block_runs([n], [3 + n], SIZE), n + 1)
        eventually(lambda n=n: rig.receiver.landed(1, 0) == n + 1)
    assert landed == [0, 1]


def test_a_gpu_that_fails_to_see_ends_the_session(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TransferError("cuda:0: stand-in failure")

    monkeypatch.setattr(rig.decode_gpu, "see_remote_writes", fail)
    rig.receiver.expect(1, (3,))
    rig.sender.put(1, rig.source, block_runs([0], [3], SIZE), 1)
    eventually(lambda: rig.closed)
    assert "stand-in failure" in rig.closed[0]
    assert rig.receiver.landed(1, 0) == 0 and rig.receiver.writer_gone()


# ---- registration ------------------------------------------------------------------------------


def test_soft_roce_takes_no_dmabuf_and_the_next_way_is_tried(binding: str) -> None:
    memory = device_memory(SIZE)
    gpu = StandIn()
    gpu.exported = lambda address, nbytes: os.memfd_create("stands in for a dmabuf")
    copies = GpuCopies(Region(memory.ctypes.data, SIZE), gpu)
    port = choose_port(RdmaConfig(device=PREFILL_DEVICE), [])
    why = {
        "ibverbs": "ibv_reg_dmabuf_mr failed: Operation not supported",
        "pyverbs": "pyverbs cannot",
    }
    adapter = RdmaAdapter.open(port, copies)
    assert adapter.pool is None
    assert why[binding] in adapter.no_pool and "module is not loaded" in adapter.no_pool
    adapter.close()
    with peermem():
        adapter = RdmaAdapter.open(port, copies)
    assert adapter.pool is not None and adapter.pool.how == "nvidia_peermem"
    adapter.close()
    free_device_memory(memory)


def test_a_libibverbs_that_knows_no_dmabuf_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def reg_dmabuf_mr(self, *_: int) -> None:
            raise RuntimeError("ibv_reg_dmabuf_mr is unavailable")

    device = verbs.load(dmabuf=True).open(PREFILL_DEVICE)
    real = device._domain  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "_domain", Old())
    with pytest.raises(TransferError, match="is unavailable"):
        device.register_dmabuf(Region(4096, 4096), 0, 0, remote_write=True)
    monkeypatch.setattr(device, "_domain", real)
    device.close()


# ---- instances ---------------------------------------------------------------------------------


async def answered(both: Pair, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that the GPUs of prefill and of decode copied for it; its tokens are right."""
    engines = [instance.engine.copies.engine for instance in (both.prefill, both.decode)]
    before = [engine.moved for engine in engines if isinstance(engine, StandIn)]
    id_ = both.decode.ask(tokens)
    last = await both.decode.answer(id_)
    assert isinstance(last, Tokens) and last.served is not None, last
    assert last.served.path == "rdma" and last.served.kv_bytes > 0
    assert both.decode.tokens_of(id_) == expected(tokens, 4)
    after = [engine.moved for engine in engines if isinstance(engine, StandIn)]
    prefill, decode = (now - then for now, then in zip(after, before, strict=True))
    return prefill, decode


def reason(both: Pair) -> str:
    return both.decode.role.peers()["prefill-0"].reason


def test_from_gpu_to_gpu_nothing_is_staged() -> None:
    async def scenario(both: Pair) -> None:
        assert reason(both) == ""
        assert await answered(both, prompt(40)) == (0, 0)

    drive("rdma_gpu", scenario)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_pool_that_cannot_be_registered_goes_by_the_cpu_and_says_why(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rdma_adapter.register_gpu

    def refuse(device: Device, region: Region, gpu: StandIn, *, remote_write: bool) -> object:
        if remote_write == (side == "decode"):
            raise TransferError("stand-in refusal")
        return real(device, region, gpu, remote_write=remote_write)

    monkeypatch.setattr(rdma_adapter, "register_gpu", refuse)

    async def scenario(both: Pair) -> None:
        words = {
            "prefill": "prefill-0 reads its GPU by way of the CPU: stand-in refusal",
            "decode": "through the CPU buffer, not into the GPU: stand-in refusal",
        }
        assert reason(both) == words[side]
        staged = 10 * BLOCK_BYTES
        wanted = (staged, 0) if side == "prefill" else (0, staged)
        assert await answered(both, prompt(40)) == wanted

    drive("rdma_gpu", scenario)


@pytest.mark.parametrize("broken", ["address", "key"])
def test_a_pool_that_the_path_test_does_not_find_is_done_without(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the device reached other memory than meant, or none."""

    def elsewhere(self: Registered) -> RdmaMemory:
        address, key = self.region.address, self.memory.rkey
        if broken == "address":
            address += BLOCK_BYTES
        else:
            key ^= 0x5500
        return RdmaMemory(address=address, nbytes=self.region.nbytes, key=key)

    monkeypatch.setattr(Registered, "remote", property(elsewhere))

    async def scenario(both: Pair) -> None:
        told = reason(both)
        assert told.startswith("through the CPU buffer, not into the GPU: its path test failed: ")
        wrong = {"address": "other bytes than those sent are in the device pool", "key": "_ERR"}
        assert wrong[broken] in told
        assert await answered(both, prompt(40)) == (0, 10 * BLOCK_BYTES)

    drive("rdma_gpu", scenario)


def test_a_gpu_that_is_read_wrongly_is_found_by_the_path_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = RdmaSender._writes

    def other_block(self: RdmaSender, base: int, source: Region, runs: Runs) -> list[Write]:
        pool = self._adapter.pool
        if pool and source == pool.region:
            source = Region(source.address + BLOCK_BYTES, source.nbytes)
        return real(self, base, source, runs)

    async def scenario(both: Pair) -> None:
        monkeypatch.setattr(RdmaSender, "_writes", other_block)
        both.cut()
        told = "path test over rdma: other bytes than those sent are in the buffer"
        await both.decode.until(lambda: told in reason(both))
        monkeypatch.undo()
        await both.decode.until(lambda: reason(both) == "")
        assert await answered(both, prompt(40)) == (0, 0)

    drive("rdma_gpu", scenario)

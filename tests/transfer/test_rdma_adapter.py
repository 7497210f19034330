"""What an instance registers of its memory, and says of RDMA that it cannot have.

The device is a stand-in: real ones are in tests/rdma_vm.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_stand_in import StandIn, peermem
from handoff_lab import config

from runtime.config import RdmaConfig
from runtime.errors import ConfigError, TransferError
from runtime.kv.copies import HostCopies, PoolCopies
from runtime.kv.gpu_swap import GpuCopies
from runtime.kv.region import Region
from runtime.protocol import RdmaMemory
from runtime.transfer import verbs
from runtime.transfer.rdma_adapter import Rdma, RdmaAdapter
from runtime.transfer.rdma_ports import RdmaPort
from runtime.transfer.verbs import PortFacts

REGION = Region(4096, 8192)
POOL = Region(1 << 20, 4096)
PORT = RdmaPort("none0", 1, "Ethernet", 0, bytes(16), "RoCE v2")


class StandInDevice:
    """Registers memory, but not what begins at the address that fails, and remembers it."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.registered: dict[int, bool] = {}
        self.live: list[int] = []
        self.closed = False

    def open(self, name: str) -> Any:
        assert name == "none0"
        return self

    def port(self, number: int) -> PortFacts:
        return PortFacts(5, 0, 1 << 30)

    def register(self, region: Region, *, remote_write: bool) -> Any:
        if region.address == self.fails:
            raise TransferError("ibv_reg_mr: no")
        self.registered[region.address] = remote_write
        self.live.append(region.address)
        key = len(self.registered)

        def close() -> None:
            self.live.remove(region.address)

        return SimpleNamespace(lkey=key, rkey=region.address + 7, close=close)

    def close(self) -> None:
        self.closed = True


def adapter_of(
    monkeypatch: pytest.MonkeyPatch, device: Any, copies: PoolCopies, buffer: Region | None = None
) -> RdmaAdapter:
    monkeypatch.setattr(verbs, "load", lambda **_: device)
    return RdmaAdapter.open(PORT, copies, buffer)


def test_a_cpus_pool_is_read_at_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice()
    made = adapter_of(monkeypatch, device, HostCopies(POOL))
    assert device.registered == {POOL.address: False}
    assert made.gpu is None and made.no_pool == ""


def test_a_cpus_pool_is_in_the_buffer_or_of_no_concern_at_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = StandInDevice()
    made = adapter_of(monkeypatch, device, HostCopies(POOL), REGION)
    assert device.registered == {REGION.address: True}
    end = made.end(SimpleNamespace(number=1), pool=True)  # type: ignore[arg-type]
    assert (end.address, end.key, end.pool) == (REGION.address, REGION.address + 7, None)
    assert made.no_pool == ""


@pytest.mark.parametrize("buffer", [None, REGION])
def test_a_gpus_pool_is_registered_where_that_works(
    monkeypatch: pytest.MonkeyPatch, buffer: Region | None
) -> None:
    device, gpu = StandInDevice(), StandIn()
    with peermem():
        made = adapter_of(monkeypatch, device, GpuCopies(POOL, gpu), buffer)
    assert device.registered.pop(POOL.address) == (buffer is not None)
    assert device.registered == ({REGION.address: True} if buffer else {})
    assert made.gpu is gpu and made.no_pool == ""
    queue: Any = SimpleNamespace(number=1)
    pool = made.end(queue, pool=True).pool
    assert pool == RdmaMemory(address=POOL.address, nbytes=POOL.nbytes, key=POOL.address + 7)
    assert made.end(queue).pool is None


@pytest.mark.parametrize("buffer", [None, REGION])
def test_a_gpus_pool_that_cannot_be_is_done_without_and_the_reason_kept(
    monkeypatch: pytest.MonkeyPatch, buffer: Region | None
) -> None:
    device = StandInDevice(fails=POOL.address)
    with peermem():
        made = adapter_of(monkeypatch, device, GpuCopies(POOL, StandIn()), buffer)
    assert made.pool is None and made.gpu is None
    assert "no dmabuf: " in made.no_pool and "no nvidia-peermem: ibv_reg_mr: no" in made.no_pool
    assert (made.buffer is not None) == (buffer is not None)
    assert not device.closed


def test_what_stays_is_registered_once_and_other_memory_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, copies = StandInDevice(fails=POOL.address), GpuCopies(POOL, StandIn())
    with peermem():
        made = adapter_of(monkeypatch, device, copies)
    keys = set()
    for nbytes in (100, 5000):
        with copies.staging(nbytes) as staging:
            for _ in range(2):
                with made.readable(staging) as key:
                    keys.add(key)
            assert device.live == [staging.address]
    assert len(keys) == 1
    with made.readable(REGION) as key:
        assert key not in keys and REGION.address in device.live
    assert device.live == [staging.address]
    made.close()
    assert device.live == [] and device.closed


def test_host_memory_that_cannot_be_registered_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice(fails=REGION.address)
    why = r"8,192 bytes of host memory .*: ibv_reg_mr: no"
    with pytest.raises(TransferError, match=why) as error:
        adapter_of(monkeypatch, device, HostCopies(POOL), REGION)
    assert "ulimit -l" in error.value.hint and device.closed


def opened(transfer: str, **rdma: Any) -> Rdma:
    settings = config("d", "decode", transfer=transfer, rdma=RdmaConfig(**rdma))
    made = Rdma(settings, HostCopies(POOL), REGION)
    asyncio.run(made.open())
    return made


def test_auto_goes_on_without_it_and_knows_why() -> None:
    made = opened("auto", device="none0")
    assert made.adapter is None and "no device none0" in made.missing


def test_what_was_asked_for_fails_the_start() -> None:
    with pytest.raises(ConfigError, match="transfer: rdma, but no usable RDMA port: no device"):
        opened("rdma", device="none0")


def test_another_path_that_was_asked_for_opens_nothing() -> None:
    assert "configured for tcp" in opened("tcp", device="none0").missing


def test_a_missing_binding_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "BINDINGS", {"pyverbs": "runtime.transfer.none_such"})
    with pytest.raises(TransferError, match="none_such") as error:
        verbs.load()
    assert "pdctl[rdma]" in error.value.hint


@pytest.mark.parametrize("dmabuf", [False, True])
def test_the_binding_that_takes_dmabufs_goes_first_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dmabuf: bool
) -> None:
    made = {name: SimpleNamespace(VERBS=name) for name in verbs.BINDINGS}
    assert list(made) == ["pyverbs", "ibverbs"]
    monkeypatch.setattr(verbs, "BINDINGS", {name: name for name in made})
    monkeypatch.setattr(verbs.importlib, "import_module", made.__getitem__)
    assert verbs.load(dmabuf=dmabuf) == ("ibverbs" if dmabuf else "pyverbs")

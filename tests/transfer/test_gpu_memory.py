"""By which way GPU memory is registered, and that every refusal is told. Device and CUDA are
stand-ins; tests/rdma_vm has real verbs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_stand_in import StandIn, peermem

from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.transfer import gpu_memory
from runtime.transfer.gpu_memory import register_gpu

PAGE = mmap.PAGESIZE
REGION = Region(10 * PAGE + 512, 3 * PAGE)


class StandInDevice:
    """Registers what it is told to, but not by the ways that fail, and remembers it."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.tried: list[tuple[Any, ...]] = []

    def _register(self, how: str, *rest: object) -> str:
        self.tried.append((how, *rest))
        if how in self.fails:
            raise TransferError(f"ibv_reg_mr: no {how}")
        return how

    def register(self, region: Region, *, remote_write: bool) -> Any:
        return self._register("address", region, remote_write)

    def register_dmabuf(self, region: Region, fd: int, offset: int, *, remote_write: bool) -> Any:
        os.fstat(fd)
        return self._register("dmabuf", region, offset, remote_write)


def register(device: Any, gpu: StandIn, *, remote_write: bool = True) -> tuple[Any, str]:
    return register_gpu(device, REGION, gpu, remote_write=remote_write)


@pytest.fixture
def exporting() -> Iterator[Callable[[], StandIn]]:
    """A GPU that exports; in the end no descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))

    def export(address: int, nbytes: int) -> int:
        # Whole pages around the region.
        assert (address, nbytes) == (10 * PAGE, 4 * PAGE)
        return os.open("/dev/null", os.O_RDONLY)

    def make() -> StandIn:
        made = StandIn()
        made.exported = export
        return made

    yield make
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_memory, "MODULES", tmp_path)


@pytest.mark.parametrize("remote_write", [True, False])
def test_a_dmabuf_is_the_first_way(exporting: Callable[[], StandIn], remote_write: bool) -> None:
    device = StandInDevice()
    assert register(device, exporting(), remote_write=remote_write) == ("dmabuf", "dmabuf")
    assert device.tried == [("dmabuf", REGION, 512, remote_write)]


def test_a_dmabuf_that_the_device_refuses_is_followed_by_peermem(
    exporting: Callable[[], StandIn],
) -> None:
    device = StandInDevice("dmabuf")
    with peermem():
        assert register(device, exporting()) == ("address", "nvidia_peermem")
    assert [tried[0] for tried in device.tried] == ["dmabuf", "address"]


def test_without_an_export_it_is_peermem() -> None:
    device = StandInDevice()
    with peermem():
        assert register(device, StandIn()) == ("address", "nvidia_peermem")
    assert device.tried == [("address", REGION, True)]


def test_the_older_module_does_as_well(no_module: None) -> None:
    (gpu_memory.MODULES / "nv_peer_mem").mkdir()
    assert register(StandInDevice(), StandIn())[1] == "nv_peer_mem"


def test_without_the_module_an_address_is_not_even_tried(no_module: None) -> None:
    device = StandInDevice()
    with pytest.raises(TransferError) as error:
        register(device, StandIn())
    assert str(error.value) == (
        "no dmabuf: cuda:0: stand-in failure: no dmabuf; "
        "no nvidia-peermem: the kernel module is not loaded"
    )
    assert device.tried == []


def test_every_refusal_is_told(exporting: Callable[[], StandIn]) -> None:
    with peermem(), pytest.raises(TransferError) as error:
        register(StandInDevice("dmabuf", "address"), exporting())
    assert str(error.value) == (
        "no dmabuf: ibv_reg_mr: no dmabuf; no nvidia-peermem: ibv_reg_mr: no address"
    )


def test_memory_whose_writes_the_gpu_may_not_see_is_only_read(
    exporting: Callable[[], StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(self: StandIn) -> None:
        raise TransferError("neither ordered nor can be flushed")

    monkeypatch.setattr(StandIn, "see_remote_writes", blind)
    device = StandInDevice()
    with pytest.raises(TransferError, match="neither ordered"):
        register(device, exporting())
    assert device.tried == []
    assert register(device, exporting(), remote_write=False)[1] == "dmabuf"

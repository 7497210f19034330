"""What an instance says of RDMA that it cannot have, and how GPU memory would be registered.

The device is a stand-in: real ones are in tests/rdma_vm.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from handoff_lab import config

from runtime.config import RdmaConfig
from runtime.errors import ConfigError, TransferError
from runtime.kv.region import Region
from runtime.transfer import rdma_adapter, verbs
from runtime.transfer.rdma_adapter import Rdma

REGION = Region(4096, 8192)


class StandInDevice:
    """Registers what it is told to, and remembers it."""

    def __init__(self, *fails: str) -> None:
        self.fails = fails
        self.tried: list[str] = []

    def _register(self, how: str) -> str:
        self.tried.append(how)
        if how in self.fails:
            raise TransferError(f"no {how}")
        return how

    def register(self, region: Region, *, remote_write: bool) -> Any:
        return self._register("address")

    def register_dmabuf(self, region: Region, fd: int, *, remote_write: bool) -> Any:
        os.fstat(fd)
        return self._register("dmabuf")


def register(device: Any, *, gpu: bool) -> Any:
    return rdma_adapter._register(device, REGION, remote_write=False, gpu=gpu)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_adapter, "_export_dmabuf", lambda _: os.open("/dev/null", os.O_RDONLY))


def test_host_memory_is_registered_by_its_address() -> None:
    device = StandInDevice()
    assert register(device, gpu=False) == "address" and device.tried == ["address"]


def test_gpu_memory_is_a_dmabuf_where_that_works(exported: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert register(StandInDevice(), gpu=True) == "dmabuf"
    device = StandInDevice("dmabuf")
    assert register(device, gpu=True) == "address" and device.tried == ["dmabuf", "address"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_gpu_memory_is_left_to_peermem_where_there_is_no_export() -> None:
    device = StandInDevice()
    assert register(device, gpu=True) == "address" and device.tried == ["address"]


def test_every_reason_is_told_and_what_to_do(exported: None) -> None:
    with pytest.raises(TransferError, match="no dmabuf; no address") as error:
        register(StandInDevice("dmabuf", "address"), gpu=True)
    assert "nvidia-peermem" in error.value.hint
    with pytest.raises(TransferError, match="8,192 bytes of host memory") as error:
        register(StandInDevice("address"), gpu=False)
    assert "ulimit -l" in error.value.hint


def opened(transfer: str, **rdma: Any) -> Rdma:
    settings = config("d", "decode", transfer=transfer, rdma=RdmaConfig(**rdma))
    made = Rdma(settings, REGION, remote_write=True)
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

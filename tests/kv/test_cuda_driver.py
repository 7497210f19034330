"""What is asked of CUDA's driver. `Driver` stands in for libcuda, which tests/gpu/check.py asks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from runtime.errors import TransferError
from runtime.kv.cuda_driver import CudaDriver

NUMBER, DEVICE = 3, 30
DMA_BUF, FLUSHES, ORDERING = 124, 117, 118
EVERYTHING = {DMA_BUF: 1, FLUSHES: 1, ORDERING: 100}


class Driver:
    """libcuda with these attributes of its GPU; `failing` calls return 999."""

    def __init__(self, attributes: dict[int, int], failing: str = "") -> None:
        self.attributes = attributes
        self.failing = failing
        self.calls: list[tuple[Any, ...]] = []

    def _end(self, name: str, *arguments: int) -> int:
        self.calls.append((name, *arguments))
        return 999 if name == self.failing else 0

    def cuDeviceGet(self, device: Any, number: Any) -> int:
        assert number.value == NUMBER
        device._obj.value = DEVICE
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: Any, device: Any) -> int:
        assert device.value == DEVICE
        value._obj.value = self.attributes[which.value]
        return 0

    def cuMemGetHandleForAddressRange(self, fd: Any, *rest: Any) -> int:
        fd._obj.value = 55
        # CUdeviceptr, size_t, an enum, unsigned long long
        assert [ctypes.sizeof(argument) for argument in rest] == [8, 8, 4, 8]
        return self._end("export", *(argument.value for argument in rest))

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> int:
        return self._end("flush", target.value, scope.value)


def driver_of(monkeypatch: pytest.MonkeyPatch, made: object) -> CudaDriver:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return CudaDriver(NUMBER)


def test_a_range_is_exported_as_a_dmabuf(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Driver(EVERYTHING)
    assert driver_of(monkeypatch, made).export(0x7F00_0000_0000, 1 << 40) == 55
    assert made.calls == [("export", 0x7F00_0000_0000, 1 << 40, 1, 0)]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Driver(EVERYTHING | {DMA_BUF: 0}), "has no dmabuf export"),
        (Driver(EVERYTHING, "export"), "cuMemGetHandleForAddressRange: CUDA error 999"),
    ],
)
def test_an_export_that_is_refused_says_why(
    monkeypatch: pytest.MonkeyPatch, made: Driver, why: str
) -> None:
    with pytest.raises(TransferError, match=f"cuda:3: .*{why}"):
        driver_of(monkeypatch, made).export(4096, 4096)


@pytest.mark.parametrize(
    ("ordering", "flushes", "calls"),
    [
        (200, 0, 0),
        (100, 1, 0),  # the GPU itself sees them in order
        (0, 3, 2),
        (0, 1, 2),
    ],
)
def test_remote_writes_are_flushed_where_they_are_not_ordered(
    monkeypatch: pytest.MonkeyPatch, ordering: int, flushes: int, calls: int
) -> None:
    made = Driver({ORDERING: ordering, FLUSHES: flushes})
    driver = driver_of(monkeypatch, made)
    driver.flush_remote_writes()
    driver.flush_remote_writes()
    assert made.calls == [("flush", 0, 100)] * calls


@pytest.mark.parametrize("flushes", [0, 2])
def test_a_gpu_that_neither_orders_nor_flushes_says_so(
    monkeypatch: pytest.MonkeyPatch, flushes: int
) -> None:
    driver = driver_of(monkeypatch, Driver({ORDERING: 0, FLUSHES: flushes}))
    for _ in range(2):
        with pytest.raises(TransferError, match="neither ordered nor can be flushed"):
            driver.flush_remote_writes()


def test_an_older_driver_has_not_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match=r"cuda:3: .*cuDeviceGet"):
        driver_of(monkeypatch, object()).export(4096, 4096)


def test_no_driver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(TransferError, match="libcuda"):
        CudaDriver(NUMBER).export(4096, 4096)

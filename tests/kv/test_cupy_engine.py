"""How CUDA is called through cupy: `Stub` stands in for cupy and keeps a log; no GPU is involved,
and what CUDA makes of the calls is tests/gpu/check.py's to see.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.errors import TransferError
from runtime.kv.cuda_driver import CudaDriver
from runtime.kv.cupy_engine import CupyEngine

UNREGISTERED = 0x1000
NULL_STREAM = SimpleNamespace(name="null")


class RuntimeFailure(Exception):
    """cupy's CUDARuntimeError."""


class Stub:
    """As much of cupy as is used."""

    def __init__(self, *, compiles: bool = True) -> None:
        self.log: list[Any] = []
        self.current: Any = None
        self.failing: str = ""
        self._compiles = compiles
        stub = self

        class Stream:
            null = NULL_STREAM
            ptr = 77

            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking

            def wait_event(self, event: Any) -> None:
                stub.call("wait", event.of.name)

            def synchronize(self) -> None:
                stub.call("synchronize")

            def __enter__(self) -> None:
                stub.current = self

            def __exit__(self, *_: object) -> None:
                stub.current = None

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                self.of: Any = None

            def record(self, stream: Any) -> None:
                self.of = stream

        class Device:
            def __init__(self, number: int) -> None:
                assert number == 3

            def use(self) -> None:
                stub.call("use")

            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            Device=Device,
            runtime=SimpleNamespace(
                CUDARuntimeError=RuntimeFailure,
                cudaIpcMemLazyEnablePeerAccess=1,
                memcpyAsync=lambda *a: stub.call("memcpy", *a),
                # What is registered is known to kernels by another address.
                pointerGetAttributes=lambda a: SimpleNamespace(
                    devicePointer=0 if a == UNREGISTERED else a + 5
                ),
                ipcGetMemHandle=lambda a: stub.call("share", a) or b"handle",
                ipcOpenMemHandle=lambda *a: stub.call("map", *a) or 0xABC,
                ipcCloseMemHandle=lambda a: stub.call("unmap", a),
            ),
        )

    def call(self, name: str, *arguments: object) -> None:
        self.log.append((name, *arguments))
        if name == self.failing:
            raise RuntimeFailure(f"stand-in failure of {name}")

    def asarray(self, runs: Any) -> Any:
        return ("on the GPU", runs.tolist())

    def RawKernel(self, code: str, name: str) -> Any:
        assert f"__global__ void {name}(" in code

        def launch(grid: Any, block: Any, arguments: Any) -> None:
            assert self.current is not None, "not on the thread's own stream"
            self.call("kernel", grid, block, arguments)

        def build() -> None:
            if not self._compiles:
                raise RuntimeError("no compiler")

        launch.compile = build  # type: ignore[attr-defined]
        return launch


def engine_of(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> CupyEngine:
    monkeypatch.setitem(sys.modules, "cupy", stub)  # type: ignore[arg-type]
    return CupyEngine(3)


RUNS = np.array([(0, 64, 16), (32, 0, 16)], dtype=np.int64)


def test_copies_follow_what_the_model_has_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    engine = engine_of(monkeypatch, stub)
    engine.begin()
    engine.copy(1, 2, 3)
    engine.finish()
    assert stub.log == [
        ("use",),
        ("wait", "null"),
        ("memcpy", 1, 2, 3, 4, 77),
        ("synchronize",),
    ]


def test_a_kernel_gets_the_addresses_that_it_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    engine = engine_of(monkeypatch, stub)
    engine.begin()
    assert engine.copy_runs(0x2000, 0x3000, RUNS)
    name, grid, _, arguments = stub.log[-1]
    assert (name, grid[0]) == ("kernel", 2) and grid[1] >= 1
    assert arguments == (0x2005, 0x3005, ("on the GPU", RUNS.tolist()), 2)
    assert not engine.copy_runs(UNREGISTERED, 0x3000, RUNS)
    assert not engine.copy_runs(0x2000, UNREGISTERED, RUNS)
    assert [entry[0] for entry in stub.log].count("kernel") == 1


def test_without_a_compiler_copies_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(monkeypatch, Stub(compiles=False))
    assert "no compiler" in caplog.text
    engine.begin()
    assert not engine.copy_runs(0x2000, 0x3000, RUNS)


def test_a_shared_pool_is_a_place_in_its_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def address_range(base: Any, size: Any, address: Any) -> int:
        asked.append(address.value)
        base._obj.value, size._obj.value = 0x7000_0000_0000, 1 << 30
        return 0 if len(asked) == 1 else 1

    driver = SimpleNamespace(cuMemGetAddressRange_v2=address_range)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    engine = engine_of(monkeypatch, Stub())
    assert engine.share(0x7000_0000_0200) == (b"handle", 0x200)
    with pytest.raises(TransferError, match=r"cuda:3: .*: CUDA error 1"):
        engine.share(0x7000_0000_0200)
    assert asked == [0x7000_0000_0200] * 2
    assert engine.map(b"theirs") == 0xABC
    engine.unmap(0xABC)


def test_waiting_for_the_model_is_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    engine_of(monkeypatch, stub).await_model()
    assert stub.log == [("use",), ("wait", "null"), ("synchronize",)]


def test_the_driver_is_called_on_a_thread_that_uses_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub()
    engine = engine_of(monkeypatch, stub)
    monkeypatch.setattr(CudaDriver, "export", lambda *a: stub.call("export", *a[1:]) or 9)
    monkeypatch.setattr(CudaDriver, "flush_remote_writes", lambda _: stub.call("flush"))
    assert engine.export(4096, 8192) == 9
    engine.see_remote_writes()
    assert stub.log == [("use",), ("export", 4096, 8192), ("use",), ("flush",)]


@pytest.mark.parametrize("what", ["wait", "memcpy", "synchronize", "kernel", "share", "map"])
def test_an_error_of_cuda_is_a_transfer_error(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    stub = Stub()
    stub.failing = what
    engine = engine_of(monkeypatch, stub)
    with pytest.raises(TransferError, match=f"cuda:3: stand-in failure of {what}"):
        engine.begin()
        engine.copy(1, 2, 3)
        engine.copy_runs(0x2000, 0x3000, RUNS)
        engine.finish()
        engine.map(b"theirs")
        engine.share(0x2000)

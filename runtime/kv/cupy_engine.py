"""CUDA through cupy, as gpu_swap.py needs it. Each thread has a stream of its own.

Nothing here has run on a GPU yet; tests/gpu/check.py does it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from runtime.errors import ConfigError, TransferError
from runtime.kv.copies import Runs
from runtime.kv.cuda_driver import CudaDriver
from runtime.kv.region import Region

_log = logging.getLogger(__name__)

_ANY_DIRECTION = 4  # cudaMemcpyDefault: the driver knows which address is where
_THREADS = 256
# About as many blocks as keep every multiprocessor of a large GPU busy.
_BLOCKS = 1024


class CupyEngine:
    def __init__(self, device: int) -> None:
        try:
            import cupy
        except ImportError as e:
            raise ConfigError(
                f"device cuda:{device}: KV transfers need cupy, which is missing here",
                hint="pip install 'pdctl[cuda12]'",
            ) from e
        self._cupy: Any = cupy
        self._device = device
        self._driver = CudaDriver(device)
        self._mine = threading.local()
        self._pinned: list[Any] = []
        self._kernel = self._compiled()

    def begin(self) -> None:
        with self._errors():
            cuda = self._cupy.cuda
            cuda.Device(self._device).use()  # of this thread
            if not hasattr(self._mine, "stream"):
                self._mine.stream = cuda.Stream(non_blocking=True)
            enqueued = cuda.Event(disable_timing=True)
            enqueued.record(cuda.Stream.null)  # torch computes on the default stream
            self._mine.stream.wait_event(enqueued)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        try:  # not `_errors`, which would take longer than the call
            runtime.memcpyAsync(to, source, nbytes, _ANY_DIRECTION, self._mine.stream.ptr)
        except runtime.CUDARuntimeError as e:
            raise TransferError(f"cuda:{self._device}: {e}") from e

    def copy_runs(self, to: int, source: int, runs: Runs) -> bool:
        if self._kernel is None:
            return False
        with self._errors():
            places = [self._seen_by_kernels(address) for address in (to, source)]
            if None in places:
                return False
            with self._mine.stream:
                # Kept until `finish`: the kernel reads them.
                self._mine.runs = self._cupy.asarray(runs)
                shares = max(1, min(64, _BLOCKS // len(runs)))
                arguments = (*places, self._mine.runs, len(runs))
                self._kernel((len(runs), shares), (_THREADS,), arguments)
            return True

    def finish(self) -> None:
        with self._errors():
            self._mine.stream.synchronize()
            self._mine.runs = None

    def pinned(self, nbytes: int) -> Region:
        with self._errors(), self._cupy.cuda.Device(self._device):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
        self._pinned.append(memory)
        return Region(memory.ptr, nbytes)

    def share(self, address: int) -> tuple[bytes, int]:
        with self._errors(), self._cupy.cuda.Device(self._device):
            handle = bytes(self._cupy.cuda.runtime.ipcGetMemHandle(address))
            # A handle is of the whole allocation, and torch gives out parts of larger ones.
            return handle, address - self._driver.allocation_of(address)

    def map(self, handle: bytes) -> int:
        runtime = self._cupy.cuda.runtime
        with self._errors(), self._cupy.cuda.Device(self._device):
            # Of another GPU, if the two reach each other.
            address: int = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        return address

    def unmap(self, address: int) -> None:
        with self._errors(), self._cupy.cuda.Device(self._device):
            self._cupy.cuda.runtime.ipcCloseMemHandle(address)

    def await_model(self) -> None:
        self.begin()
        self.finish()

    def export(self, address: int, nbytes: int) -> int:
        self._use()
        return self._driver.export(address, nbytes)

    def see_remote_writes(self) -> None:
        self._use()
        self._driver.flush_remote_writes()

    def _use(self) -> None:
        """For calls of the driver: unlike the runtime's, they make no context of this thread."""
        with self._errors():
            self._cupy.cuda.Device(self._device).use()

    def _seen_by_kernels(self, address: int) -> int | None:
        """The address by which kernels reach this memory; None: it is not registered with CUDA."""
        attributes = self._cupy.cuda.runtime.pointerGetAttributes(address)
        return attributes.devicePointer or None

    def _compiled(self) -> Any:
        code = files("runtime.kv").joinpath("copy_runs.cu").read_text()
        try:
            with self._cupy.cuda.Device(self._device):
                kernel = self._cupy.RawKernel(code, "copy_runs")
                kernel.compile()
        except Exception as e:
            # Boundary to the run-time compiler and the toolkit it looks for: we can do without.
            _log.warning("KV in small pieces is copied one by one: no kernel: %s", e)
            return None
        return kernel

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """CUDA's errors as ours."""
        try:
            yield
        except self._cupy.cuda.runtime.CUDARuntimeError as e:
            raise TransferError(f"cuda:{self._device}: {e}") from e

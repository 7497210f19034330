"""The few calls of CUDA's driver that cupy does not have, of one GPU.

Knows nothing of streams and pools. Whoever calls has made the GPU the current one of its thread.
"""

from __future__ import annotations

import ctypes
from typing import Any

from runtime.errors import TransferError

# Of cuda.h.
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_...
_FLUSH_WRITES_OPTIONS, _WRITES_ORDERING = 117, 118  # ..._GPU_DIRECT_RDMA_...
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_TO_OWNER = 100  # CU_FLUSH_..._WRITES_TO_OWNER, and CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_CURRENT_CONTEXT = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX


class CudaDriver:
    """Every method raises TransferError."""

    def __init__(self, number: int) -> None:
        """`number`: of the GPU, as this process counts them."""
        self._number = number
        self._found: Any = None
        self._flushes: bool | None = None

    def allocation_of(self, address: int) -> int:
        """Where the allocation begins that the address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        pointers = ctypes.byref(base), ctypes.byref(size)
        self._call("cuMemGetAddressRange_v2", *pointers, ctypes.c_uint64(address))
        return base.value

    def export(self, address: int, nbytes: int) -> int:
        """A new dmabuf descriptor of this range, which is whole pages of the host."""
        if not self._attribute(_DMA_BUF_SUPPORTED):
            raise TransferError(
                f"cuda:{self._number}: this GPU, its driver or the kernel has no dmabuf export"
            )
        fd = ctypes.c_int(-1)
        where = ctypes.c_uint64(address), ctypes.c_size_t(nbytes)
        kind = ctypes.c_int(_DMA_BUF_FD), ctypes.c_uint64(0)
        self._call("cuMemGetHandleForAddressRange", ctypes.byref(fd), *where, *kind)
        return fd.value

    def flush_remote_writes(self) -> None:
        """What other devices have written into this GPU's memory by now is seen by what it does
        next. Returns at once where the hardware sees to that.
        """
        if self._flushes is None:
            ordered = self._attribute(_WRITES_ORDERING) >= _TO_OWNER
            if not ordered and not self._attribute(_FLUSH_WRITES_OPTIONS) & _FLUSH_BY_HOST:
                raise TransferError(
                    f"cuda:{self._number}: writes of other devices are neither ordered nor can be "
                    "flushed"
                )
            self._flushes = not ordered
        if self._flushes:
            scope = ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_TO_OWNER)
            self._call("cuFlushGPUDirectRDMAWrites", *scope)

    def _attribute(self, which: int) -> int:
        device, value = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(self._number))
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            self._found = self._found or ctypes.CDLL("libcuda.so.1")
            status = getattr(self._found, name)(*arguments)
        except (OSError, AttributeError) as e:  # an older driver has not all of them
            raise TransferError(f"cuda:{self._number}: {e}") from e
        if status != 0:
            raise TransferError(f"cuda:{self._number}: {name}: CUDA error {status}")

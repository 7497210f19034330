"""How an RDMA device comes to reach a GPU's memory, or why it cannot.

First as a dmabuf, which CUDA exports; else by its address, which the kernel resolves only with
NVIDIA's module loaded. Every refusal on the way is told.

When bytes may be read is NVIDIA's GPUDirect RDMA guide (docs.nvidia.com/cuda/gpudirect-rdma,
"Synchronization and Memory Ordering"). What is read by another device has to be final, and is: a
put first waits for the model's stream. For that reason CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which
makes copies like cudaMemcpy wait, is not needed. What another device wrote is seen by kernels that
the CPU launches afterwards, where CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING says so;
elsewhere after cuFlushGPUDirectRDMAWrites. A GPU with neither is not written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from runtime.errors import TransferError
from runtime.kv.copies import CopyEngine
from runtime.kv.region import Region
from runtime.transfer.verbs import Device, Memory

MODULES = Path("/sys/module")
PEERMEM = ("nvidia_peermem", "nv_peer_mem")
"""The driver's own, and the older one beside it."""


def register_gpu(
    device: Device, region: Region, gpu: CopyEngine, *, remote_write: bool
) -> tuple[Memory, str]:
    """The registered memory, and by which way. Raises TransferError saying why by none."""
    if remote_write:
        gpu.see_remote_writes()
    try:
        return _as_dmabuf(device, region, gpu, remote_write=remote_write), "dmabuf"
    except TransferError as e:
        no_dmabuf = str(e)
    try:
        module = _peermem()
        return device.register(region, remote_write=remote_write), module
    except TransferError as e:
        raise TransferError(f"no dmabuf: {no_dmabuf}; no nvidia-peermem: {e}") from e


def _as_dmabuf(device: Device, region: Region, gpu: CopyEngine, *, remote_write: bool) -> Memory:
    """CUDA exports whole pages, and torch's memory need not begin with one."""
    page = mmap.PAGESIZE
    start = region.address // page * page
    stop = -(-(region.address + region.nbytes) // page) * page
    fd = gpu.export(start, stop - start)
    try:
        offset = region.address - start
        return device.register_dmabuf(region, fd, offset, remote_write=remote_write)
    finally:
        os.close(fd)  # the registration holds the memory


def _peermem() -> str:
    """Without it the address would be looked for among the CPU's."""
    for module in PEERMEM:
        if (MODULES / module).is_dir():
            return module
    raise TransferError("the kernel module is not loaded")

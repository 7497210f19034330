"""Everything that only a GPU can show, in a few minutes: `python tests/gpu/check.py` on a GPU host
with `pip install -e '.[runtime,cuda12]'` and the default model.

Copies between pool and pinned memory are bit-exact and ordered behind the model's own work, as
single copies and as one kernel; puts from a GPU arrive over shm and tcp; what CUDA offers an RDMA
device is what it says; with such a device, puts go from GPU to GPU through it; prefill and decode
on the GPU give the tokens of a mixed instance over each transport. Times are beside one cudaMemcpy
of the same bytes in the same run. What a host has not is skipped by name. Exit code 0: all held; 1:
something did not; 2: there is no GPU here.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import secrets
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
import torch

from runtime._native import PinnedShm, create_pinned_shm, free_pinned_shm
from runtime.config import RdmaConfig
from runtime.errors import TransferError
from runtime.kv import gpu_swap
from runtime.kv.copies import CopyEngine
from runtime.kv.cupy_engine import CupyEngine
from runtime.kv.gpu_swap import GpuCopies
from runtime.kv.region import Region
from runtime.transfer import gpu_memory, verbs
from runtime.transfer.base import ReceiverEvents
from runtime.transfer.pool_put import pool_put
from runtime.transfer.rdma import RdmaOffer, RdmaReceiver, RdmaSender
from runtime.transfer.rdma_adapter import RdmaAdapter
from runtime.transfer.rdma_ports import RdmaPort, choose_port

TOTAL = 256 << 20
SIZES = (64 << 10, 256 << 10, 368_640, 1 << 20)
RUNS = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)
ROUNDS = 9
failures: list[str] = []


def check(what: str, held: bool) -> None:
    print(f"{'ok    ' if held else 'FAILED'} {what}", flush=True)
    if not held:
        failures.append(what)


def seconds(work: Callable[[], object]) -> float:
    """Median of a few rounds, after one to warm up."""
    work()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@contextmanager
def pinned(nbytes: int) -> Iterator[tuple[PinnedShm, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """Decode's kind of buffer."""
    segment = create_pinned_shm(f"pdctl-gpu-check-{secrets.token_hex(6)}", nbytes)
    view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(segment.address))
    try:
        yield segment, view
    finally:
        free_pinned_shm(segment, unlink=True)


def scattered(size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    count = TOTAL // size
    rng = np.random.default_rng(size)
    rows = np.empty((count, 3), dtype=np.int64)
    rows[:, 0], rows[:, 1] = rng.permutation(count) * size, rng.permutation(count) * size
    rows[:, 2] = size
    return rows


def expected(source: np.ndarray[Any, Any], runs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    size = int(runs[0, 2])
    made = np.zeros_like(source)
    for at, to, _ in runs.tolist():
        made[to : to + size] = source[at : at + size]
    return made


def copies() -> None:
    """Both directions, every size: bytes, then speed."""
    import cupy

    pool = torch.randint(0, 256, (TOTAL,), dtype=torch.uint8, device="cuda")
    mover = GpuCopies(Region(pool.data_ptr(), TOTAL), CupyEngine(0))
    with pinned(TOTAL) as (segment, view):
        check("the CPU buffer is registered with the driver", segment.lock == "cuda")
        host = Region(segment.address, TOTAL)
        memcpy = cupy.cuda.runtime.memcpy
        limits = {
            "out": seconds(lambda: memcpy(host.address, pool.data_ptr(), TOTAL, 4)),
            "into": seconds(lambda: memcpy(pool.data_ptr(), host.address, TOTAL, 4)),
        }
        for size in SIZES:
            runs = scattered(size)
            view[:] = 0
            mover.out(host, runs)
            check(
                f"{size >> 10} KiB blocks out of the GPU",
                bool((view == expected(pool.cpu().numpy(), runs)).all()),
            )
            wanted = np.random.default_rng(1).integers(0, 256, TOTAL, dtype=np.uint8)
            view[:] = wanted
            pool.zero_()
            mover.into(host, runs)
            check(
                f"{size >> 10} KiB blocks into the GPU",
                bool((pool.cpu().numpy() == expected(wanted, runs)).all()),
            )
            for name, limit in limits.items():
                move = mover.out if name == "out" else mover.into
                took = seconds(lambda move=move, runs=runs: move(host, runs))  # type: ignore[misc]
                moved = int(runs[:, 2].sum())
                print(
                    f"       {size >> 10:5d} KiB {name:<5}{moved / took / 1e9:8.2f} GB/s, "
                    f"{limit / took * moved / TOTAL:.2f} of one cudaMemcpy"
                )


def kernel() -> None:
    """From which size of runs on single copies are as fast as one kernel: gpu_swap.SHORT."""
    pool = torch.randint(0, 256, (TOTAL,), dtype=torch.uint8, device="cuda")
    other = torch.zeros_like(pool)
    engine = CupyEngine(0)
    check("the copy kernel compiles", engine._kernel is not None)
    source = Region(pool.data_ptr(), TOTAL)
    with pinned(TOTAL) as (segment, view):
        for name, to in (
            ("out to pinned memory", Region(segment.address, TOTAL)),
            ("within the GPU", Region(other.data_ptr(), TOTAL)),
        ):
            for size in RUNS:
                runs = scattered(size)[: min(TOTAL // size, 4096)]
                wanted = expected(pool.cpu().numpy(), runs)
                view[:] = 0
                other.zero_()
                took = {
                    how: seconds(
                        lambda short=short, runs=runs, to=to: timed(engine, to, source, runs, short)
                    )  # type: ignore[misc]
                    for how, short in (("copies", 0), ("kernel", 1 << 40))
                }
                found = view if to.address == segment.address else other.cpu().numpy()
                check(f"{size >> 10} KiB runs {name}", bool((found == wanted).all()))
                speeds = (f"{how} {runs[:, 2].sum() / t / 1e9:.2f} GB/s" for how, t in took.items())
                print(f"       {len(runs)} runs: {', '.join(speeds)}")


def timed(engine: CopyEngine, to: Region, source: Region, runs: Any, short: int) -> None:
    """With this for gpu_swap.SHORT."""
    before, gpu_swap.SHORT = gpu_swap.SHORT, short
    try:
        gpu_swap.move(engine, to, source, runs)
    finally:
        gpu_swap.SHORT = before


def order() -> None:
    """A copy enqueued while the model still computes must see what it computes."""
    side = 8192
    pool = torch.zeros(side * side, dtype=torch.float32, device="cuda")
    nbytes = pool.numel() * 4
    mover = GpuCopies(Region(pool.data_ptr(), nbytes), CupyEngine(0))
    with pinned(nbytes) as (segment, view):
        runs = np.array([[0, 0, nbytes]], dtype=np.int64)
        a = torch.ones((side, side), device="cuda")
        for value in (1.0, 2.0, 3.0):
            for _ in range(10):
                torch.mm(a * value, a, out=pool.view(side, side))
            mover.out(Region(segment.address, nbytes), runs)
            held = bool((view.view(np.float32) == value * side).all())
            check(f"copies wait for the model ({value:g})", held)


def puts() -> None:
    """Out of the GPU into decode's buffer, over each transport."""
    from transport_rig import Rig, block_runs, eventually

    blocks, size = 64, 368_640
    for kind in ("shm", "tcp"):
        rig = Rig.make(kind, blocks, size)
        rig.connect()
        try:
            pool = torch.from_numpy(rig.pool).cuda()
            mover = GpuCopies(Region(pool.data_ptr(), pool.numel()), CupyEngine(0))
            source = np.random.default_rng(3).permutation(blocks).tolist()
            rig.receiver.expect(1, tuple(range(blocks)))
            pool_put(rig.sender, mover, 1, block_runs(source, list(range(blocks)), size), blocks)
            eventually(lambda rig=rig: rig.receiver.landed(1, blocks) == blocks, 20)
            check(f"a put from the GPU over {kind}", rig.bytes_of() == rig.pool_bytes(source))
        finally:
            rig.close()


def exports() -> None:
    """What CUDA offers an RDMA device; it takes none to see that."""
    pool = torch.zeros(TOTAL, dtype=torch.uint8, device="cuda")
    engine = CupyEngine(0)
    try:
        fd = engine.export(pool.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, TOTAL)
    except TransferError as e:
        check(f"no dmabuf, which CUDA says before it is asked: {e}", "no dmabuf export" in str(e))
    else:
        check("a dmabuf of the pool has its size", os.lseek(fd, 0, os.SEEK_END) >= TOTAL)
        os.close(fd)
    try:
        engine.see_remote_writes()
    except TransferError as e:
        print(f"       the pool is not written by RDMA: {e}")
    else:
        flushed = engine._driver._flushes
        print(f"       writes of other devices are {'flushed' if flushed else 'seen in order'}")
    loaded = [module for module in gpu_memory.PEERMEM if (gpu_memory.MODULES / module).is_dir()]
    print(f"       nvidia-peermem: {', '.join(loaded) or 'not loaded'}")


def rdma_port() -> RdmaPort | None:
    """None: what is missing was said."""
    try:
        verbs.load()
        return choose_port(RdmaConfig(), [])
    except TransferError as e:
        print(f"skipped: no RDMA device: {e}")
        return None


def rdma() -> None:
    """From this GPU through an RDMA port to itself: into GPU memory, and into decode's buffer."""
    from transport_rig import eventually

    if (port := rdma_port()) is None:
        return
    ours = torch.zeros(TOTAL, dtype=torch.uint8, device="cuda")
    theirs = torch.zeros_like(ours)
    copies, there = (GpuCopies(Region(t.data_ptr(), TOTAL), CupyEngine(0)) for t in (ours, theirs))
    with pinned(TOTAL) as (segment, view):
        read = RdmaAdapter.open(port, copies)
        written = RdmaAdapter.open(port, there, Region(segment.address, TOTAL))
        for what, adapter in (("read", read), ("written", written)):
            by_cpu = f"not, but by way of the CPU: {adapter.no_pool}"
            how = adapter.pool.how if adapter.pool else by_cpu
            print(f"       GPU memory is {what} by {port}: {how}")
        offer = RdmaOffer(written)
        sender = RdmaSender(read, offer.end, TOTAL)
        receiver = RdmaReceiver(offer, sender.end, ReceiverEvents(*[lambda *_: None] * 4))
        numbers = itertools.count(1)

        def put(runs: Any) -> None:
            nonce, count = next(numbers), len(runs)
            receiver.expect(nonce, tuple(range(count)))
            pool_put(sender, copies, nonce, runs, count)
            eventually(lambda: receiver.landed(nonce, 0) == count, 20)

        try:
            for size in SIZES:
                runs = scattered(size)
                for where in ("the GPU", "the buffer")[0 if sender.pool_bytes else 1 :]:
                    first = TOTAL if where == "the GPU" else 0
                    into = runs + np.array([0, first, 0])
                    view[:] = 0
                    theirs.zero_()
                    torch.cuda.synchronize()
                    # Enqueued, and not waited for: the put has to.
                    ours.random_(0, 256)
                    put(into)
                    wanted = expected(ours.cpu().numpy(), runs)
                    # Compared by a kernel, which must see what the device has written.
                    found = theirs if where == "the GPU" else torch.from_numpy(view).cuda()
                    held = bool((found == torch.from_numpy(wanted).cuda()).all())
                    check(f"{size >> 10} KiB blocks by RDMA into {where}", held)
                    took = seconds(lambda into=into: put(into))  # type: ignore[misc]
                    print(f"       {runs[:, 2].sum() / took / 1e9:.2f} GB/s")
        finally:
            sender.close()
            receiver.close()
            read.close()
            written.close()


def requests() -> None:
    """Prefill and decode on this GPU, over each transport, against a mixed instance on it."""
    from lab import MODEL_NAME, Lab, running

    from pdctl import models

    def tokens(endpoint: str) -> list[list[int]]:
        answers = []
        for length in (1, 16, 17, 500, 1024):
            body = {
                "model": MODEL_NAME,
                "prompt": [(7 * i) % 40_000 + 100 for i in range(length)],
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            request = urllib.request.Request(
                f"{endpoint}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                answers.append(json.load(response)["choices"][0]["token_ids"])
        return answers

    alike = {"host": "local", "devices": 0, "kv_cache": "512MiB"}
    with tempfile.TemporaryDirectory(prefix="pdctl-gpu-") as root:
        lab = Lab(Path(root), models.resolve("smollm2-135m", Path()).path)
        for mixed in running(lab, "gpu-mixed", mixed=[alike]):
            wanted = tokens(mixed.endpoint)
        for kind in ("cuda_ipc", "shm", *(["rdma"] if rdma_port() else []), "tcp"):
            decode = alike | {"cpu_buffer": "256MiB", "transfer": kind}
            for pair in running(lab, f"gpu-{kind}", prefill=[alike], decode=[decode]):
                same = tokens(pair.endpoint) == wanted
                check(f"tokens over {kind} are those of a mixed instance", same)
                print(lab.pdctl("bench", "transfer", pair.name, "--rounds", "3").stdout)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 2
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    began = time.perf_counter()
    for part in (copies, kernel, order, puts, exports, rdma, requests):
        try:
            part()
        except Exception as e:
            # Boundary of one part: the others are still worth their time on a borrowed GPU.
            check(f"{part.__name__}: {type(e).__name__}: {e}", False)
    print(f"{len(failures)} failed, {time.perf_counter() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

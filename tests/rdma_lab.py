"""The guest's two RDMA devices, and the wire between them (tests/rdma_vm/two_hosts.sh)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.transfer import verbs

PYVERBS = "RDMA_VM_PYVERBS"
IN_GUEST = os.environ.get("RDMA_VM") == "1"
PREFILL_DEVICE, DECODE_DEVICE = "rxa", "rxb"
PREFILL_LINK, DECODE_LINK = "va", "vb"
PREFILL_ADDRESS, DECODE_ADDRESS = "10.77.1.1", "10.77.1.2"
BUFFERED = ["shm", "tcp", pytest.param("rdma", marks=pytest.mark.rdma)]
"""Every transport that goes through the CPU buffer when the device pool is on a GPU."""
GPU_KINDS = ["cuda_ipc", pytest.param("rdma_gpu", marks=pytest.mark.rdma)]
"""Those that reach a device pool on a GPU, with a stand-in for the GPUs: rdma, by `peermem`."""
KINDS = [*GPU_KINDS, *BUFFERED]
"""Every transport."""
BINDINGS = [name for name in verbs.BINDINGS if name != "pyverbs" or os.environ.get(PYVERBS, "1")]
"""Debian's pyverbs is made for Debian's Python: the guest's script says where there is none."""


def has_devices() -> bool:
    devices = Path("/sys/class/infiniband")
    return all((devices / name).exists() for name in (PREFILL_DEVICE, DECODE_DEVICE))


def path_of(kind: str) -> str:
    """As pdctl calls it."""
    return kind.removesuffix("_gpu")


def on_gpus(kind: str) -> bool:
    return kind in ("cuda_ipc", "rdma_gpu")


def devices_for(kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """`rdma` of a prefill and of a decode instance that stand for two hosts."""
    if path_of(kind) != "rdma":
        return {}, {}
    return {"device": PREFILL_DEVICE}, {"device": DECODE_DEVICE}


@contextlib.contextmanager
def netem(link: str, *what: str) -> Iterator[None]:
    """Lose or delay what leaves by this link: `loss 1%`, `delay 2ms`."""
    tc("add", link, "netem", *what)
    try:
        yield
    finally:
        tc("del", link)


def tc(verb: str, link: str, *what: str) -> None:
    subprocess.run(["tc", "qdisc", verb, "dev", link, "root", *what], check=True)


@contextlib.contextmanager
def link_down(link: str) -> Iterator[None]:
    def set_link(state: str) -> None:
        subprocess.run(["ip", "link", "set", link, state], check=True)

    set_link("down")
    try:
        yield
    finally:
        set_link("up")

"""What kind of host this is: addresses, limits, disk, GPUs, RDMA devices. `doctor` asks it."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from typing import Any

from .store import free_bytes

SIOCGIFADDR = 0x8915
CAP_IPC_LOCK = 14
GPU_TIMEOUT_S = 20.0
_QUERY = "--query-gpu=index,name,memory.free,memory.total"
# Other lines are warnings, or tell of a GPU that fell off the bus.
_ROW = re.compile(r"\s*(\d+)\s*,\s*(.+?)\s*,\s*([^,]+?)\s*,\s*([^,]+?)\s*\Z")


def clock(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Unix time now. Its caller knows how long the question was under way."""
    return {"time": time.time()}


def facts(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """`names`: what others call this host; `towards`: addresses of others."""
    gpus, gpu_error = _gpus()
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "path": os.environ.get("PATH", ""),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "may_lock": _has_capability(CAP_IPC_LOCK),
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "disk_free": free_bytes(base),
        "memory_free": memory_free(),
        "gpus": gpus,
        "gpu_error": gpu_error,
        "rdma": _rdma(),
        "addresses": interfaces(),
        "resolved": {name: resolved(name) for name in request.get("names", [])},
        "sources": {a: source_towards(a) for a in request.get("towards", [])},
    }


def _limit(which: int) -> int:
    """-1: none."""
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _has_capability(number: int) -> bool:
    try:
        with open("/proc/self/status") as f:
            found = next(line for line in f if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(found.split()[1], 16) >> number & 1)


def memory_free() -> int:
    """Bytes that can be had without swapping, as the kernel estimates."""
    with open("/proc/meminfo") as f:
        found = next(line for line in f if line.startswith("MemAvailable:"))
    return int(found.split()[1]) << 10


# ---- addresses -----------------------------------------------------------------------------------


def interfaces() -> dict[str, list[str]]:
    """Interface -> its addresses; IPv4 first."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for name, addresses in found.items():
            try:
                row = fcntl.ioctl(s, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has none
            addresses.append(socket.inet_ntoa(row[20:24]))
    try:
        with open("/proc/net/if_inet6") as f:
            rows = [line.split() for line in f]
    except OSError:
        rows = []
    for number, _, _, scope, _, name in rows:
        if scope != "20":  # link-local: no use without its interface
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
            found.setdefault(name, []).append(text)
    return {name: addresses for name, addresses in found.items() if addresses}


def resolved(name: str) -> list[str]:
    """What the name means on this host."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def source_towards(address: str) -> str:
    """The address of ours that the kernel would use to reach another; empty when it knows no way.

    Nothing is sent.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(where)
            return str(s.getsockname()[0])
    except OSError:
        return ""


# ---- devices -------------------------------------------------------------------------------------


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """GPUs with their memory in bytes, and why there are none where nvidia-smi fails."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return [], ""
    try:
        done = subprocess.run(
            [smi, _QUERY, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=GPU_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        return [], f"nvidia-smi: {e}"
    rows = [found.groups() for found in map(_ROW.match, done.stdout.splitlines()) if found]
    if done.returncode or not rows:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"nvidia-smi: {said[0] if said else f'no GPU, exit code {done.returncode}'}"
    return [
        {"index": int(index), "name": name, "free": _mib(free), "total": _mib(total)}
        for index, name, free, total in rows
    ], ""


def _mib(text: str) -> int:
    """Some devices say [N/A]."""
    return int(text) << 20 if text.isdigit() else 0


def _rdma() -> list[dict[str, Any]]:
    """Every port of every device: its state, its link layer, and its GIDs that are not empty."""
    ports = []
    for path in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        parts = path.split("/")
        gids = []
        for gid in sorted(glob.glob(f"{path}/gids/*"), key=lambda p: int(os.path.basename(p))):
            index, value = os.path.basename(gid), _read(gid)
            if value.replace(":", "").strip("0"):
                kind = _read(f"{path}/gid_attrs/types/{index}")
                gids.append({"index": int(index), "gid": value, "type": kind})
        ports.append(
            {
                "device": parts[4],
                "port": int(parts[6]),
                "state": _read(f"{path}/state").partition(": ")[2],
                "link": _read(f"{path}/link_layer"),
                "gids": gids,
            }
        )
    return ports


def _read(path: str) -> str:
    try:
        with open(path) as f:
            return f.read().strip()
    except OSError:
        return ""

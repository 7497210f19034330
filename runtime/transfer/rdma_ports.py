"""Which RDMA port and which of its addresses (GIDs) an instance uses, read from sysfs.

A GID that is one of the instance's own network addresses goes first; then any other, the most
widely reachable kind first. The topology's `rdma` narrows the choice and has the last word. Opens
nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.config import RdmaConfig
from runtime.errors import TransferError

SYSFS = Path("/sys/class/infiniband")

LinkLayer = Literal["Ethernet", "InfiniBand"]
_ACTIVE = "ACTIVE"
_ROCE_V2 = "RoCE v2"
_NO_GID = bytes(16)
_LINK_LOCAL = b"\xfe\x80"
_MAPPED_IPV4 = bytes(10) + b"\xff\xff"


@dataclass(frozen=True, slots=True)
class RdmaPort:
    device: str
    number: int
    link: LinkLayer
    gid_index: int
    gid: bytes
    kind: str
    """As the kernel calls it: `RoCE v2`, `IB/RoCE v1`."""

    @property
    def family(self) -> str:
        """What both ends must have in common to reach each other."""
        if self.link == "InfiniBand":
            return "InfiniBand"
        version = "IPv4" if is_ipv4(self.gid) else "IPv6"
        return f"{self.kind} over {version}"

    def __str__(self) -> str:
        return f"{self.device} port {self.number}, GID {self.gid_index} ({address_of(self.gid)})"


def is_ipv4(gid: bytes) -> bool:
    return gid.startswith(_MAPPED_IPV4)


def address_of(gid: bytes) -> str:
    """As people write it: RoCE's GIDs are IP addresses."""
    return str(ipaddress.IPv4Address(gid[12:]) if is_ipv4(gid) else ipaddress.IPv6Address(gid))


def choose_port(wanted: RdmaConfig, addresses: Sequence[str], sysfs: Path = SYSFS) -> RdmaPort:
    """The best usable port and GID; `addresses` are this instance's own, the best first.

    Raises TransferError saying what there is, and why none of it will do.
    """
    refused: list[str] = []
    usable = list(_usable(wanted, sysfs, refused))
    if not usable:
        if not refused:
            raise TransferError("this host has no RDMA device")
        raise TransferError(f"no usable RDMA port: {'; '.join(refused)}")
    return min(usable, key=lambda port: _preference(port, addresses))


def own_addresses(advertise: str, peers: Sequence[str]) -> list[str]:
    """The advertised address, then those that this host uses on its way to each of the peers."""
    found: list[str] = []
    for host, route in [(advertise, False), *((peer, True) for peer in peers)]:
        address = _source_address(host) if route else _resolved(host)
        if address and address not in found:
            found.append(address)
    return found


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError:
        return ""


def _source_address(host: str) -> str:
    """A connected datagram socket asks the kernel for a route; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _preference(port: RdmaPort, addresses: Sequence[str]) -> tuple[int, int, str, int, int]:
    address = address_of(port.gid)
    own = addresses.index(address) if address in addresses else len(addresses)
    return own, _reach(port), port.device, port.number, port.gid_index


def _reach(port: RdmaPort) -> int:
    """0 for the kind of address that leads furthest."""
    if port.link == "InfiniBand":
        return 0
    if port.kind != _ROCE_V2:
        return 3
    if is_ipv4(port.gid):
        return 0
    return 2 if port.gid.startswith(_LINK_LOCAL) else 1


def _usable(wanted: RdmaConfig, sysfs: Path, refused: list[str]) -> Iterator[RdmaPort]:
    devices = sorted(path.name for path in sysfs.iterdir()) if sysfs.is_dir() else []
    if wanted.device is not None and wanted.device not in devices:
        known = f"there are: {', '.join(devices)}" if devices else "this host has none"
        refused.append(f"no device {wanted.device} ({known})")
        return
    for device in devices if wanted.device is None else [wanted.device]:
        ports = sorted(int(path.name) for path in (sysfs / device / "ports").iterdir())
        if wanted.port is not None and wanted.port not in ports:
            refused.append(f"{device} has no port {wanted.port}")
            continue
        for number in ports if wanted.port is None else [wanted.port]:
            yield from _gids(wanted, sysfs, (device, number), refused)


def _gids(
    wanted: RdmaConfig, sysfs: Path, where: tuple[str, int], refused: list[str]
) -> Iterator[RdmaPort]:
    device, number = where
    folder = sysfs / device / "ports" / str(number)
    state = _read(folder / "state").partition(": ")[2]
    if state != _ACTIVE:
        refused.append(f"{device} port {number} is {state or 'in no state'}")
        return
    link: LinkLayer = "InfiniBand" if _read(folder / "link_layer") == "InfiniBand" else "Ethernet"
    found = False
    for index in sorted(int(path.name) for path in (folder / "gids").iterdir()):
        gid = bytes.fromhex(_read(folder / "gids" / str(index)).replace(":", ""))
        if gid in (b"", _NO_GID) or wanted.gid_index not in (None, index):
            continue
        found = True
        yield RdmaPort(
            device, number, link, index, gid, _read(folder / "gid_attrs" / "types" / str(index))
        )
    if not found:
        which = "no GID" if wanted.gid_index is None else f"no GID at index {wanted.gid_index}"
        refused.append(f"{device} port {number} has {which}")


def _read(path: Path) -> str:
    """Empty where the kernel has nothing to say, as for the type of an empty GID."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""

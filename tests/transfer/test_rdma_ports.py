"""Which RDMA port and GID are chosen, on made-up sysfs trees like those of real hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from runtime.config import RdmaConfig
from runtime.errors import TransferError
from runtime.transfer.rdma_ports import address_of, choose_port, own_addresses

LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def mapped(address: str) -> str:
    high, low = socket.inet_aton(address)[:2].hex(), socket.inet_aton(address)[2:].hex()
    return f"0000:0000:0000:0000:0000:ffff:{high}:{low}"


def add_port(
    sysfs: Path,
    device: str,
    gids: list[tuple[str, str]],
    *,
    port: int = 1,
    state: str = "4: ACTIVE",
    link: str = "Ethernet",
) -> None:
    folder = sysfs / device / "ports" / str(port)
    (folder / "gids").mkdir(parents=True)
    (folder / "gid_attrs/types").mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{link}\n")
    for index, (gid, kind) in enumerate(gids):
        (folder / "gids" / str(index)).write_text(f"{gid}\n")
        if gid != EMPTY:  # the kernel answers EINVAL for the type of an empty one
            (folder / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")


def roce(address: str) -> list[tuple[str, str]]:
    """As a mlx5 port with one IPv4 address has them."""
    return [(LINK_LOCAL, V1), (LINK_LOCAL, V2), (mapped(address), V1), (mapped(address), V2)]


def test_the_port_with_our_own_address_goes_first(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", roce("10.0.0.5"))
    add_port(tmp_path, "mlx5_1", roce("10.1.0.5"))
    port = choose_port(RdmaConfig(), ["10.1.0.5", "10.0.0.5"], tmp_path)
    assert (port.device, port.gid_index, port.kind) == ("mlx5_1", 3, V2)
    assert address_of(port.gid) == "10.1.0.5"
    assert port.family == "RoCE v2 over IPv4"


def test_else_the_first_active_one_and_its_furthest_reaching_address(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", roce("10.0.0.5"), state="1: DOWN")
    add_port(tmp_path, "mlx5_1", [(LINK_LOCAL, V2), (EMPTY, ""), *roce("10.1.0.5")])
    add_port(tmp_path, "mlx5_2", roce("10.2.0.5"))
    port = choose_port(RdmaConfig(), ["192.168.1.1"], tmp_path)
    assert (port.device, port.gid_index) == ("mlx5_1", 5)


def test_ipv6_before_link_local(tmp_path: Path) -> None:
    wide = "2001:0db8:0000:0000:0000:0000:0000:0001"
    add_port(tmp_path, "mlx5_0", [(LINK_LOCAL, V2), (wide, V1), (wide, V2)])
    port = choose_port(RdmaConfig(), [], tmp_path)
    assert (port.gid_index, address_of(port.gid)) == (2, "2001:db8::1")
    assert port.family == "RoCE v2 over IPv6"


def test_infiniband(tmp_path: Path) -> None:
    gid = "fe80:0000:0000:0000:0c42:a103:0065:c9a2"
    add_port(tmp_path, "mlx5_0", [(gid, V1), (EMPTY, "")], link="InfiniBand")
    port = choose_port(RdmaConfig(), ["10.0.0.5"], tmp_path)
    assert (port.link, port.gid_index, port.family) == ("InfiniBand", 0, "InfiniBand")


def test_the_topology_has_the_last_word(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", roce("10.0.0.5"))
    add_port(tmp_path, "mlx5_1", roce("10.1.0.5"), port=1)
    add_port(tmp_path, "mlx5_1", roce("10.1.0.6"), port=2)
    port = choose_port(RdmaConfig("mlx5_1", 2, 1), ["10.0.0.5"], tmp_path)
    assert (port.device, port.number, port.gid_index) == ("mlx5_1", 2, 1)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (RdmaConfig("mlx5_9"), "no device mlx5_9 (there are: mlx5_0, mlx5_1)"),
        (RdmaConfig("mlx5_0"), "mlx5_0 port 1 is DOWN"),
        (RdmaConfig("mlx5_1", port=2), "mlx5_1 has no port 2"),
        (RdmaConfig("mlx5_1", gid_index=7), "mlx5_1 port 1 has no GID at index 7"),
        (RdmaConfig(gid_index=7), "mlx5_0 port 1 is DOWN; mlx5_1 port 1 has no GID at index 7"),
    ],
)
def test_what_will_not_do_is_named(tmp_path: Path, wanted: RdmaConfig, words: str) -> None:
    add_port(tmp_path, "mlx5_0", roce("10.0.0.5"), state="1: DOWN")
    add_port(tmp_path, "mlx5_1", roce("10.1.0.5"))
    with pytest.raises(TransferError) as error:
        choose_port(wanted, [], tmp_path)
    assert words in str(error.value)


def test_a_host_without_rdma(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no RDMA device"):
        choose_port(RdmaConfig(), [], tmp_path / "infiniband")


def test_own_addresses() -> None:
    assert own_addresses("127.0.0.1", ["127.0.0.2"]) == ["127.0.0.1"]
    assert own_addresses("localhost", []) in (["127.0.0.1"], ["::1"])
    assert own_addresses("no such host.", ["no such host."]) == []

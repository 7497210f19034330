"""Other numbers of replicas: pure, and that a recorded topology comes back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdctl.errors import PdctlError, UsageError
from pdctl.scaling import from_record, scaled, to_record
from pdctl.topology import Topology, load

TOPOLOGIES = Path(__file__).parents[2] / "topologies"


def topology(**sections: Any) -> Topology:
    base: dict[str, Any] = {"name": "demo", "model": "m", "hosts": {"a": {}, "b": {"address": "b"}}}
    plain = {"router": {"host": "a"}, "prefill": ({"host": "a"},), "decode": ({"host": "a"},)}
    return Topology.model_validate(base | plain | sections)


TWO_GROUPS = ({"host": "a", "replicas": 2}, {"host": "b", "replicas": 2})


@pytest.mark.parametrize(
    ("count", "hosts"), [(1, "a"), (2, "aa"), (3, "aab"), (4, "aabb"), (6, "aabbbb")]
)
def test_the_highest_numbers_come_and_go(count: int, hosts: str) -> None:
    wide = topology(hosts={"a": {"advertise": "a.x"}, "b": {"address": "b"}}, decode=TWO_GROUPS)
    found = [i for i in scaled(wide, {"decode": count}).instances() if i.role == "decode"]
    assert [i.name for i in found] == [f"decode-{n}" for n in range(count)]
    assert "".join(i.host for i in found) == hosts
    assert scaled(wide, {}) == wide


def test_gpus_are_given_up_and_come_back_but_are_not_invented() -> None:
    base = topology(dtype="bfloat16", decode=({"host": "a", "replicas": 2, "devices": (0, 1)},))
    one = scaled(base, {"decode": 1})
    assert (one.decode[0].replicas, one.decode[0].devices) == (1, (0,))
    assert scaled(base, {"decode": 2}) == base
    with pytest.raises(UsageError, match="names 2 GPUs for 3 replicas") as caught:
        scaled(base, {"decode": 3})
    assert caught.value.hint == "give one GPU number for each replica"


def test_the_gpus_of_all_ranks_go_with_their_instance() -> None:
    group = {"host": "a", "replicas": 2, "tp_size": 2, "devices": (0, 1, 2, 3)}
    base = topology(dtype="bfloat16", prefill=(), decode=(), mixed=(group,))
    one = scaled(base, {"mixed": 1})
    assert (one.mixed[0].replicas, one.mixed[0].devices) == (1, (0, 1))
    assert scaled(base, {"mixed": 2}) == base
    with pytest.raises(UsageError, match="names 4 GPUs for 3 replicas of tp_size 2"):
        scaled(base, {"mixed": 3})


def test_an_rdma_device_of_each_replica_goes_with_it_and_one_of_all_stays() -> None:
    group = {"host": "a", "replicas": 2, "transfer": "rdma"}
    base = topology(decode=(group | {"rdma": {"device": ("mlx5_0", "mlx5_1")}},))
    assert scaled(base, {"decode": 1}).decode[0].rdma.device == ("mlx5_0",)
    assert scaled(base, {"decode": 2}) == base
    with pytest.raises(UsageError, match="names 2 RDMA devices for 3 replicas"):
        scaled(base, {"decode": 3})
    shared = topology(decode=(group | {"rdma": {"device": ("mlx5_0",)}},))
    assert scaled(shared, {"decode": 3}).decode[0].rdma.device == ("mlx5_0",)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"prefill": 0}, "prefill=0: decode has no prefill to receive from"),
        ({"decode": 0}, "decode=0: prefill has no decode to hand over to"),
        ({"prefill": 0, "decode": 0}, "has no instances"),
        ({"mixed": 1}, "has no mixed instances"),
        ({"decode": 257}, "at most 256"),
    ],
)
def test_what_cannot_serve_is_refused(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        scaled(topology(), numbers)
    assert words in str(caught.value) and caught.value.exit_code == 2


def test_mixed_may_go_when_the_others_serve_and_they_when_it_does() -> None:
    everything = topology(mixed=({"host": "a"},))
    assert scaled(everything, {"mixed": 0}).mixed == ()
    alone = scaled(everything, {"prefill": 0, "decode": 0})
    assert [i.name for i in alone.instances()] == ["mixed-0"]


@pytest.mark.parametrize("path", sorted(TOPOLOGIES.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_recorded_topology_comes_back(path: Path) -> None:
    before = load(path).topology
    content = json.loads(json.dumps(to_record(before, path.parent)))
    assert from_record(content) == before


def test_a_relative_model_is_recorded_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    here = topology(model="m.gguf")
    assert to_record(here, tmp_path)["model"] == str(tmp_path / "m.gguf")
    assert to_record(topology(model="org/name"), tmp_path)["model"] == "org/name"


def test_what_another_version_recorded_is_one_line() -> None:
    with pytest.raises(PdctlError, match="another version of pdctl"):
        from_record({"name": "demo", "invented": 1})

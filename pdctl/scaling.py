"""A topology with other numbers of replicas, and a topology as text that can be kept. Pure.

What `pdctl scale` changes is kept beside the topology of the last `up`, not in it: so scaling down
and up again gives back what the file says of each group.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from pdctl.errors import PdctlError, UsageError
from pdctl.models import KNOWN
from pdctl.topology_checks import findings
from pdctl.topology_schema import DecodeGroup, Group, InstanceRole, PrefillGroup, Topology
from pdctl.yaml_marks import dotted

MAX_REPLICAS = 256


def scaled(topology: Topology, replicas: Mapping[str, int]) -> Topology:
    """With so many instances of these roles. Groups are filled in the file's order, and the last
    one takes the rest: the highest numbers come and go. Raises UsageError for what cannot serve.
    """
    changed = {}
    for role, count in replicas.items():
        groups = topology.groups().get(role)  # type: ignore[call-overload]
        if not groups:
            raise UsageError(
                f"the topology of {topology.name} has no {role} instances",
                hint=f"add `{role}:` to it and run `pdctl up`",
            )
        if not 0 <= count <= MAX_REPLICAS:
            raise UsageError(f"{role}={count}: must be at least 0 and at most {MAX_REPLICAS}")
        changed[role] = _resized(groups, count)
    result = topology.model_copy(update=changed)
    if problems := findings(result):
        what = ", ".join(f"{role}={count}" for role, count in replicas.items())
        first = problems[0]
        raise UsageError(
            f"{topology.name} cannot have {what}: {dotted(first.path)} {first.what}",
            hint=first.right,
        )
    return result


def _resized(groups: tuple[Group, ...], count: int) -> tuple[Group, ...]:
    result = []
    for number, group in enumerate(groups, start=1):
        here = count if number == len(groups) else min(count, group.replicas)
        count -= here
        if here:
            result.append(_with_replicas(group, here))
    return tuple(result)


def _with_replicas(group: Group, count: int) -> Group:
    """Its first ones keep the GPUs and RDMA devices they have."""
    update: dict[str, Any] = {"replicas": count, "devices": group.devices[: count * group.tp_size]}
    if isinstance(group, PrefillGroup | DecodeGroup) and len(group.rdma.device) > 1:
        update["rdma"] = group.rdma.model_copy(update={"device": group.rdma.device[:count]})
    return group.model_copy(update=update)


def count_of(topology: Topology, role: InstanceRole) -> int:
    return sum(group.replicas for group in topology.groups()[role])


def to_record(topology: Topology, folder: Path) -> dict[str, Any]:
    """JSON from which `from_record` makes the same topology, wherever that is done."""
    content = topology.model_dump(mode="json")
    path = folder / Path(topology.model).expanduser()
    named = topology.model in KNOWN or not path.exists()
    return content if named else content | {"model": str(path.resolve())}


def from_record(content: Mapping[str, Any]) -> Topology:
    """Raises PdctlError for what another version of pdctl recorded."""
    try:
        return Topology.model_validate(_tuples(content))
    except pydantic.ValidationError as e:
        raise PdctlError(
            "the recorded topology was written by another version of pdctl",
            hint="`pdctl up TOPOLOGY` records it anew",
        ) from e


def _tuples(value: Any) -> Any:
    """Lists are tuples in a topology."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

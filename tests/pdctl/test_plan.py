"""Plans and ports: golden tables of what is there, what is wanted, what is done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdctl.errors import PdctlError
from pdctl.plan import ObservedService, allocate_ports, make_plan, stop_order
from pdctl.services import Role, ServiceSpec
from pdctl.topology import Topology

CONFIG = json.dumps({"kv_cache_bytes": 1, "threads": 2})


def spec(name: str, host: str = "a", **changes: Any) -> ServiceSpec:
    role: Role = "router" if name == "router" else "decode"
    plain = ServiceSpec("demo", name, role, host, argv=("run",), files={"config.json": CONFIG})
    return replace(plain, **changes)


def seen(service: ServiceSpec, *, alive: bool = True) -> ObservedService:
    return ObservedService(service.name, service.host, service, service.hash, alive)


ROUTER, D0, D1 = spec("router"), spec("decode-0"), spec("decode-1")

TABLE: dict[str, tuple[list[ServiceSpec], list[ObservedService], list[str]]] = {
    "a first up": (
        [ROUTER, D0],
        [],
        ["start router@a: not there yet", "start decode-0@a: not there yet"],
    ),
    "an up of what runs": (
        [ROUTER, D0],
        [seen(D0), seen(ROUTER)],
        ["keep router@a: unchanged", "keep decode-0@a: unchanged"],
    ),
    "one has died": (
        [ROUTER, D0],
        [seen(ROUTER), seen(D0, alive=False)],
        ["keep router@a: unchanged", "start decode-0@a: not running"],
    ),
    "a dead one of another spec": (
        [D0],
        [seen(spec("decode-0", argv=("old",)), alive=False)],
        ["start decode-0@a: not running"],
    ),
    "a config key changed": (
        [D0],
        [seen(spec("decode-0", files={"config.json": '{"kv_cache_bytes": 2, "threads": 2}'}))],
        ["replace decode-0@a: changed: kv_cache"],
    ),
    "several things changed": (
        [D0],
        [seen(spec("decode-0", argv=("old",), env={"A": "secret"}, files={"config.json": "{}"}))],
        ["replace decode-0@a: changed: argv, env, kv_cache, threads"],
    ),
    "keys are those of the topology, each once": (
        [spec("decode-0", cpu_buffer_bytes=2, files={"config.json": '{"cpu_buffer_bytes": 2}'})],
        [
            seen(
                spec(
                    "decode-0", cpu_buffer_bytes=1, files={"config.json": '{"drain_timeout_s": 1}'}
                )
            )
        ],
        ["replace decode-0@a: changed: cpu_buffer, drain_timeout"],
    ),
    "a file that is not JSON": (
        [spec("decode-0", files={"x": "new"})],
        [seen(spec("decode-0", files={"x": "old"}))],
        ["replace decode-0@a: changed: x"],
    ),
    "JSON that differs in its spaces only": (
        [spec("decode-0", files={"x": "{}"})],
        [seen(spec("decode-0", files={"x": "{ }"}))],
        ["replace decode-0@a: changed: x"],
    ),
    "fewer replicas": (
        [ROUTER, D0],
        [seen(ROUTER), seen(D0), seen(D1)],
        [
            "remove decode-1@a: orphan: not in the topology",
            "keep router@a: unchanged",
            "keep decode-0@a: unchanged",
        ],
    ),
    "a dead orphan": (
        [D0],
        [seen(D0), seen(D1, alive=False)],
        ["remove decode-1@a: orphan: left over, not running", "keep decode-0@a: unchanged"],
    ),
    "moved to another host": (
        [spec("decode-0", "b")],
        [seen(D0)],
        ["remove decode-0@a: orphan: not in the topology", "start decode-0@b: not there yet"],
    ),
    "a record that cannot be read, running": (
        [D0],
        [ObservedService("decode-0", "a", None, "?", True)],
        ["replace decode-0@a: changed: its record cannot be read"],
    ),
    "an orphan whose record cannot be read": (
        [],
        [ObservedService("decode-7", "a", None, "", True)],
        ["remove decode-7@a: orphan: not in the topology"],
    ),
}


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_steps(case: str) -> None:
    wanted, observed, expected = TABLE[case]
    plan = make_plan("demo", wanted, observed)
    assert [
        f"{s.kind} {s.service.name}@{s.service.host}: {s.reason}" for s in plan.steps
    ] == expected
    assert plan.changes == any(not line.startswith("keep") for line in expected)
    assert make_plan("demo", wanted, list(reversed(observed))) == plan


def test_what_was_scaled_down_is_no_orphan_but_what_moved_is() -> None:
    p1 = spec("prefill-1")
    plan = make_plan("demo", [D0], [seen(D0), seen(D1), seen(p1)], ["decode"])
    reasons = {s.service.name: s.reason for s in plan.of("remove")}
    assert reasons == {"decode-1": "scaled down", "prefill-1": "orphan: not in the topology"}
    (moved,) = make_plan("demo", [spec("decode-0", "b")], [seen(D0)], ["decode"]).of("remove")
    assert moved.reason == "orphan: not in the topology"


def test_a_plan_never_shows_values() -> None:
    new = spec("decode-0", env={"KEY": "new-value"})
    plan = make_plan("demo", [new], [seen(spec("decode-0", env={"KEY": "old-value"}))])
    assert "value" not in plan.steps[0].reason


def test_steps_by_kind() -> None:
    plan = make_plan("demo", [ROUTER, D0], [seen(ROUTER), seen(D1)])
    assert [s.service.name for s in plan.of("start", "remove")] == ["decode-1", "decode-0"]
    assert [s.service.name for s in plan.of("keep")] == ["router"]


def test_the_router_stops_first() -> None:
    assert stop_order([D0, ROUTER, D1]) == ((ROUTER,), (D0, D1))
    assert stop_order([D0]) == ((D0,),)
    assert stop_order([]) == ()


# ---- ports ---------------------------------------------------------------------------------------


def topology(**sections: Any) -> Topology:
    hosts = sections.pop("hosts", {"a": {}})
    return Topology.model_validate({"name": "demo", "model": "m", "hosts": hosts} | sections)


PAIR = topology(prefill=({},), decode=({},))


def having(
    name: str, ports: dict[str, int], host: str = "a", *, alive: bool = True
) -> ObservedService:
    return seen(spec(name, host, ports=ports), alive=alive)


def test_first_ports() -> None:
    assert allocate_ports(PAIR, (), {}) == {
        "router": {"http": 8000},
        "prefill-0": {"http": 8100, "peer": 9100},
        "decode-0": {"http": 8101},
    }


def test_busy_ports_are_passed_over() -> None:
    ports = allocate_ports(PAIR, (), {"a": {8100, 8102, 9100}, "elsewhere": {8101}})
    assert ports["prefill-0"] == {"http": 8101, "peer": 9101}
    assert ports["decode-0"] == {"http": 8103}


def test_ports_of_running_services_are_kept_though_they_are_busy() -> None:
    observed = [
        having("decode-0", {"http": 8100}),
        having("prefill-0", {"http": 8107, "peer": 9103}),
    ]
    ports = allocate_ports(PAIR, observed, {"a": {8100, 8107, 9103}})
    assert ports["decode-0"] == {"http": 8100}
    assert ports["prefill-0"] == {"http": 8107, "peer": 9103}


def test_a_dead_services_port_is_kept_unless_a_stranger_has_it() -> None:
    observed = [having("decode-0", {"http": 8107}, alive=False)]
    assert allocate_ports(PAIR, observed, {})["decode-0"] == {"http": 8107}
    assert allocate_ports(PAIR, observed, {"a": {8107}})["decode-0"] == {"http": 8101}


def test_explicit_ports_win_and_others_make_way() -> None:
    wanted = topology(prefill=({},), decode=({"port": 8100, "replicas": 2},))
    observed = [having("prefill-0", {"http": 8101, "peer": 9100})]
    ports = allocate_ports(wanted, observed, {"a": {8100}})
    assert ports["decode-0"] == {"http": 8100}, (
        "asked for, so taken, though busy: up then says by whom"
    )
    assert ports["decode-1"] == {"http": 8101}
    assert ports["prefill-0"] == {"http": 8102, "peer": 9100}


def test_hosts_do_not_share_ports() -> None:
    wanted = topology(
        hosts={"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}},
        router={"host": "a"},
        prefill=({"host": "a"},),
        decode=({"host": "b"},),
    )
    ports = allocate_ports(wanted, [having("decode-0", {"http": 8155}, host="a")], {})
    assert ports["prefill-0"]["http"] == ports["decode-0"]["http"] == 8100


def test_a_host_without_a_free_port() -> None:
    with pytest.raises(PdctlError, match="host a has no free port"):
        allocate_ports(PAIR, (), {"a": range(1024, 65536)})


BUSY = st.sets(st.integers(8098, 8112) | st.integers(9098, 9106), max_size=12)


@settings(deadline=None, max_examples=100)
@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    first=st.none() | st.integers(8098, 8110),
    busy=BUSY,
)
def test_ports_are_unique_new_ones_are_free_and_a_second_plan_agrees(
    counts: Sequence[int], first: int | None, busy: set[int]
) -> None:
    wanted = topology(
        prefill=({"replicas": counts[0]},), decode=({"replicas": counts[1], "port": first},)
    )
    ports = allocate_ports(wanted, (), {"a": busy})
    used = [p for purposes in ports.values() for p in purposes.values()]
    assert len(set(used)) == len(used)
    explicit = {first + i for i in range(counts[1])} if first is not None else set()
    assert not (set(used) - explicit - {8000}) & busy
    observed = [having(name, purposes) for name, purposes in ports.items()]
    assert allocate_ports(wanted, observed, {"a": busy | set(used)}) == ports

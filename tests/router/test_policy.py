"""The policies alone: balance, turns, margins."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol import PROTOCOL_VERSION
from runtime.router.instances import Instance, Lease, Target
from runtime.router.policy import (
    MIXED_MARGIN,
    NOTHING,
    Avoid,
    Choice,
    LeastLoaded,
    Policy,
    RoundRobin,
    make_policy,
)
from runtime.router_protocol import Registration


def instance(name: str) -> Instance:
    info = Registration(
        version=PROTOCOL_VERSION,
        name=name,
        role=name.partition("-")[0],  # type: ignore[arg-type]
        url="http://h:1",
        incarnation="i",
        ready=True,
        model="tiny",
        fingerprint={},
        max_model_len=1,
    )
    return Instance(info=info, first_seen=0.0, last_seen=0.0, reachable=True)


def grid(prefills: int, decodes: int, mixed: int = 0) -> list[Target]:
    """Every decode linked to every prefill."""
    peers = tuple(instance(f"prefill-{n}") for n in range(prefills))
    targets = [Target(instance(f"decode-{n}"), peers) for n in range(decodes)]
    return targets + [Target(instance(f"mixed-{n}"), ()) for n in range(mixed)]


def names(choice: Choice | None) -> tuple[str, str]:
    assert choice is not None
    return (choice.prefill.name if choice.prefill else "", choice.decode.name)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 60))
def test_least_loaded_keeps_every_leg_within_one_request(
    prefills: int, decodes: int, requests: int
) -> None:
    policy, targets = LeastLoaded(), grid(prefills, decodes)
    for _ in range(requests):
        choice = policy.choose(targets, NOTHING)
        assert choice is not None
        Lease(choice.decode, choice.prefill, 2048)
    decode_loads = [t.instance.in_flight for t in targets]
    prefill_loads = [p.in_flight for p in targets[0].prefills]
    assert sum(decode_loads) == sum(prefill_loads) == requests
    assert max(decode_loads) - min(decode_loads) <= 1
    assert max(prefill_loads) - min(prefill_loads) <= 1


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=5),
    st.lists(st.integers(0, 9), min_size=2, max_size=5),
    st.data(),
)
def test_least_loaded_takes_a_pair_that_no_linked_pair_beats(
    prefill_loads: list[int], decode_loads: list[int], data: st.DataObject
) -> None:
    peers = [instance(f"prefill-{n}") for n in range(len(prefill_loads))]
    for peer, load in zip(peers, prefill_loads, strict=True):
        peer.foreign = load
    targets = []
    for n, load in enumerate(decode_loads):
        linked = data.draw(st.lists(st.sampled_from(peers), min_size=1, unique=True))
        decode = instance(f"decode-{n}")
        decode.foreign = load
        targets.append(Target(decode, tuple(linked)))
    choice = LeastLoaded().choose(targets, NOTHING)
    assert choice is not None and choice.prefill is not None
    chosen = choice.decode.foreign + choice.prefill.foreign
    assert chosen == min(t.instance.foreign + p.foreign for t in targets for p in t.prefills)


def test_a_long_prompt_counts_more_than_a_short_one() -> None:
    policy, (target,) = LeastLoaded(), grid(2, 1)
    first = policy.choose([target], NOTHING)
    assert first is not None
    Lease(first.decode, first.prefill, 100_000)
    others = {names(policy.choose([target], NOTHING))[0] for _ in range(4)}
    assert first.prefill is not None and others == {"prefill-0", "prefill-1"} - {first.prefill.name}


def test_a_prompt_stops_counting_at_its_first_byte() -> None:
    (target,) = grid(1, 1)
    (prefill,) = target.prefills
    lease = Lease(target.instance, prefill, 4096)
    assert (prefill.in_flight, prefill.prompt_bytes, target.instance.in_flight) == (1, 4096, 1)
    lease.first_byte()
    lease.first_byte()
    assert (prefill.in_flight, prefill.prompt_bytes, target.instance.in_flight) == (0, 0, 1)
    lease.end(served=True)
    assert (prefill.ok, target.instance.ok, target.instance.in_flight) == (1, 1, 0)


def test_equal_loads_take_turns() -> None:
    policy, targets = LeastLoaded(), grid(2, 2)
    counts = Counter(names(policy.choose(targets, NOTHING))[1] for _ in range(20))
    assert counts == {"decode-0": 10, "decode-1": 10}


def test_mixed_instances_are_the_overload_valve() -> None:
    policy, targets = LeastLoaded(), grid(1, 1, mixed=1)
    order = []
    for _ in range(int(MIXED_MARGIN) + 4):
        choice = policy.choose(targets, NOTHING)
        assert choice is not None
        lease = Lease(choice.decode, choice.prefill, 0)
        lease.first_byte()
        order.append(choice.decode.name)
    assert order[: int(MIXED_MARGIN)] == ["decode-0"] * int(MIXED_MARGIN)
    assert "mixed-0" in order


@pytest.mark.parametrize("policy", [LeastLoaded(), RoundRobin()])
def test_mixed_instances_are_the_fallback(policy: Policy) -> None:
    targets = grid(1, 1, mixed=1)
    for _ in range(4):
        assert names(policy.choose(targets, Avoid(frozenset({"prefill-0"})))) == ("", "mixed-0")
    everything = Avoid(frozenset({"prefill-0", "mixed-0"}))
    assert policy.choose(targets, everything) is None
    assert policy.choose([], NOTHING) is None


@given(st.integers(1, 4), st.integers(1, 4))
def test_round_robin_meets_every_pair_equally_often(prefills: int, decodes: int) -> None:
    policy, targets = RoundRobin(), grid(prefills, decodes)
    counts = Counter(names(policy.choose(targets, NOTHING)) for _ in range(3 * prefills * decodes))
    assert set(counts.values()) == {3}
    assert len(counts) == prefills * decodes


def test_policies_by_name() -> None:
    assert isinstance(make_policy("least_loaded"), LeastLoaded)
    assert isinstance(make_policy("round_robin"), RoundRobin)

"""Eligibility: who may get a request, and what is said when nobody may. An injected clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol import PROTOCOL_VERSION, PeerAddress
from runtime.router.instances import Instance, Lease
from runtime.router.policy import Avoid, LeastLoaded, Policy, RoundRobin, pick
from runtime.router.registry import (
    BACKOFF_BASE_S,
    BACKOFF_MAX_S,
    BAD_LINK_S,
    FORGET_AFTER_S,
    RegistrationRefused,
    Registry,
)
from runtime.router_protocol import Registration

TIMEOUT_S = 6.0


@dataclass(slots=True)
class World:
    """A registry, its clock, and short ways to change both."""

    time: float = 100.0
    registry: Registry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = Registry(lambda: self.time, TIMEOUT_S)

    def add(self, name: str, **more: Any) -> Instance:
        """Register; the role is in the name, and the router can reach it."""
        fields: dict[str, Any] = {
            "version": PROTOCOL_VERSION,
            "name": name,
            "role": name.partition("-")[0],
            "url": f"http://{name}:8000",
            "incarnation": f"{name}-first",
            "ready": True,
            "model": "tiny",
            "fingerprint": {"model": "tiny", "kv_dtype": "float32", "block_size": 16},
            "max_model_len": 2048,
        }
        instance = self.registry.register(Registration(**fields | more))
        if not instance.reachable:
            self.registry.reached(instance)
        return instance

    def decode(self, number: int, *prefills: int, **more: Any) -> Instance:
        peers = {f"prefill-{n}": "shm" for n in prefills}
        return self.add(f"decode-{number}", peers=peers, **more)

    def pairs(self) -> set[tuple[str, str]]:
        targets = self.registry.eligible("tiny").all
        return {(p.name, t.instance.name) for t in targets for p in t.prefills}

    def preferred(self) -> set[tuple[str, str]]:
        targets = self.registry.eligible("tiny").preferred
        return {(p.name, t.instance.name) for t in targets for p in t.prefills}

    def missing(self) -> str:
        return "; ".join(self.registry.missing("tiny"))


@pytest.fixture
def world() -> World:
    return World()


def test_only_linked_pairs_are_eligible(world: World) -> None:
    world.add("prefill-0")
    world.add("prefill-1")
    world.decode(0, 0, 1)
    world.add("decode-1", peers={"prefill-0": None, "prefill-1": "tcp"})
    expected = {("prefill-0", "decode-0"), ("prefill-1", "decode-0"), ("prefill-1", "decode-1")}
    assert world.pairs() == expected


def test_a_link_to_an_instance_that_never_registered_is_no_pair(world: World) -> None:
    world.decode(0, 0)
    assert world.pairs() == set()
    assert "no prefill instance is linked" in world.missing()
    world.add("prefill-0")
    assert world.pairs() == {("prefill-0", "decode-0")}


def test_silence_ends_eligibility_without_any_other_event(world: World) -> None:
    world.add("prefill-0")
    world.decode(0, 0)
    world.time += TIMEOUT_S - 0.1
    assert world.pairs()
    world.decode(0, 0)
    world.time += 0.1
    assert not world.pairs(), "the prefill instance sent no heartbeat in time"
    assert "prefill-0 sent no heartbeat for 6.0 s" in world.missing()
    world.add("prefill-0")
    assert world.pairs()


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"leaving": True}, "stopping"), ({"ready": False}, "not ready")],
)
def test_what_leaves_or_starts_gets_nothing(
    world: World, name: str, change: dict[str, bool], reason: str
) -> None:
    peers: dict[str, Any] = {"prefill-0": {}, "decode-0": {"peers": {"prefill-0": "shm"}}}
    for each in peers:
        world.add(each, **peers[each])
    assert world.pairs()
    world.add(name, **peers[name], **change)
    assert not world.pairs()
    assert f"{name} is {reason}" in world.missing()


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_what_is_drained_gets_nothing_until_it_is_given_back(world: World, name: str) -> None:
    world.add("prefill-0")
    world.decode(0, 0)
    world.registry.drain(name, True)
    assert not world.pairs()
    assert f"{name} is drained" in world.missing()
    world.add("prefill-0")
    world.decode(0, 0)
    assert not world.pairs(), "a heartbeat changes nothing"
    world.registry.drain(name, False)
    assert world.pairs()
    with pytest.raises(KeyError):
        world.registry.drain("decode-9", True)


def test_a_restarted_instance_is_not_drained_a_restarted_router_still_knows(world: World) -> None:
    world.add("mixed-0")
    world.registry.drain("mixed-0", True)
    assert not world.add("mixed-0", incarnation="second").draining
    assert world.add("mixed-1", draining=True).draining, "it was told so by an earlier router"
    world.registry.drain("mixed-1", False)
    assert not world.add("mixed-1", draining=True).draining, "only the first word counts"


def test_peers_are_the_prefill_instances_of_the_model(world: World) -> None:
    here, there = PeerAddress("here", 1), PeerAddress("there", 2)
    world.add("prefill-0", peer=here)
    world.add("prefill-1", peer=there, model="other")
    world.decode(0)
    assert world.registry.peers("tiny") == {"prefill-0": here}
    world.add("prefill-0", peer=there, incarnation="second")
    assert world.registry.peers("tiny") == {"prefill-0": there}
    world.add("prefill-0", peer=there, incarnation="second", leaving=True)
    world.time += TIMEOUT_S + 1
    world.decode(0)
    assert world.registry.peers("tiny") == {}


def test_an_instance_the_router_never_reached_gets_nothing(world: World) -> None:
    world.add("prefill-0")
    decode = world.decode(0, 0)
    world.registry.unreachable(decode, "connection refused")
    assert not world.pairs()
    assert "decode-0 at http://decode-0:8000: connection refused" in world.missing()


def test_a_heartbeat_alone_does_not_make_an_unreachable_instance_eligible(world: World) -> None:
    world.add("prefill-0")
    decode = world.decode(0, 0)
    world.registry.unreachable(decode, "connection refused")
    world.registry.register(decode.info)
    assert not world.pairs()
    world.registry.reached(decode)
    assert world.pairs()


def test_a_new_incarnation_is_a_new_instance(world: World) -> None:
    world.add("prefill-0")
    old = world.decode(0, 0)
    lease = Lease(old, None, 100)
    new = world.decode(0, 0, incarnation="decode-0-second")
    assert new is not old
    assert (new.in_flight, old.in_flight) == (0, 1)
    lease.end(served=True)
    assert (new.in_flight, new.ok, old.in_flight) == (0, 0, 0)
    assert not world.registry.current(old)
    assert world.registry.current(new)


def test_a_restarted_prefill_is_linked_only_after_decode_says_so_again(world: World) -> None:
    world.add("prefill-0")
    world.decode(0, 0)
    world.add("prefill-0", incarnation="prefill-0-second")
    assert not world.pairs(), "the reported path led to the old process"
    assert "decode-0 has no path to prefill-0" in world.missing()
    world.decode(0, 0)
    assert world.pairs() == {("prefill-0", "decode-0")}


def test_of_two_live_processes_under_one_name_the_newer_one_wins(world: World) -> None:
    world.add("prefill-0", url="http://old:1")
    world.add("prefill-0", url="http://new:1", incarnation="second")
    with pytest.raises(RegistrationRefused, match=r"http://new:1.*http://old:1"):
        world.add("prefill-0", url="http://old:1")
    assert world.registry.instances()[0].info.url == "http://new:1"
    assert "prefill-0" in world.registry.conflicts()
    world.time += TIMEOUT_S
    assert world.registry.conflicts() == {}
    world.add("prefill-0", url="http://old:1")
    assert world.registry.instances()[0].info.url == "http://old:1", "the newer one is gone"


def test_another_protocol_version_is_refused_and_changes_nothing(world: World) -> None:
    world.add("prefill-0")
    with pytest.raises(RegistrationRefused, match=rf"version 99.*router {PROTOCOL_VERSION}"):
        world.add("prefill-0", version=99, ready=False)
    assert world.registry.instances()[0].info.ready


def test_an_instance_that_differs_is_named_and_not_used(world: World) -> None:
    world.add("prefill-0")
    world.add("prefill-1", fingerprint={"model": "tiny", "kv_dtype": "float32", "block_size": 32})
    world.decode(0, 0, 1)
    assert world.pairs() == {("prefill-0", "decode-0")}
    (odd,) = (i for i in world.registry.instances() if i.name == "prefill-1")
    assert world.registry.trouble(odd) == "prefill-1 and prefill-0 differ in block_size: 32 and 16"


def test_the_instance_that_differs_becomes_the_measure_once_the_others_left(world: World) -> None:
    other = {"model": "tiny", "kv_dtype": "float32", "block_size": 32}
    world.add("prefill-0")
    world.add("prefill-1", fingerprint=other)
    world.add("prefill-0", leaving=True)
    world.decode(0, 1, fingerprint=other)
    assert world.pairs() == {("prefill-1", "decode-0")}


@pytest.mark.parametrize(("key", "state"), [("block_size", "ready"), ("kv_dtype", "mismatch")])
def test_a_mixed_instance_may_differ_only_in_what_never_leaves_it(
    world: World, key: str, state: str
) -> None:
    world.add("prefill-0")
    fingerprint = {"model": "tiny", "kv_dtype": "float32", "block_size": 16, key: "other"}
    mixed = world.add("mixed-0", fingerprint=fingerprint)
    assert world.registry.state(mixed, world.time) == state


def test_a_failed_leg_is_avoided_while_there_is_another(world: World) -> None:
    bad = world.add("prefill-0")
    world.add("prefill-1")
    world.decode(0, 0, 1)
    world.registry.suspect(bad)
    assert world.preferred() == {("prefill-1", "decode-0")}
    assert len(world.pairs()) == 2
    world.time += BACKOFF_BASE_S
    assert len(world.preferred()) == 2


def test_a_failed_leg_without_another_stays_in_use(world: World) -> None:
    bad = world.add("prefill-0")
    world.decode(0, 0)
    world.registry.suspect(bad)
    assert world.preferred() == {("prefill-0", "decode-0")}


def test_the_back_off_doubles_up_to_its_limit_and_success_ends_it(world: World) -> None:
    instance = world.add("prefill-0")
    waits = []
    for _ in range(12):
        world.registry.suspect(instance)
        waits.append(instance.suspect_until - world.time)
    assert waits[:3] == pytest.approx([BACKOFF_BASE_S, 2 * BACKOFF_BASE_S, 4 * BACKOFF_BASE_S])
    assert max(waits) == pytest.approx(BACKOFF_MAX_S)
    world.registry.succeeded(instance)
    assert (instance.failures, instance.suspect_until) == (0, 0.0)


def test_a_failed_transfer_taints_the_link_not_the_instances(world: World) -> None:
    prefill = world.add("prefill-0")
    world.add("prefill-1")
    decode = world.decode(0, 0, 1)
    world.decode(1, 0, 1)
    world.registry.suspect_link(decode, prefill)
    assert ("prefill-0", "decode-0") not in world.preferred()
    assert len(world.preferred()) == 3
    world.time += BAD_LINK_S
    assert len(world.preferred()) == 4


def test_a_dead_instance_stays_visible_a_drained_one_does_not(world: World) -> None:
    world.add("prefill-0")
    world.add("prefill-1", leaving=True)
    world.time += TIMEOUT_S + 1
    world.decode(0)
    assert {i.name for i in world.registry.instances()} == {"prefill-0", "decode-0"}
    world.time += FORGET_AFTER_S
    world.decode(0)
    assert {i.name for i in world.registry.instances()} == {"decode-0"}


def test_a_model_stays_known_when_its_instances_are_gone(world: World) -> None:
    world.add("prefill-0")
    world.time += FORGET_AFTER_S + 1
    world.add("mixed-0", model="other")
    assert world.registry.models() == {"tiny", "other"}
    assert world.missing() == "no instance is registered"


def test_models_do_not_mix(world: World) -> None:
    world.add("prefill-0")
    world.add("mixed-0", model="other", fingerprint={"model": "other"})
    world.decode(0, 0)
    assert world.pairs() == {("prefill-0", "decode-0")}
    assert not [t for t in world.registry.eligible("tiny").all if not t.prefills]


def test_a_mixed_instance_needs_no_prefill_whatever_it_reports(world: World) -> None:
    world.add("prefill-0")
    world.add("mixed-0", peers={"prefill-0": "shm"})
    assert [t.prefills for t in world.registry.eligible("tiny").all] == [()]


def test_asking_for_invented_models_leaves_nothing_in_memory(world: World) -> None:
    for number in range(100):
        assert world.registry.eligible(f"invented-{number}").all == ()
    assert world.registry._cache == {}


def test_foreign_load_and_settled_prefills_come_from_heartbeats(world: World) -> None:
    prefill, decode = world.add("prefill-0"), world.decode(0, 0)
    leases = [Lease(decode, prefill, 1000) for _ in range(3)]
    world.add("prefill-0", running=1)
    assert (prefill.settled, prefill.foreign) == (2, 0)
    world.decode(0, 0, running=4, waiting=1)
    assert decode.foreign == 2
    for lease in leases:
        lease.end(served=True)
    assert (prefill.in_flight, prefill.settled, prefill.prompt_bytes) == (0, 0, 0)


# ---- whatever happens, in whatever order --------------------------------------------------------

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0")
names = st.sampled_from(NAMES)
heartbeat = st.tuples(
    st.just("register"),
    names,
    st.fixed_dictionaries(
        {
            "incarnation": st.sampled_from(["a", "b"]),
            "ready": st.sampled_from([True, True, True, False]),
            "leaving": st.sampled_from([False, False, False, True]),
            "peers": st.dictionaries(
                st.sampled_from(NAMES[:2]), st.sampled_from(["shm", "tcp", None]), max_size=2
            ),
        }
    ),
)
other = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 4.0)),
    st.tuples(st.sampled_from(["unreachable", "suspect", "reached", "drain", "undrain"]), names),
)
events = st.lists(st.one_of(heartbeat, heartbeat, other), max_size=40)
avoids = st.builds(
    Avoid,
    st.frozensets(names, max_size=2),
    st.frozensets(st.tuples(st.sampled_from(NAMES[:2]), st.sampled_from(NAMES[2:4])), max_size=2),
)


@given(events, avoids, st.sampled_from([LeastLoaded, RoundRobin]))
def test_no_choice_is_ever_dead_leaving_unlinked_unreachable_or_excluded(
    story: list[tuple[Any, ...]], avoid: Avoid, policy_type: type[Policy]
) -> None:
    world, policy = World(), policy_type()
    # The model: what each name's live process last said, kept apart from the registry.
    said: dict[str, tuple[float, dict[str, Any]]] = {}
    out: set[str] = set()
    drained: set[str] = set()
    for step in story:
        _apply(world, step, said, out)
        drained = {i.name for i in world.registry.instances() if i.draining}
        choice = pick(policy, world.registry.eligible("tiny"), avoid)
        usable = {
            name
            for name, (at, what) in said.items()
            if world.time - at < TIMEOUT_S
            and what["ready"]
            and not what["leaving"]
            and name not in out | drained
        }
        possible = {
            (p, d)
            for d in usable
            if d.startswith("decode") and d not in avoid.instances
            for p, path in said[d][1]["peers"].items()
            if path and p in usable and p not in avoid.instances and (p, d) not in avoid.pairs
            if p in said[d][1]["fresh"]
        } | {("", m) for m in usable if m.startswith("mixed") and m not in avoid.instances}
        if choice is None:
            assert not possible
        else:
            prefill = choice.prefill.name if choice.prefill else ""
            assert (prefill, choice.decode.name) in possible
            assert world.registry.current(choice.decode)


def _apply(
    world: World,
    step: tuple[Any, ...],
    said: dict[str, tuple[float, dict[str, Any]]],
    out: set[str],
) -> None:
    if step[0] == "wait":
        world.time += step[1]
        return
    name = step[1]
    known = {i.name: i for i in world.registry.instances()}
    if step[0] in ("drain", "undrain"):
        if name in known:
            world.registry.drain(name, step[0] == "drain")
        return
    if step[0] != "register":
        if name in known and not name.startswith("prefill"):
            if step[0] == "unreachable":
                world.registry.unreachable(known[name], "scripted")
                out.add(name)
            elif step[0] == "suspect":
                world.registry.suspect(known[name])
            else:
                world.registry.reached(known[name])
                out.discard(name)
        return
    what = dict(step[2])
    before = known.get(name)
    try:
        instance = world.registry.register(_registration(name, what))
    except RegistrationRefused:
        return
    if before is not None and before is not instance:
        for _, other_said in said.values():
            other_said["fresh"].discard(name)
    if before is not instance and not instance.reachable:
        out.add(name)
    said[name] = (world.time, what | {"fresh": {p for p, path in what["peers"].items() if path}})
    for gone in said.keys() - {i.name for i in world.registry.instances()}:
        del said[gone]


def _registration(name: str, what: dict[str, Any]) -> Registration:
    return Registration(
        version=PROTOCOL_VERSION,
        name=name,
        role=name.partition("-")[0],  # type: ignore[arg-type]
        url=f"http://{name}:8000",
        model="tiny",
        fingerprint={},
        max_model_len=2048,
        **what,
    )

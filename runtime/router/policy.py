"""Which of the eligible instances a request goes to. Pure: reads loads, counts nothing.

A policy gets targets that `registry` found eligible, and what this request has already failed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from runtime.config import PolicyName
from runtime.router.instances import Eligible, Instance, Target

NOMINAL_PROMPT_BYTES = 2048
"""One waiting prompt of this size weighs as much as one running decode."""
MIXED_MARGIN = 4.0
"""A mixed instance takes a request when the best pair is busier by more than this many requests."""


@dataclass(frozen=True, slots=True)
class Avoid:
    """What one request must not be sent to again."""

    instances: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()
    """(prefill, decode) names."""


NOTHING = Avoid()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice:
    decode: Instance
    prefill: Instance | None
    """None: `decode` is a mixed instance."""


class Policy(Protocol):
    def choose(self, targets: Sequence[Target], avoid: Avoid) -> Choice | None: ...


def pick(policy: Policy, eligible: Eligible, avoid: Avoid) -> Choice | None:
    """The policy's choice among the preferred targets; with none left there, among all."""
    choice = policy.choose(eligible.preferred, avoid)
    if choice is None and eligible.preferred is not eligible.all:
        choice = policy.choose(eligible.all, avoid)
    return choice


def decode_load(instance: Instance) -> float:
    return instance.in_flight + instance.foreign


def prefill_load(instance: Instance) -> float:
    """Waiting prompts, in nominal prompts. Prompts of other clients count as nominal ones."""
    counted = instance.in_flight
    if not counted:
        return float(instance.foreign)
    still_here = (counted - instance.settled) / counted
    return still_here * instance.prompt_bytes / NOMINAL_PROMPT_BYTES + instance.foreign


def mixed_load(instance: Instance) -> float:
    return decode_load(instance) + instance.prompt_bytes / NOMINAL_PROMPT_BYTES


class LeastLoaded:
    """The pair whose two legs are least busy together. Equals take turns.

    Mixed instances are the overload valve, and the fallback without any pair.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, targets: Sequence[Target], avoid: Avoid) -> Choice | None:
        self._turn += 1
        best: Choice | None = None
        best_load = float("inf")
        # Decode instances mostly share one set of prefill peers: its least loaded is found once.
        of_set: dict[tuple[Instance, ...], Instance | None] = {}
        for target in rotated(targets, self._turn):
            decode = target.instance
            if decode.name in avoid.instances:
                continue
            if not target.prefills:
                load = mixed_load(decode) + MIXED_MARGIN
                if load < best_load:
                    best, best_load = Choice(decode, None), load
                continue
            if avoid.pairs or target.prefills not in of_set:
                of_set[target.prefills] = self._least(target, avoid)
            prefill = of_set[target.prefills]
            if prefill is None:
                continue
            load = decode_load(decode) + prefill_load(prefill)
            if load < best_load:
                best, best_load = Choice(decode, prefill), load
        return best

    def _least(self, target: Target, avoid: Avoid) -> Instance | None:
        allowed = list(_allowed(target, avoid))
        return min(rotated(allowed, self._turn), key=prefill_load, default=None)


class RoundRobin:
    """Every target in turn, mixed ones too, and every prefill peer of a target in turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, targets: Sequence[Target], avoid: Avoid) -> Choice | None:
        self._turn += 1
        count = len(targets)
        for step in range(count):
            turn = self._turn + step
            target = targets[turn % count]
            if target.instance.name in avoid.instances:
                continue
            if not target.prefills:
                return Choice(target.instance, None)
            allowed = list(_allowed(target, avoid))
            if allowed:
                # Shifted by one every round, so that a target does not always meet the same peer.
                return Choice(
                    target.instance, allowed[(turn // count + turn % count) % len(allowed)]
                )
        return None


def make_policy(name: PolicyName) -> Policy:
    return RoundRobin() if name == "round_robin" else LeastLoaded()


def rotated(items: Sequence[T], turn: int) -> Sequence[T]:
    if len(items) < 2:
        return items
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def _allowed(target: Target, avoid: Avoid) -> Iterable[Instance]:
    decode = target.instance.name
    for prefill in target.prefills:
        if prefill.name not in avoid.instances and (prefill.name, decode) not in avoid.pairs:
            yield prefill

"""Which instances exist and which may be given a request: the only owner of eligibility.

Pure state with an injected clock: no sockets, no tasks. Identity is (name, incarnation): a restart
at the same address is a new instance, and what was counted for the old one dies with it. Called by
`app` (registrations), `dispatch` (failures) and `probe` (reachability).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from runtime.errors import RuntimeFailure
from runtime.protocol import PROTOCOL_VERSION, PeerAddress
from runtime.router.instances import Eligible, Instance, State, Target
from runtime.router_protocol import Registration

BACKOFF_BASE_S = 0.5
BACKOFF_MAX_S = 8.0
FORGET_AFTER_S = 600.0
"""A dead instance stays visible this long, then it is dropped."""
BAD_LINK_S = 2.0
"""A pair whose transfer failed is avoided this long, where there is another."""

# What matters only where KV moves between instances. A mixed one keeps its KV: it may differ here.
_KV_ONLY = frozenset({"layout_version", "block_size"})


class RegistrationRefused(RuntimeFailure):
    """The router will not have this registration; answered 409."""


def check_version(name: str, version: int) -> None:
    """Raises RegistrationRefused. Also for a registration whose other fields cannot be read."""
    if version != PROTOCOL_VERSION:
        raise RegistrationRefused(
            f"{name} speaks protocol version {version}, this router {PROTOCOL_VERSION}",
            hint="install the same version of pdctl on all hosts",
        )


class Registry:
    """All state about instances. Every method is synchronous and quick."""

    def __init__(self, clock: Callable[[], float], heartbeat_timeout_s: float) -> None:
        self._clock = clock
        self._timeout = heartbeat_timeout_s
        self._instances: dict[str, Instance] = {}
        self._replaced: dict[str, deque[str]] = {}
        self._conflicts: dict[str, tuple[float, str]] = {}
        self._models: frozenset[str] = frozenset()
        self._cache: dict[str, Eligible] = {}

    # ---- what instances and probes tell us --------------------------------------------------

    def register(self, info: Registration) -> Instance:
        """Take a registration or heartbeat. Raises RegistrationRefused and then changes nothing."""
        check_version(info.name, info.version)
        now = self._clock()
        current = self._instances.get(info.name)
        if current is None or current.info.incarnation != info.incarnation:
            current = self._new_instance(info, current, now)
        current.info = info
        current.last_seen = now
        self._models |= {info.model}
        self._reconcile(current)
        current.links = {name for name, path in info.peers.items() if path is not None}
        self._forget(now)
        self._check_fingerprints(now)
        self._cache.clear()
        return current

    def _new_instance(self, info: Registration, old: Instance | None, now: float) -> Instance:
        replaced = self._replaced.setdefault(info.name, deque(maxlen=8))
        if old is not None:
            if info.incarnation in replaced and not self._expired(old, now):
                message = (
                    f"the name {info.name} was taken over by a newer process at {old.info.url}; "
                    f"an older one at {info.url} is still running"
                )
                self._conflicts[info.name] = (now, message)
                raise RegistrationRefused(message, hint="stop one of them, or give it another name")
            replaced.append(old.info.incarnation)
        self._conflicts.pop(info.name, None)
        instance = Instance(
            info=info,
            first_seen=now,
            last_seen=now,
            reachable=info.role == "prefill",
            draining=info.draining,
        )
        self._instances[info.name] = instance
        if old is not None:
            for other in self._instances.values():
                # A path that was reported to the old process says nothing about the new one.
                other.links.discard(info.name)
                other.bad_links.pop(info.name, None)
        return instance

    def _reconcile(self, instance: Instance) -> None:
        reported = instance.info.running + instance.info.waiting
        instance.foreign = max(0, reported - instance.in_flight)
        if instance.info.role == "prefill":
            instance.settled = max(0, instance.in_flight - reported)

    def _forget(self, now: float) -> None:
        for name, instance in list(self._instances.items()):
            silent = now - instance.last_seen
            gone = instance.info.leaving and silent > self._timeout
            if gone or silent > FORGET_AFTER_S:
                del self._instances[name]
                self._replaced.pop(name, None)
                self._conflicts.pop(name, None)

    def _check_fingerprints(self, now: float) -> None:
        """All live instances of a model must agree with the one that has been there longest."""
        first: dict[str, Instance] = {}
        first_apart: dict[str, Instance] = {}
        for instance in sorted(self._instances.values(), key=lambda i: i.first_seen):
            instance.mismatch = ""
            if self._expired(instance, now) or instance.info.leaving:
                continue
            model, mixed = instance.info.model, instance.info.role == "mixed"
            instance.mismatch = _difference(instance, first.setdefault(model, instance), _KV_ONLY)
            if not mixed and not instance.mismatch:
                reference = first_apart.setdefault(model, instance)
                instance.mismatch = _difference(instance, reference, frozenset())

    def drain(self, name: str, draining: bool) -> Instance:
        """Give this instance nothing new, or again something. Raises KeyError."""
        instance = self._instances[name]
        instance.draining = draining
        self._cache.clear()
        return instance

    def reached(self, instance: Instance) -> None:
        """A probe got its answer."""
        instance.reachable = True
        instance.why_unreachable = ""
        instance.suspect_until = 0.0
        self._cache.clear()

    def unreachable(self, instance: Instance, why: str) -> None:
        """No connection, or it broke without an answer: out until a probe succeeds."""
        instance.reachable = False
        instance.why_unreachable = why
        self.suspect(instance)

    def suspect(self, instance: Instance) -> None:
        """A failed leg: used only where nothing better is left, for a doubling time."""
        instance.failures += 1
        instance.failed += 1
        delay = min(BACKOFF_BASE_S * 2.0 ** min(instance.failures - 1, 10), BACKOFF_MAX_S)
        instance.suspect_until = self._clock() + delay
        self._cache.clear()

    def suspect_link(self, decode: Instance, prefill: Instance) -> None:
        decode.bad_links[prefill.name] = self._clock() + BAD_LINK_S
        self._cache.clear()

    def succeeded(self, instance: Instance) -> None:
        if instance.failures:
            instance.failures = 0
            instance.suspect_until = 0.0
            self._cache.clear()

    # ---- who may get a request --------------------------------------------------------------

    def current(self, instance: Instance) -> bool:
        """Still the live process under its name."""
        return self._instances.get(instance.name) is instance and not self._expired(
            instance, self._clock()
        )

    def eligible(self, model: str) -> Eligible:
        now = self._clock()
        cached = self._cache.get(model)
        if cached is None or now >= cached.valid_until:
            cached = self._compute(model, now)
            if model in self._models:  # a client's invention must not stay in memory
                self._cache[model] = cached
        return cached

    def tokenizers(self, model: str) -> Eligible:
        """Who can tokenize: any decode or mixed instance, with or without a prefill peer."""
        now = self._clock()
        targets = tuple(Target(i, ()) for i in self._usable(model, now) if i.info.role != "prefill")
        return Eligible(targets, targets, now)

    def peers(self, model: str) -> dict[str, PeerAddress]:
        """Where decode instances find the prefill instances of this model. One that ended stays in
        it until it is forgotten: it may come back at the same address.
        """
        return {
            i.name: i.info.peer
            for i in self._instances.values()
            if i.info.peer is not None and i.info.model == model
        }

    def _usable(self, model: str, now: float) -> list[Instance]:
        return [
            i
            for i in self._instances.values()
            if i.info.model == model and self.state(i, now) == "ready"
        ]

    def _compute(self, model: str, now: float) -> Eligible:
        usable = self._usable(model, now)
        prefills = {i.name: i for i in usable if i.info.role == "prefill"}
        everything: list[Target] = []
        preferred: list[Target] = []
        for instance in usable:
            if instance.info.role == "prefill":
                continue
            linked = self._linked(instance, prefills)
            if instance.info.role == "decode" and not linked:
                continue
            everything.append(Target(instance, linked))
            good = tuple(p for p in linked if not self._doubtful(instance, p, now))
            if instance.suspect_until <= now and (good or not linked):
                preferred.append(Target(instance, good))
        if preferred == everything or not preferred:
            preferred = everything
        return Eligible(tuple(preferred), tuple(everything), self._next_change(usable, now))

    def _linked(self, instance: Instance, prefills: dict[str, Instance]) -> tuple[Instance, ...]:
        """Of a decode instance: a mixed one needs no prefill, whatever paths it reports."""
        links = instance.links if instance.info.role == "decode" else ()
        return tuple(prefills[name] for name in sorted(links) if name in prefills)

    def _doubtful(self, decode: Instance, prefill: Instance, now: float) -> bool:
        bad_until = decode.bad_links.get(prefill.name, 0.0)
        return prefill.suspect_until > now or bad_until > now

    def _next_change(self, usable: list[Instance], now: float) -> float:
        times = [i.last_seen + self._timeout for i in usable]
        times += [i.suspect_until for i in usable if i.suspect_until > now]
        times += [t for i in usable for t in i.bad_links.values() if t > now]
        return min(times, default=float("inf"))

    def _expired(self, instance: Instance, now: float) -> bool:
        return now - instance.last_seen >= self._timeout

    def state(self, instance: Instance, now: float) -> State:
        info = instance.info
        if self._expired(instance, now):
            return "dead"
        if info.leaving:
            return "leaving"
        if not info.ready:
            return "starting"
        if instance.mismatch:
            return "mismatch"
        if instance.draining:
            return "draining"
        return "ready" if instance.reachable else "unreachable"

    # ---- what people and machines read ------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    def instances(self) -> tuple[Instance, ...]:
        return tuple(self._instances.values())

    def models(self) -> frozenset[str]:
        """Every model ever seen: one whose instances died is unavailable, not unknown."""
        return self._models

    def conflicts(self) -> dict[str, str]:
        """Name -> why a second process under it is being refused."""
        recent = self._clock() - self._timeout
        return {name: text for name, (at, text) in self._conflicts.items() if at > recent}

    def trouble(self, instance: Instance) -> str:
        """Why this instance gets no request; empty when nothing is wrong with it."""
        now = self._clock()
        state = self.state(instance, now)
        name = instance.name
        return {
            "ready": "",
            "dead": f"{name} sent no heartbeat for {now - instance.last_seen:.1f} s",
            "leaving": f"{name} is stopping",
            "draining": f"{name} is drained: it gets no new requests",
            "starting": f"{name} is not ready yet",
            "mismatch": instance.mismatch,
            "unreachable": f"{name} at {instance.info.url}: {instance.why_unreachable}",
        }[state]

    def missing(self, model: str) -> list[str]:
        """Why nothing is eligible for this model, for people."""
        of_model = [i for i in self._instances.values() if i.info.model == model]
        if not of_model:
            return ["no instance is registered"]
        reasons = [text for i in of_model if (text := self.trouble(i))]
        prefills = [i for i in of_model if i.info.role == "prefill"]
        decodes = [i for i in of_model if i.info.role == "decode"]
        if decodes and not prefills:
            reasons.append("no prefill instance is linked")
        if prefills and not decodes:
            reasons.append("no decode instance is registered")
        for decode in decodes:
            for prefill in prefills:
                if prefill.name not in decode.links:
                    reasons.append(f"{decode.name} has no path to {prefill.name}")
        return reasons


def _difference(instance: Instance, reference: Instance, ignored: frozenset[str]) -> str:
    ours, theirs = instance.info.fingerprint, reference.info.fingerprint
    if ours == theirs:
        return ""
    for key in sorted((ours.keys() | theirs.keys()) - ignored):
        if ours.get(key) != theirs.get(key):
            return (
                f"{instance.name} and {reference.name} differ in {key}: "
                f"{ours.get(key, 'none')} and {theirs.get(key, 'none')}"
            )
    return ""

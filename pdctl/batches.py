"""In which order a plan is carried out: batches, each stopped, started and ready before the next.
Pure.

First comes all that is started, or cannot be changed one by one; then each replaced instance alone,
so that the others of its role serve meanwhile. What is removed ends last, unless something new may
need its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdctl.plan import Plan, Step
from pdctl.services import ServiceSpec

_AGREED = {"model": "the model", "block_size": "block_size", "router": "the router's address"}
"""Keys of an instance's config.json in which instances that serve together are equal."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Stop `ending`, then start `starting`; what is replaced or restarted is in both."""

    ending: tuple[Step, ...]
    starting: tuple[Step, ...]
    alone: bool = False
    """One instance that is replaced while the others serve."""


def batches(plan: Plan, *, rolling: bool = True) -> tuple[Batch, ...]:
    """All steps but `keep`. Without `rolling` it is one batch."""
    changing = plan.of("replace", "restart")
    one_by_one = rolling and not at_once(plan)
    alone = [s for s in changing if one_by_one and s.service.role != "router"]
    together = tuple(s for s in changing if s not in alone)
    new, gone = plan.of("start"), plan.of("remove")
    found = [
        Batch((*(gone if new else ()), *together), (*new, *together)),
        *(Batch((step,), (step,), alone=True) for step in alone),
        Batch(() if new else gone, ()),
    ]
    return tuple(batch for batch in found if batch.ending or batch.starting)


def at_once(plan: Plan) -> str:
    """Why instances cannot be replaced one by one; empty when they can."""
    replaced = [s for s in plan.of("replace") if s.service.role != "router"]
    for step in replaced:
        if step.now is None:
            return f"the record of {step.service.name} cannot be read"
        before, after = _config(step.now), _config(step.service)
        for key, what in _AGREED.items():
            if before.get(key) != after.get(key):
                return f"{what} changes"
    for step in (*replaced, *plan.of("start")):
        for other in replaced:
            if other is not step and other.now is not None:
                shared = _needs(step.service) & _needs(other.now)
                if shared:
                    what = " ".join(map(str, sorted(shared)[0][1:]))
                    return f"{step.service.name} gets {what} of {other.service.name}"
    return ""


def remarks(plan: Plan, *, rolling: bool = True) -> tuple[str, ...]:
    """When nothing is served for a while, and why instances are not replaced one by one."""
    reason = at_once(plan)
    several = len(plan.of("replace")) > 1
    found = [f"replaced all at once, because {reason}"] if reason and several else []
    running = {s.service.name: s.service for s in plan.steps if s.running}
    for batch in batches(plan, rolling=rolling):
        ending = [s.service.name for s in batch.ending if s.service.name in running]
        meanwhile = {name: s for name, s in running.items() if name not in ending}
        if serve(running.values()) and not serve(meanwhile.values()):
            names = [s.service.name for s in batch.starting]
            until = f"until {_listed(names)} ready" if names else f"without {', '.join(ending)}"
            found.append(f"nothing is served {until}")
        running = meanwhile | {s.service.name: s.service for s in batch.starting}
    return tuple(found)


def serve(services: Iterable[ServiceSpec]) -> bool:
    """Whether these are enough for an answer."""
    roles = {s.role for s in services}
    return "router" in roles and ("mixed" in roles or {"prefill", "decode"} <= roles)


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def _needs(service: ServiceSpec) -> set[tuple[str, str, str]]:
    """What on its host only one service can have."""
    gpus = service.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ports = {(service.host, "port", str(port)) for port in service.ports.values()}
    return ports | {(service.host, "GPU", gpu.strip()) for gpu in gpus if gpu.strip()}


def _config(service: ServiceSpec) -> dict[str, Any]:
    try:
        value = json.loads(service.files.get("config.json", ""))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

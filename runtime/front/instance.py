"""One instance as its HTTP routes see it: what it is made of, and whether it may serve now.

Owns readiness: what `/ready` and the registration say, and which requests are turned away. Knows no
HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from runtime.config import WorkerConfig
from runtime.errors import CapacityError, Leg, LegError, RequestError
from runtime.front.core_client import CoreClient
from runtime.front.metrics import Metrics
from runtime.front.tokenizer import Tokenizer
from runtime.protocol import CoreReady

STATS_TIMEOUT_S = 2.0


def own_leg(config: WorkerConfig) -> Leg:
    """The leg that fails when this instance does. A mixed instance counts as decode."""
    return "prefill" if config.role == "prefill" else "decode"


@dataclass(slots=True)
class Instance:
    config: WorkerConfig
    tokenizer: Tokenizer
    core: CoreClient
    metrics: Metrics
    draining: bool = False
    """This process is stopping: it takes nothing new."""
    drained: bool = False
    """The router sends nothing new here. It is said back with every heartbeat, so that a router
    that was restarted knows."""
    active: dict[str, bool] = field(default_factory=dict)
    """Ids of the HTTP requests under way: whether their first token is there."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @contextlib.contextmanager
    def under_way(self, request_id: str) -> Iterator[None]:
        """A stop waits for it. From before its body is read: that may take a while to arrive."""
        self.active[request_id] = False
        self.idle.clear()
        try:
            yield
        finally:
            self.active.pop(request_id, None)
            if not self.active:
                self.idle.set()

    def started(self, request_id: str) -> None:
        self.active[request_id] = True

    def waiting_for(self) -> str | None:
        """Why this instance is not ready, in words; None: it is."""
        if self.core.dead.is_set():
            return "the engine core ended"
        if self.draining:
            return "nothing: it is draining"
        if self.core.ready is None:
            return "the engine core to load the model"
        if self.config.role == "decode" and not self.core.peer_was_linked:
            names = ", ".join(sorted(self.core.peers)) or "none is known yet"
            return f"a tested path to a prefill peer ({names})"
        return None

    def require_serving(self) -> CoreReady:
        """Raises what a completion request gets when this instance cannot take it."""
        if self.config.role == "prefill":
            raise RequestError(
                f"{self.config.name} is a prefill instance; ask the router or a decode instance",
                code="wrong_instance",
            )
        if self.core.dead.is_set():
            raise LegError(
                f"the engine core of {self.config.name} ended",
                leg=own_leg(self.config),
                instance=self.config.name,
            )
        if self.draining:
            raise CapacityError(f"{self.config.name} is draining")
        if self.core.ready is None:
            raise CapacityError(f"{self.config.name} is still loading the model")
        return self.core.ready

    def require_model(self, name: str | None) -> None:
        served = self.config.model.name
        if name is not None and name != served:
            raise RequestError(
                f"the model {name[:64]!r} does not exist; this server has {served!r}",
                param="model",
                status=404,
                code="model_not_found",
            )

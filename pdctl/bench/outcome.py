"""What one request of a benchmark came to. Written by the client, read by the metrics.

All times are seconds on this process's clock (`time.perf_counter`) since the run began, except
those in `Served` and `router_s`: durations that the server measured on its own clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind` groups (`HTTP 503`, `stream error`, `stream cut`, ...); `message` is this one's."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Served:
    """How the deployment says it served the request."""

    prefill: str
    decode: str
    path: str
    kv_bytes: int
    cached_tokens: int
    stages: Mapping[str, float]
    ttft_s: float | None
    e2e_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    index: int
    scheduled_s: float
    """When the arrival process wanted it sent."""
    started_s: float
    ended_s: float
    arrivals_s: tuple[float, ...] = ()
    """When output arrived: one entry per network read that carried some."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """From the server's `usage`; None: it sent none."""
    served: Served | None = None
    router_s: Mapping[str, float] = field(default_factory=dict)
    """`admit` and `route`, from the Server-Timing header."""
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals_s[0] - self.started_s if self.arrivals_s else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens or arrivals."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in itertools.pairwise(self.arrivals_s))

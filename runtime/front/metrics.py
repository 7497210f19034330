"""The front's Prometheus metrics, in a registry of their own.

Owns names, buckets and the text format. Counts what the front sees; the core's totals and ledger
are added from its latest Stats when `/metrics` is read.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.protocol import Served, Stats

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


class _CoreTotals(Collector):
    """The core's counters and ledger, as of its latest Stats."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        if self.stats is None:
            return
        held = GaugeMetricFamily("pdctl_held", "What the instance holds now.", labels=["what"])
        for name, value in msgspec.structs.asdict(self.stats.ledger).items():
            held.add_metric([name], value)
        yield held
        for name in ("device_blocks_total", "device_blocks_cached", "buffer_blocks_total"):
            yield GaugeMetricFamily(
                f"pdctl_{name.removesuffix('_total')}", name, getattr(self.stats, name)
            )
        linked = GaugeMetricFamily("pdctl_peer_up", "1: the link is up.", labels=["peer", "path"])
        for peer in self.stats.peers.values():
            linked.add_metric([peer.name, peer.path or ""], float(peer.path is not None))
        yield linked
        for name, value in sorted(self.stats.counters.items()):
            yield CounterMetricFamily(f"pdctl_core_{name}", "Counted by the core.", value)


class Metrics:
    def __init__(self, tp_size: int = 1) -> None:
        self._registry = registry = CollectorRegistry()
        self._core = _CoreTotals()
        registry.register(self._core)
        Gauge("pdctl_tp_size", "Ranks that compute together.", registry=registry).set(tp_size)
        self.requests = Counter(
            "pdctl_requests", "Answers by status.", ["endpoint", "status"], registry=registry
        )
        self.broken_streams = Counter(
            "pdctl_broken_streams", "Streams that ended in an error event.", registry=registry
        )
        self.disconnects = Counter(
            "pdctl_disconnects", "Clients that went away or read too slowly.", registry=registry
        )
        self._running = Gauge(
            "pdctl_running", "Requests past their first token.", registry=registry
        )
        self._waiting = Gauge("pdctl_waiting", "Requests before it.", registry=registry)
        self._ttft = _histogram("pdctl_ttft_seconds", "Arrival to first token.", registry)
        self._itl = _histogram("pdctl_itl_seconds", "Between bursts, per token.", registry)
        self._e2e = _histogram("pdctl_e2e_seconds", "Arrival to last token.", registry)
        self._stage = Histogram(
            "pdctl_stage_seconds", "By stage.", ["stage"], buckets=_SECONDS, registry=registry
        )
        self._kv_bytes = Counter(
            "pdctl_kv_bytes", "KV that reached requests, by path.", ["path"], registry=registry
        )

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def burst(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._itl.observe(seconds / tokens)

    def finished(self, served: Served | None, stages: dict[str, float], e2e_s: float) -> None:
        self._e2e.observe(e2e_s)
        for stage, seconds in stages.items():
            self._stage.labels(stage).observe(seconds)
        if served is not None:
            self._kv_bytes.labels(served.path).inc(served.kv_bytes)

    def render(self, stats: Stats | None, *, running: int, waiting: int) -> bytes:
        """The text format. None: the core does not answer; its totals are left out."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._core.stats = stats
        return generate_latest(self._registry)


def _histogram(name: str, help_: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, help_, buckets=_SECONDS, registry=registry)

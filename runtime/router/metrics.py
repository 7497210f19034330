"""The router's Prometheus metrics, in a registry of their own.

Children are looked up once per label set, so that counting costs the hot path next to nothing.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.router.policy import Choice
from runtime.router.registry import Registry

_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


class RouterMetrics:
    def __init__(self, instances: Registry) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pdctl_router_requests",
            "Client requests by endpoint and status; 499: the client left.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._retries = Counter(
            "pdctl_router_retries",
            "Requests sent to another pair, by what failed.",
            ("reason",),
            registry=self._registry,
        )
        self._choices = Counter(
            "pdctl_router_choices",
            "Upstream requests by chosen pair; prefill is empty for mixed instances.",
            ("prefill", "decode"),
            registry=self._registry,
        )
        self._ttfb = Histogram(
            "pdctl_router_ttfb_seconds",
            "From a request's arrival to the first byte of its answer's body.",
            ("endpoint",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "pdctl_router_request_seconds",
            "From a request's arrival to the end of its answer.",
            ("endpoint",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.in_flight = 0
        self._registry.register(_StateCollector(instances, self))
        self._request_children: dict[tuple[str, int], Counter] = {}
        self._choice_children: dict[tuple[str, str], Counter] = {}
        self._ttfb_children: dict[str, Histogram] = {}
        self._duration_children: dict[str, Histogram] = {}

    def chosen(self, choice: Choice) -> None:
        key = ("" if choice.prefill is None else choice.prefill.name, choice.decode.name)
        child = self._choice_children.get(key)
        if child is None:
            child = self._choice_children[key] = self._choices.labels(*key)
        child.inc()

    def retried(self, reason: str) -> None:
        self._retries.labels(reason).inc()

    def first_byte(self, endpoint: str, seconds: float) -> None:
        child = self._ttfb_children.get(endpoint)
        if child is None:
            child = self._ttfb_children[endpoint] = self._ttfb.labels(endpoint)
        child.observe(seconds)

    def finished(self, endpoint: str, status: int, seconds: float) -> None:
        key = (endpoint, status)
        child = self._request_children.get(key)
        if child is None:
            child = self._request_children[key] = self._requests.labels(endpoint, str(status))
        child.inc()
        duration = self._duration_children.get(endpoint)
        if duration is None:
            duration = self._duration_children[endpoint] = self._duration.labels(endpoint)
        duration.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _StateCollector(Collector):
    """Gauges that are read when someone looks, not kept up to date."""

    def __init__(self, instances: Registry, metrics: RouterMetrics) -> None:
        self._instances = instances
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        flying = GaugeMetricFamily("pdctl_router_in_flight", "Client requests under way.")
        flying.add_metric((), self._metrics.in_flight)
        yield flying
        now = self._instances.now()
        all_instances = self._instances.instances()
        states = GaugeMetricFamily(
            "pdctl_router_instances", "Registered instances.", labels=("role", "state")
        )
        tally = Tally((i.info.role, self._instances.state(i, now)) for i in all_instances)
        for key, count in sorted(tally.items()):
            states.add_metric(key, count)
        yield states
        load = GaugeMetricFamily(
            "pdctl_router_instance_in_flight",
            "Requests this router has under way at an instance.",
            labels=("instance",),
        )
        for instance in all_instances:
            load.add_metric((instance.name,), instance.in_flight)
        yield load

"""Carry a plan out on locked hosts, batch by batch, until it serves, or undo it.

What runs and is to end is drained through the router first. Remembers what it started: only that
is ever undone, and not what replaced another and was ready. Decides nothing about what should run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from pdctl import state
from pdctl.batches import Batch, serve
from pdctl.draining import Drain, known_to
from pdctl.errors import PdctlError, ServiceFailed, failed_services
from pdctl.events import Event, EventKind, Report
from pdctl.fleet import Fleet, on_all
from pdctl.health import POLL_S, SLOW_POLL_S, Watcher, living, wait_ready
from pdctl.plan import Plan, Step, stop_order
from pdctl.routing import RouterClient, unseen
from pdctl.services import ServiceSpec
from pdctl.sizes import listed

LOG_LINES = 20
UNDO_GRACE_S = 10.0
LINK_S = 5.0
"""How long one that does not serve is waited for before the only other is ended."""
END_S = 5.0
"""Beyond its requests a service needs a moment to end by itself."""


@dataclass(frozen=True, slots=True)
class Patience:
    drain_s: float
    """How long running requests may go on in what is to end."""
    ready_s: float
    """How long each batch may take to become ready."""
    wait_last: bool = True
    """False: return when the last batch is started."""


def show_log(error: PdctlError, report: Report) -> None:
    """The last lines of the first service that failed, if any did."""
    for failed in failed_services(error)[:1]:
        for line in failed.log_tail:
            report(Event("log", line, failed.service, failed.host))


def _dispensable(name: str, others: Collection[str], router: RouterClient | None) -> bool:
    """Whether one of the others serves too, or it does not serve itself."""
    view = (router.view() if router else None) or {}
    serving = {n for n, routed in view.items() if routed.serves}
    return name not in serving or not serving.isdisjoint(others)


@dataclass(slots=True)
class Launch:
    fleet: Fleet
    plan: Plan
    secret_values: dict[str, str]
    """Of every environment variable that a service to start names."""
    report: Report
    awaited: frozenset[str] | None = None
    """What of the kept services has to be ready in the end; None: all."""
    started: list[str] = field(default_factory=list)
    """What this run started, or may have."""
    changed: bool = False
    """It started or stopped something, or may have."""
    _undoable: list[str] = field(default_factory=list)
    _running: dict[str, ServiceSpec] = field(default_factory=dict)
    """What runs now, as it was started."""
    _expected: dict[str, ServiceSpec] = field(default_factory=dict)
    """What has to be ready after each batch: what is kept, and what was started so far."""
    _ready: set[str] = field(default_factory=set)
    _former: dict[str, str] = field(default_factory=dict)
    """Incarnations that this run ended, by name."""
    _token: str | None = None
    """Of the deployment, once this run has started something."""

    def carry_out(self, batches: Sequence[Batch], patience: Patience) -> None:
        """Each batch is ready before the next is touched. Stops at the first failure and raises."""
        for step in self.plan.steps:
            if step.running:
                self._running[step.service.name] = step.now or step.service
        for step in self.plan.of("keep"):
            self._tell("keep", step)
            if self.awaited is None or step.service.name in self.awaited:
                self._expected[step.service.name] = step.service
        if not batches and patience.wait_last:
            self._wait(patience.ready_s)
        ordered = self._not_serving_first(batches)
        for number, batch in enumerate(ordered):
            try:
                if batch.alone:
                    self._refuse_the_last(batch.starting[0].service)
                self._end(batch.ending, patience.drain_s)
                self._begin(batch.starting)
                if patience.wait_last or number < len(ordered) - 1:
                    self._wait(patience.ready_s)
            except BaseException:
                self._say_how_far(ordered, number)
                raise
            replaced = {step.service.name for step in batch.starting if step.running}
            self._undoable = [name for name in self._undoable if name not in replaced]

    def _not_serving_first(self, batches: Sequence[Batch]) -> list[Batch]:
        """Of what is replaced one by one. If that stays so, the others are not touched."""
        router = self._router() if len(batches) > 1 else None
        view = (router.view() if router else None) or {}

        def rank(batch: Batch) -> int:
            if not batch.alone:
                return 0
            name = batch.starting[0].service.name
            return 2 if name in view and view[name].serves else 1

        return sorted(batches, key=rank)

    def _refuse_the_last(self, service: ServiceSpec) -> None:
        """The only one of its role that serves is not ended while others could, but do not.

        They have a moment: a link to what was renewed before takes one to come back.
        """
        router = self._router()
        others = {
            step.service.name
            for step in self.plan.steps
            if step.service.role == service.role and step.kind != "remove"
        } - {service.name}
        begun = time.monotonic()
        while others and not _dispensable(service.name, others, router):
            idle = sorted(others)
            waited = time.monotonic() - begun
            if waited >= LINK_S:
                raise PdctlError(
                    f"{service.name} is the only {service.role} instance that serves now: "
                    f"{', '.join(idle)} {'does' if len(idle) == 1 else 'do'} not",
                    hint="`pdctl status` says why; `pdctl restart NAME` and"
                    " `pdctl drain NAME --undo` bring one back",
                )
            text = f"{' or '.join(idle)} to serve"
            self.report(Event("wait", text, service.name, service.host, waited))
            time.sleep(POLL_S)

    def _say_how_far(self, batches: Sequence[Batch], failed: int) -> None:
        if len(batches) > 1:
            done, rest = (
                ", ".join(s.service.name for b in part for s in b.starting if s.running) or "none"
                for part in (batches[:failed], batches[failed + 1 :])
            )
            failing = ", ".join(s.service.name for s in batches[failed].starting)
            text = f"stopped at {failing}: renewed before: {done}; not touched: {rest}"
            self.report(Event("note", text))

    def _router(self) -> RouterClient | None:
        """The router that runs now, if there is one."""
        router = next((s for s in self._running.values() if s.role == "router"), None)
        token = (self._token or self.fleet.token()) if router else None
        return RouterClient(router.url, token) if router and token else None

    # ---- stop -----------------------------------------------------------------------------------

    def _end(self, steps: Sequence[Step], drain_s: float) -> None:
        """Stop these; what the router knows finishes its requests first."""
        if not steps:
            return
        instances = [s.now or s.service for s in steps if s.running and s.service.role != "router"]
        router = self._router() if instances else None
        leaving = known_to(router, instances) if router else {}
        self._former |= leaving
        if router is None or not leaving:
            self._stop(steps, drain_s, drain_s)
            return
        drain = Drain(
            router, list(self._running.values()), [s for s in instances if s.name in leaving]
        )
        with drain.held(self.report):
            for name, what in drain.wait(drain_s, self.report).items():
                text = f"{name}: {what} did not finish within {drain_s:g} s and will be cut off"
                self.report(Event("note", text))
            self._stop(steps, drain_s, 0.0)

    def _stop(self, steps: Sequence[Step], router_s: float, others_s: float) -> None:
        """In waves; each service has so long for requests, and END_S more."""
        by_id = {id(step.service): step for step in steps}
        self.changed = True
        for wave in stop_order(step.service for step in steps):
            names: dict[str, list[str]] = {}
            for service in wave:
                self._tell("stop", by_id[id(service)])
                names.setdefault(service.host, []).append(service.name)
            grace_s = END_S + (router_s if wave[0].role == "router" else others_s)
            left = [r for r in self.fleet.stop(names, grace_s) if r["left"]]
            if left:
                what = "; ".join(f"{r['service']}: processes {r['left']}" for r in left)
                raise PdctlError(f"{what} cannot be stopped")
            for service in wave:
                self._running.pop(service.name, None)
            if by_id[id(wave[0])].kind != "restart":
                self.fleet.purge(names)

    # ---- start ----------------------------------------------------------------------------------

    def _begin(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        used = self.fleet.token() if self._running else None
        token = self._token = used or secrets.token_hex(32)
        per_host: dict[str, list[Step]] = {}
        for step in steps:
            per_host.setdefault(step.service.host, []).append(step)

        def start(some: list[Step]) -> None:
            for step in some:
                self._start(step, token)
                self._tell("start", step)

        on_all(list(per_host.values()), start)

    def _start(self, step: Step, token: str) -> None:
        service = step.service
        self.changed = True
        self.started.append(service.name)  # first: an interrupted call may have started it
        self._undoable.append(service.name)
        session = self.fleet.session(service.host)
        if step.kind == "restart":
            answer = session.call("again", {"service": service.name})
        else:
            values = self.secret_values
            answer = session.call(
                "start",
                {
                    "spec": asdict(service),
                    "hash": service.hash,
                    "token": token,
                    "secret_env": {name: values[name] for name in service.secrets},
                    "secret_files": {f: values[name] for f, name in service.secret_files.items()},
                },
            )
        if not answer["started"]:
            self.started.remove(service.name)
            self._undoable.remove(service.name)
        self._running[service.name] = self._expected[service.name] = service
        self._ready.discard(service.name)

    # ---- wait -----------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Until all that is expected is ready, and gets requests. Raises as `wait_ready`."""

        def on_ready(service: ServiceSpec, seconds: float) -> None:
            if service.name not in self._ready:
                self._ready.add(service.name)
                self.report(Event("ready", service.url, service.name, service.host, seconds))

        def on_wait(service: ServiceSpec, reason: str, seconds: float) -> None:
            if service.role == "router":
                self._refuse_drained()
            self.report(Event("wait", reason, service.name, service.host, seconds))

        watcher = Watcher(
            observe=lambda: {r.name: r for r in self.fleet.observe(scan=False)},
            tail=lambda name: self.fleet.tail(name, LOG_LINES),
            on_ready=on_ready,
            on_wait=on_wait,
        )
        begun = time.monotonic()
        services = self._in_order(self._expected.values())
        wait_ready(services, watcher, begun + seconds)
        self._wait_routed(services, watcher, begun + seconds)

    def _refuse_drained(self) -> None:
        """What is drained stays so, however long one waits for a router that lacks just that."""
        router = self._router()
        view = (router.view() if router else None) or {}
        running = list(self._running.values())
        drained = {
            name
            for name, routed in view.items()
            if routed.state == "draining" and routed.incarnation != self._former.get(name)
        }
        if serve(running) and not serve(s for s in running if s.name not in drained):
            names = [s.name for s in running if s.name in drained]
            verb = "is" if len(names) == 1 else "are"
            raise PdctlError(
                f"{', '.join(names)} {verb} drained, and nothing can be served without",
                hint=f"`pdctl drain {names[0]} --undo` lets it have requests again",
            )

    def _wait_routed(
        self, services: Sequence[ServiceSpec], watcher: Watcher, deadline: float
    ) -> None:
        """A ready instance serves only once the router knows, and knows its links."""
        own = next((s for s in services if s.role == "router"), None)
        router = self._router() if own else None
        if own is None or router is None:
            return
        begun = time.monotonic()
        while lacking := unseen(router.view(), services, self._former):
            living(services, watcher)
            waited = time.monotonic() - begun
            if time.monotonic() >= deadline:
                raise ServiceFailed(
                    f"the router on {own.host} does not use all after {waited:.0f} s: "
                    f"it waits for {lacking}",
                    service=own.name,
                    host=own.host,
                    log_tail=self.fleet.tail(own.name, LOG_LINES),
                )
            self.report(Event("wait", lacking, own.name, own.host, waited))
            time.sleep(SLOW_POLL_S if waited > 3.0 else POLL_S)

    def _in_order(self, services: Iterable[ServiceSpec]) -> list[ServiceSpec]:
        order = [step.service.name for step in self.plan.steps]
        return sorted(services, key=lambda s: order.index(s.name))

    # ---- undo -----------------------------------------------------------------------------------

    def undo(self) -> None:
        """Stop what this run started. One try; what it cannot stop is named, and `down` can."""
        undone = list(self._undoable)
        if not undone:
            return
        rest = f"`pdctl down {self.fleet.deployment}` ends what is left"
        self.report(Event("rollback", f"stopping what this run started: {listed(undone)}"))
        self.fleet.tolerate()
        try:
            reports = self.fleet.stop(undone, UNDO_GRACE_S)
            left = [r["service"] for r in reports if r["left"]]
            self.fleet.purge([name for name in undone if name not in left])
            if not self.fleet.observe(scan=False) and not self.fleet.lost:
                state.forget(self.fleet.deployment)
        except PdctlError as e:
            self.report(Event("note", f"rollback failed: {e}; {rest}"))
            return
        except KeyboardInterrupt:
            self.report(Event("note", f"interrupted before that was done; {rest}"))
            raise
        if left:
            self.report(Event("note", f"still running: {', '.join(left)}"))
        for error in self.fleet.lost.values():
            self.report(Event("note", f"not rolled back there: {error}; {rest}"))
        if not left and not self.fleet.lost:
            self.report(Event("note", "nothing of it is left"))

    def _tell(self, kind: EventKind, step: Step) -> None:
        self.report(Event(kind, step.reason, step.service.name, step.service.host))

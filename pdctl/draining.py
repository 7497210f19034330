"""Let running instances finish what they have, while the router gives them nothing new.

Marks them at the router and watches until nothing is under way. Stops nothing. What was marked and
then not stopped is given back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdctl.errors import PdctlError
from pdctl.events import Event, Report
from pdctl.routing import Routed, RouterClient, owed
from pdctl.services import ServiceSpec

POLL_S = 0.1
ROUTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Drain:
    """`leaving` are to finish; `running` is all that runs now, these included."""

    router: RouterClient
    running: Sequence[ServiceSpec]
    leaving: Sequence[ServiceSpec]

    @contextlib.contextmanager
    def held(self, report: Report) -> Iterator[None]:
        """They get nothing new. When the block fails they do again, but for who did not before.

        Raises PdctlError when the router does not tell who did.
        """
        view = _view(self.router)
        if view is None:
            raise PdctlError(f"the router at {self.router.url}: it does not answer")
        before = {name for name, routed in view.items() if routed.state == "draining"}
        marked: list[ServiceSpec] = []
        try:
            for service in self.leaving:
                marked.append(service)  # first: an interrupted call may have marked it
                self.router.drain(service.name, True)
            yield
        except BaseException:
            give_back(self.router, [s for s in marked if s.name not in before], report)
            raise

    def wait(self, seconds: float, report: Report) -> Mapping[str, str]:
        """Until nothing is under way, or for so long. What then still is, by service, in words."""
        begun = time.monotonic()
        while left := self._left():
            waited = time.monotonic() - begun
            for service in self.leaving:
                if what := left.get(service.name):
                    text = f"finishing {what}"
                    report(Event("wait", text, service.name, service.host, waited))
            if waited >= seconds:
                break
            time.sleep(POLL_S)
        return left

    def _left(self) -> dict[str, str]:
        view = self.router.view()
        if view is None:  # a busy router that says nothing has not said that there is nothing
            return {s.name: "what the router knows, which does not answer" for s in self.leaving}
        found = {s.name: owed(s, view, self.running) for s in self.leaving}
        return {name: what for name, what in found.items() if what}


def known_to(router: RouterClient, services: Iterable[ServiceSpec]) -> dict[str, str]:
    """Incarnations of those that the router may send something to: only they can be drained.

    A router that does not answer for ROUTER_S sends nothing to anybody.
    """
    view = _view(router) or {}
    return {
        s.name: view[s.name].incarnation for s in services if s.name in view and view[s.name].lives
    }


def _view(router: RouterClient) -> dict[str, Routed] | None:
    """None: it has not answered for ROUTER_S."""
    deadline = time.monotonic() + ROUTER_S
    while (view := router.view()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return view


def give_back(router: RouterClient, services: Iterable[ServiceSpec], report: Report) -> None:
    for service in services:
        with contextlib.suppress(PdctlError):  # the router is gone, and the mark with it
            router.drain(service.name, False)
            report(Event("note", f"{service.name} gets new requests again"))

"""A deployment's hosts, held for a change: found, locked, and told what is wanted of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

from pdctl import state
from pdctl.agent import Session
from pdctl.errors import PdctlError
from pdctl.find import Found, further, told
from pdctl.fleet import Fleet, opened
from pdctl.state import KnownDeployment


@contextlib.contextmanager
def locked(
    known: KnownDeployment,
    *,
    purpose: str,
    wait_s: float,
    needed: Collection[str] | None = None,
    found: Found | None = None,
) -> Iterator[Fleet]:
    """The deployment's hosts with its lock held, those that their records name too; observed.

    Locks are taken in a fixed order, so when there are more hosts than expected it begins again.
    `found`: by whom its hosts are open already; what failed there is not tried a second time.
    """
    name, addresses = known.name, dict(known.hosts or {"local": None})
    already = found.by_address() if found is not None else {}
    while True:
        with (
            opened(addresses, already) as hosts,
            Fleet(name, hosts, purpose=purpose, wait_s=wait_s, needed=needed) as fleet,
        ):
            fleet.observe()
            more, lost = further(addresses, told(fleet.answers.values(), name))
            if not more:
                fleet.addresses = addresses
                fleet.lost.update(lost)
                yield fleet
                return
        addresses.update(more)


def changed_meanwhile(said: KnownDeployment) -> PdctlError:
    """For what was made from an earlier word of the hosts than this one."""
    return PdctlError(
        f"{said.name} was changed meanwhile from {said.machine.partition(':')[0]}",
        hint="look with `pdctl status`, and try again",
    )


def register(fleet: Fleet, known: KnownDeployment) -> None:
    """Let its locked hosts know the whole deployment, before anything of it starts there."""

    record = asdict(known)  # once: it names all hosts, and all of them get it

    def tell(session: Session) -> dict[str, Any]:
        keys = sorted(k for k, h in fleet.hosts.items() if h is session.host and k in known.hosts)
        if not keys:
            return {}
        return session.call("register", {"known": {**record, "keys": keys}})

    try:
        fleet.on_sessions(tell)
    except PdctlError:
        fleet.tolerate()
        fleet.purge([])  # where nothing runs it is forgotten again
        raise


def leave(fleet: Fleet, known: KnownDeployment, used: Collection[str]) -> None:
    """After an `up`: hosts that it does not use any more are forgotten, on all sides.

    Not those that did not answer: something may still run there.
    """
    unknown = {*fleet.lost, *fleet.late}
    hosts = {
        key: address
        for key, address in known.hosts.items()
        if key in used or fleet.hosts[key].name in unknown
    }
    if hosts != known.hosts:
        fleet.purge([])
        known = replace(known, hosts=hosts)
        register(fleet, known)
        state.remember(known)

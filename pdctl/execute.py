"""Run a command on a host as a service would, or just there; pass on what it writes.

No shell is in between, so every argument arrives as it was given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pdctl.agent import answered, open_shim, request_text
from pdctl.errors import HostCommandError, HostUnreachable, UsageError
from pdctl.find import ANYWHERE, HERE, Where, located, whereabouts
from pdctl.fleet import opened, raise_failures
from pdctl.hosts import Host

SILENCE_S = 30.0
"""The shim says every few seconds that it is there."""
OnOutput = Callable[[Literal["out", "err"], str], None]
"""A piece of output; bytes that are no UTF-8 come as lone surrogates."""


@dataclass(frozen=True, slots=True)
class Command:
    argv: tuple[str, ...]
    secrets: bool = False
    """With the values of the service's `secrets`."""


def on_service(
    name: str | None, service: str, command: Command, output: OnOutput, where: Where = ANYWHERE
) -> int:
    """In the service's directory and environment; the exit code (128 + n for signal n)."""
    with located(name, where) as found:
        records = sorted(
            (r for r in found.records if r.name == service), key=lambda r: r.alive, reverse=True
        )
        if not records and found.unreachable:  # it may be there
            raise_failures([*found.unreachable.values()], len(found.reachable()))
        if not records:
            there = ", ".join(sorted({r.name for r in found.records})) or "none"
            raise UsageError(f"{found.name} has no service {service}", hint=f"services: {there}")
        payload = {"deployment": found.name, "service": service}
        return _run(found.host_of(records[0]), payload, command, output)


def on_host(host: str, command: Command, output: OnOutput, where: Where = ANYWHERE) -> int:
    """In the home directory of a host: an address, or a topology's key."""
    known: dict[str, str | None] = {}
    with contextlib.suppress(UsageError):  # an address needs no deployment
        known = whereabouts(None, where).hosts
    address = known.get(host, None if host in HERE else host)
    try:
        with opened({host: address}) as hosts:
            return _run(hosts[host], {}, command, output)
    except HostUnreachable as e:
        if host in known or not known:
            raise
        hint = f"if you mean one of the deployment's hosts: {', '.join(known)}"
        raise HostUnreachable(str(e), host=e.host, hint=hint) from e


def _run(host: Host, payload: dict[str, Any], command: Command, output: OnOutput) -> int:
    request = {**payload, "argv": list(command.argv), "secrets": command.secrets}
    with contextlib.closing(open_shim(host, "exec")) as channel:
        channel.send(request_text(host, "exec", request))
        while (text := channel.receive(SILENCE_S)) is not None:
            heard = json.loads(text)
            if "exit" in heard:
                return int(heard["exit"])
            if "ok" in heard:
                answered(host, "exec", text, "")
            for stream in ("out", "err"):
                if stream in heard:
                    output("out" if stream == "out" else "err", heard[stream])
        raise HostCommandError(
            f"{host.name}: the connection ended before the command did: {channel.error_text()}",
            host=host.name,
        )

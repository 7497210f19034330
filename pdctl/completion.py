"""What the shell offers at TAB: names from the cache on this machine. Asks no host."""

from __future__ import annotations

import typer

from pdctl import state


def complete_name(incomplete: str) -> list[str]:
    """Deployments this machine knows of."""
    return [name for name in state.names() if name.startswith(incomplete)]


def complete_service(ctx: typer.Context, incomplete: str) -> list[str]:
    """Services of the deployment that `--name` says, or of all."""
    given = ctx.params.get("services") or ()
    return [s for s in _services(ctx) if s.startswith(incomplete) and s not in given]


def complete_instance(ctx: typer.Context, incomplete: str) -> list[str]:
    """As services, without the router."""
    return [s for s in complete_service(ctx, incomplete) if s != "router"]


def complete_first_word(ctx: typer.Context, incomplete: str) -> list[str]:
    """A service, before the command that is to run beside it."""
    beside = not ctx.params.get("words") and not ctx.params.get("host")
    return complete_service(ctx, incomplete) if beside else []


def _services(ctx: typer.Context) -> list[str]:
    name = ctx.params.get("name")
    known = [state.recall(n) for n in ([name] if name else state.names())]
    return sorted({service for k in known if k is not None for _, service in k.services})

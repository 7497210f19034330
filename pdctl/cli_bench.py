"""`pdctl bench transfer`, and how `pdctl bench` itself stays a command beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdctl.bench.cli import bench_command
from pdctl.cli_edge import (
    AsJson,
    FileOption,
    HostOption,
    errors_as,
    print_json,
    where,
)
from pdctl.completion import complete_name
from pdctl.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK

_SERVE = "serve"
"""The name of `pdctl bench` itself, for a deployment that is called like another command."""


class _BenchGroup(TyperGroup):
    """`pdctl bench ...` is `pdctl bench serve ...`, unless it names a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's, or typer's own copy
        if not args or args[0] not in self.commands:
            args = [_SERVE, *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(cls=_BenchGroup, rich_markup_mode=None)


def transfer_command(
    which: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME | TOPOLOGY",
            help="A deployment, or its topology file; not needed when there is only one.",
            autocompletion=complete_name,
        ),
    ] = None,
    file: FileOption = None,
    host: HostOption = None,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are of so many.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Measure each path of KV between prefill and decode, beside memcpy and a plain socket loop.

    Moves up to 64 MiB at a time through free blocks of decode's CPU buffer, which are given back;
    requests come first. Run it on an idle deployment for numbers that mean something.
    """
    from pdctl.bench.transfer import measure
    from pdctl.bench.transfer_report import document, text
    from pdctl.output import Screen

    if file is None and which is not None and which.endswith((".yaml", ".yml")):
        file, which = Path(which), None
    with errors_as(as_json):
        found = measure(which, where(file, host), rounds, lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(document(found))
    else:
        typer.echo(text(found, Screen.of(sys.stdout)))
    if found.partial:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(EXIT_FAILED if found.failed else EXIT_OK)


bench_app.command(_SERVE, hidden=True)(bench_command)
bench_app.command("transfer")(transfer_command)

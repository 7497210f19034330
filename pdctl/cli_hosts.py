"""Commands that make a topology's hosts ready: sync, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli_edge import AsJson, advise, errors_as, print_json

TopologyPath = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="A topology file (YAML).")]


def sync(
    path: TopologyPath,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Take packages from this folder of wheels; the hosts need no index.",
        ),
    ] = None,
    model: Annotated[
        bool, typer.Option("--model", help="The model too, into the hosts' model cache.")
    ] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Newer packages than those of the last sync.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what each host would get; change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put the runtime and its packages on the hosts.

    Each host gets what its roles need; it has to have python3 and nothing else. Running services
    keep what they run from until the next `up`. Safe to repeat.
    """
    from pdctl.output import Progress, print_error
    from pdctl.sync import sync as sync_hosts
    from pdctl.sync_host import SyncOptions

    options = SyncOptions(wheelhouse, model, upgrade, dry_run)
    with errors_as(as_json), Progress() as report:
        result = sync_hosts(path, options, report)
    if as_json:
        print_json(result.to_json())
    for host in result.hosts:
        if host.error is not None:
            print_error(host.error, sys.stderr)
        elif not as_json:
            where = f"  model {host.model}" if host.model else ""
            typer.echo(f"{host.host}: {host.state}  {host.code}{where}".rstrip())
    if not result.hosts and not as_json:
        typer.echo(f"{result.name} runs on this machine only: there is nothing to sync")
    if result.exit_code == 0:
        advise(f"pdctl doctor {path}   pdctl up {path}")
    raise typer.Exit(result.exit_code)


def doctor(path: TopologyPath, as_json: AsJson = False) -> None:
    """Look at the hosts and the network between them; say what to do.

    Starts nothing and needs nothing installed there. Exits with 1 when something is in the way of
    `up`, with 5 when a host cannot be reached.
    """
    from pdctl.doctor import diagnose
    from pdctl.doctor_report import doctor_document, doctor_text
    from pdctl.output import Progress, Screen

    with errors_as(as_json), Progress() as report:
        found = diagnose(path, report)
    if as_json:
        print_json(doctor_document(found))
    else:
        typer.echo(doctor_text(found, Screen.of(sys.stdout)))
    raise typer.Exit(found.exit_code)

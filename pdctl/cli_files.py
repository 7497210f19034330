"""Commands about files on this machine, not about deployments: validate, init, model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pdctl.cli_edge import AsJson, advise, errors_as, print_json

model_app = typer.Typer(help="Models on this machine, and how they get here.")


def validate(
    path: Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="A topology file (YAML).")],
    as_json: AsJson = False,
) -> None:
    """Check a topology; report every mistake at once.

    Also of the model when an instance is to run on this machine: whether its files are whole, and
    whether it fits tp_size and kv_cache. Prints the topology with all defaults filled in.
    """
    from pdctl.documents import topology_text, validate_document
    from pdctl.output import print_warning
    from pdctl.topology import load

    with errors_as(as_json):
        loaded = load(path, model=True)
    document = validate_document(loaded)
    if as_json:
        print_json(document)
        return
    for warning in loaded.warnings:
        print_warning(warning, sys.stderr)
    typer.echo(topology_text(document), nl=False)


def init(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The file to write; a folder gets one inside.")
    ] = Path("topology.yaml"),
    template: Annotated[
        str,
        typer.Option(
            help="quickstart, mixed, two-hosts, tensor-parallel, or reference with every key."
        ),
    ] = "quickstart",
    as_json: AsJson = False,
) -> None:
    """Write a commented topology; never overwrite."""
    from pdctl.init import write_template

    with errors_as(as_json):
        target = write_template(path, template)
    if as_json:
        print_json({"schema": "pdctl.init/1", "path": str(target)})
        return
    typer.echo(f"wrote {target}")
    advise(f"pdctl validate {target}   pdctl up {target}")


@model_app.command("list")
def model_list(as_json: AsJson = False) -> None:
    """Models known by name, and which are on this machine."""
    from pdctl.models import list_models
    from pdctl.output import Cell, Screen, table
    from pdctl.sizes import format_size

    entries = list_models()
    if as_json:
        models = [
            {"name": e.alias, "pulled": e.pulled, "path": str(e.path), "bytes": e.nbytes}
            for e in entries
        ]
        print_json({"schema": "pdctl.models/1", "models": models})
        return
    rows = [
        (
            e.alias,
            Cell("yes", "good") if e.pulled else Cell("no", "dim"),
            format_size(e.nbytes),
            e.about,
        )
        for e in entries
    ]
    typer.echo(table(("NAME", "HERE", "SIZE", "ABOUT"), rows, Screen.of(sys.stdout)))


@model_app.command("pull")
def model_pull(
    alias: Annotated[str, typer.Argument(metavar="NAME", help="See `pdctl model list`.")],
    as_json: AsJson = False,
) -> None:
    """Bring a known model onto this machine and print its path. At once when it is here."""
    from pdctl import models

    with errors_as(as_json):
        path = models.pull(alias, report=models.StderrProgress())
    if as_json:
        print_json({"schema": "pdctl.model/1", "name": alias, "path": str(path)})
    else:
        typer.echo(path)

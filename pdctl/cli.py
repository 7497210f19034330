"""The command line: options, and which function does it. Thin: no decisions about deployments here.

Heavy modules are imported by the command that needs them, so that `pdctl --help` stays quick.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pdctl import __version__
from pdctl.bench.cli import bench_command
from pdctl.errors import (
    EXIT_DEGRADED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    PdctlError,
)

app = typer.Typer(
    name="pdctl",
    help="Serve a large language model with prefill and decode on separate instances.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="Models: what is on this machine, and how it gets here.")
app.add_typer(model_app, name="model", no_args_is_help=True)
app.command("bench")(bench_command)

TopologyPath = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="A topology file (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="With commands and config files.")]


def _complete_name(incomplete: str) -> list[str]:
    """Deployments this machine knows of. Asks no host."""
    from pdctl import state

    return [name for name in state.names() if name.startswith(incomplete)]


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="The deployment; not needed when there is only one.",
        autocompletion=_complete_name,
    ),
]


@app.callback()
def _globals(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"pdctl {__version__}")
        raise typer.Exit


# ---- deployments ---------------------------------------------------------------------------------


@app.command()
def up(
    path: TopologyPath,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start and return; do not wait until ready.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, like `pdctl plan`.")
    ] = False,
    wait_timeout: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Default: the topology's startup_timeout."),
    ] = None,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Leave what was started, to look at it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring up what TOPOLOGY describes and wait until it really answers. Safe to repeat."""
    if dry_run:
        plan(path, as_json=as_json)
        return
    from pdctl import ops
    from pdctl.output import Progress, duration

    options = ops.UpOptions(
        detach=detach, wait_timeout_s=wait_timeout, keep_on_failure=keep_on_failure
    )
    with _errors_as(as_json), Progress() as report:
        result = ops.up(path, options, report)
    if as_json:
        _print_json(result.to_json())
        return
    state = "is ready at" if result.ready else "is starting; it will answer at"
    counts = f"{len(result.started)} started, {len(result.kept)} unchanged"
    typer.echo(f"{result.name} {state} {result.endpoint}  ({counts}, {duration(result.seconds)})")
    _advise(f"pdctl ask 'Hello'   pdctl status   pdctl down {result.name}")


@app.command()
def plan(
    path: TopologyPath,
    verbose: Verbose = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 3 when there is something to do.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what `up` would do, and change nothing."""
    from pdctl import ops
    from pdctl.documents import plan_document, plan_text
    from pdctl.output import Progress, Screen

    with _errors_as(as_json), Progress() as report:
        found = ops.plan_up(path, report)
    if as_json:
        _print_json(plan_document(found))
    else:
        typer.echo(plan_text(found, Screen.of(sys.stdout), verbose=verbose))
    if exit_code and found.changes:
        raise typer.Exit(EXIT_DEGRADED)


@app.command()
def down(
    name: Name = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="How long running requests may go on. Default: the topology's drain_timeout.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Stop a deployment and prove that nothing of it is left. Safe to repeat."""
    from pdctl import ops
    from pdctl.output import Progress, duration, print_warning

    with _errors_as(as_json), Progress() as report:
        result = ops.down(ops.resolve_name(name), timeout, report)
    if as_json:
        _print_json(result.to_json())
    else:
        for note in result.notes:
            print_warning(note, sys.stderr)
        stopped = len(result.services)
        what = "is down" if result.ok else "is NOT down: see above"
        typer.echo(
            f"{result.name} {what}  ({stopped} services, {duration(result.seconds)})"
            if stopped
            else f"{result.name} was not running"
        )
    raise typer.Exit(EXIT_OK if result.ok else EXIT_FAILED)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    name: Annotated[
        str | None,
        typer.Option(
            help="The deployment; not needed when there is only one.", autocompletion=_complete_name
        ),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask there instead of a deployment of ours.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first one served.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest silence.")
    ] = 120.0,
) -> None:
    """Ask the model one question: the answer on stdout, and how it was served on stderr."""
    from pdctl.ask import ask as ask_endpoint
    from pdctl.ask import describe, first_model

    url = endpoint or _endpoint(name)

    def show(piece: str) -> None:
        typer.echo(piece, nl=False)
        sys.stdout.flush()

    answer = ask_endpoint(
        url,
        question,
        model=model or first_model(url),
        max_tokens=max_tokens,
        timeout_s=timeout,
        on_text=show,
    )
    typer.echo()
    for line in describe(answer):
        typer.echo(line, err=True)


# ---- files ---------------------------------------------------------------------------------------


@app.command()
def validate(path: TopologyPath, as_json: AsJson = False) -> None:
    """Check a topology, report every mistake, and print it with all defaults filled in."""
    from pdctl.documents import topology_text, validate_document
    from pdctl.output import print_warning
    from pdctl.topology import load

    with _errors_as(as_json):
        loaded = load(path)
    document = validate_document(loaded)
    if as_json:
        _print_json(document)
        return
    for warning in loaded.warnings:
        print_warning(warning, sys.stderr)
    typer.echo(topology_text(document), nl=False)


@app.command()
def init(
    path: Annotated[
        Path, typer.Argument(help="The file to write; a folder gets one inside.")
    ] = Path("topology.yaml"),
    template: Annotated[
        str, typer.Option(help="quickstart, mixed, two-hosts, or reference with every key.")
    ] = "quickstart",
) -> None:
    """Write a commented topology to start from. Never overwrites."""
    from pdctl.init import write_template

    target = write_template(path, template)
    typer.echo(f"wrote {target}")
    _advise(f"pdctl validate {target}   pdctl up {target}")


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
        _print_json({"schema": "pdctl.models/1", "models": models})
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
) -> None:
    """Bring a known model onto this machine and print its path. At once when it is here."""
    from pdctl import models

    typer.echo(models.pull(alias, report=models.StderrProgress()))


# ---- the edge ------------------------------------------------------------------------------------


def main() -> None:
    """Entry point: runs a command and turns what it raises into a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A log line or an answer that the terminal's encoding lacks must not end the command.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except PdctlError as e:
        from pdctl.output import print_error

        print_error(e, sys.stderr)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _mute_stdout()
        sys.exit(EXIT_FAILED)
    except Exception as e:
        # The one boundary for our own bugs: nothing of a traceback on the screen, all in a file.
        where = _save_traceback()
        print(f"error: this is a bug in pdctl: {type(e).__name__}: {e}", file=sys.stderr)
        print(f"hint: please report it with the traceback in {where}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


@contextlib.contextmanager
def _errors_as(as_json: bool) -> Iterator[None]:
    """With --json a failure is a document on stdout too; the message on stderr stays."""
    try:
        yield
    except PdctlError as e:
        if as_json:
            from pdctl.output import error_document

            _print_json(error_document(e))
        raise


def _endpoint(name: str | None) -> str:
    from pdctl import ops

    return ops.status(ops.resolve_name(name)).endpoint


def _print_json(document: dict[str, object]) -> None:
    from pdctl.output import json_text

    typer.echo(json_text(document))


def _advise(text: str) -> None:
    """What one may want next: for people at a terminal only."""
    if sys.stderr.isatty():
        typer.echo(f"next: {text}", err=True)


def _save_traceback() -> str:
    """The stack without values of variables: those could be secrets."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="pdctl-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as f:
        f.write(f"pdctl {__version__}, Python {sys.version}\n{traceback.format_exc()}")
    return f.name


def _mute_stdout() -> None:
    """The reader is gone; Python's flush at exit would complain a second time."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

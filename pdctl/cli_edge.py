"""What every command needs at its edge: JSON results, errors as documents, advice, bug reports."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdctl import __version__
from pdctl.completion import complete_name
from pdctl.errors import EXIT_UNREACHABLE, PdctlError, UsageError

if TYPE_CHECKING:
    from pdctl.find import Where

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="The deployment; not needed when there is only one.",
        autocompletion=complete_name,
    ),
]

NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="The deployment; not needed when there is only one.",
        autocompletion=complete_name,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="TOPOLOGY",
        help="Look where this topology says, instead of what this machine remembers.",
    ),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0.0,
        metavar="SECONDS",
        help="How long running requests may go on. Default: the topology's drain_timeout.",
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS[,..]",
        help="Look there: one host of the deployment leads to all others.",
    ),
]


def where(file: Path | None, host: str | None) -> Where:
    from pdctl.find import Where

    return Where(file, tuple(h for h in (host or "").split(",") if h))


def seconds_ago(text: str) -> float:
    """`90s`, `10m`, `2h`, `1d`, or a date and time. Raises UsageError for anything else."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if text[:-1].isdigit() and text[-1] in units:
        return float(int(text[:-1]) * units[text[-1]])
    try:
        return time.time() - datetime.fromisoformat(text).timestamp()
    except ValueError as e:
        raise UsageError(
            f"{text!r} is not a time", hint="write 90s, 10m, 2h, 1d, or 2026-01-31T12:00"
        ) from e


@contextlib.contextmanager
def errors_as(as_json: bool, doing: str = "", *, lines: bool = False) -> Iterator[None]:
    """With --json a failure is a document on stdout too; the message on stderr stays.

    `doing` is said when it takes longer than a moment. `lines`: stdout has one document a line.
    """
    from pdctl.output import Patience

    try:
        with Patience(doing) if doing else contextlib.nullcontext():
            yield
    except PdctlError as e:
        if as_json:
            from pdctl.output import error_document, json_line

            if lines:
                typer.echo(json_line(error_document(e)))
            else:
                print_json(error_document(e))
        raise


def confirmed(question: str) -> bool:
    """Ask at the terminal; its end is a no. Not by click, whose own end Ctrl-C would be here."""
    typer.echo(f"{question} [y/N]: ", nl=False, err=True)
    answer = ""
    try:
        answer = sys.stdin.readline()
    finally:
        if not answer.endswith("\n"):
            typer.echo(err=True)
    return answer.strip().lower() in ("y", "yes")


def print_json(document: dict[str, Any]) -> None:
    from pdctl.output import json_text

    typer.echo(json_text(document))


def end_for(unreachable: Mapping[str, str], *, told: bool) -> None:
    """After a result that some hosts are missing in: name them, if it has not, and exit with 5."""
    from pdctl.output import print_warning

    if unreachable:
        for why in () if told else dict.fromkeys(unreachable.values()):
            print_warning(why, sys.stderr)
        raise typer.Exit(EXIT_UNREACHABLE)


def advise(text: str) -> None:
    """What one may want next: for people at a terminal only."""
    if sys.stderr.isatty():
        typer.echo(f"next: {text}", err=True)


def save_traceback() -> str:
    """The stack without values of variables: those could be secrets. Returns the file."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="pdctl-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as f:
        f.write(f"pdctl {__version__}, Python {sys.version}\n{traceback.format_exc()}")
    return f.name


def mute_stdout() -> None:
    """The reader is gone, or the disk full; Python's flush at exit would complain a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""Commands that look at deployments: status, logs, audit, lock. Only `lock break` ends anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pdctl.cli_edge import (
    AsJson,
    FileOption,
    HostOption,
    Name,
    NameOption,
    confirmed,
    end_for,
    errors_as,
    print_json,
    seconds_ago,
    where,
)
from pdctl.completion import complete_first_word, complete_service
from pdctl.errors import EXIT_DEGRADED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from pdctl.find import Where
    from pdctl.locks import LockHolder
    from pdctl.output import Screen

WATCH_S = 2.0

lock_app = typer.Typer(help="Who is changing a deployment now, and how to end one that hangs.")


def status(
    name: Name = None,
    file: FileOption = None,
    host: HostOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Again every 2 seconds, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs where, its health and the KV moved.

    Exits with 3 when not everything is healthy, with 5 when a host cannot be reached. With --watch
    --json, one document a line.
    """
    from pdctl import ops
    from pdctl.documents import status_text
    from pdctl.output import Screen

    screen, place = Screen.of(sys.stdout), where(file, host)
    if watch:
        with errors_as(as_json, lines=True):
            _watch(name, place, screen, as_json=as_json)
    with errors_as(as_json, "asking the hosts"):
        found = ops.status(name, place)
    if as_json:
        print_json(found.to_json())
    else:
        typer.echo(status_text(found, screen))
    end_for(found.unreachable, told=True)
    raise typer.Exit(EXIT_OK if found.healthy else EXIT_DEGRADED)


def _watch(name: str | None, place: Where, screen: Screen, *, as_json: bool) -> NoReturn:
    from pdctl import ops
    from pdctl.documents import status_text
    from pdctl.output import json_line, repaint

    first = True
    while True:
        found = ops.status(name, place)
        name = found.name  # whatever else is brought up meanwhile
        if as_json:
            typer.echo(json_line(found.to_json()))
        elif screen.live:
            now = time.strftime("%H:%M:%S")
            typer.echo(repaint(f"{status_text(found, screen)}\n{now}", first=first), nl=False)
        else:
            typer.echo(status_text(found, screen))
        sys.stdout.flush()
        first = False
        time.sleep(WATCH_S)


def logs(
    services: Annotated[
        list[str] | None,
        typer.Argument(metavar="SERVICE...", help="Default: all.", autocompletion=complete_service),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then new lines as they come.")
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "--tail", "-n", min=0, help="Last lines of each service. [50]"),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="None older than this: 90s, 10m, 2h, or 2026-01-31T12:00."
        ),
    ] = None,
    name: NameOption = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="TOPOLOGY", help="Look where this one says.")
    ] = None,
    host: HostOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line.")] = False,
) -> None:
    """Show the logs of all services, or of some, from all hosts.

    With -f it goes on through restarts, and says when a host is lost and found again. Without, it
    exits with 5 when a host cannot be reached.
    """
    from pdctl import ops
    from pdctl.documents import LogPrinter
    from pdctl.output import Screen, json_line

    with errors_as(as_json, lines=True):
        since_s = None if since is None else seconds_ago(since)
        limit = lines if lines is not None else 50 if since is None else sys.maxsize
        query = ops.LogQuery(tuple(services or ()), limit, since_s)
        printer = LogPrinter(Screen.of(sys.stdout), bare=len(query.services) == 1)
        lost: dict[str, str] = {}
        for entry in ops.logs(name, query, follow=follow, where=where(file, host)):
            if as_json:
                typer.echo(json_line(entry.to_json()))
            else:
                typer.echo(printer.text(entry), err=entry.event != "line")
            if follow:
                sys.stdout.flush()
            elif entry.event == "lost":
                lost[entry.host] = entry.line
    end_for(lost, told=True)


def audit(
    name: Name = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=1, help="Last ones of each host.")
    ] = 50,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """Show who changed what, and when; also of what is down.

    Without NAME, of the only deployment, or when there is none, of the last one. Times are those of
    the hosts' clocks. Exits with 5 when a host cannot be reached.
    """
    from pdctl import ops
    from pdctl.documents import audit_text
    from pdctl.find import unheard
    from pdctl.output import Screen, print_warning

    with errors_as(as_json, "asking the hosts"):
        report = ops.audit(name, lines, where(file, host))
    if as_json:
        print_json(report.to_json())
    else:
        if name is None and report.entries:
            typer.echo(f"{report.name}:", err=True)
        typer.echo(audit_text(report, Screen.of(sys.stdout)))
        if name is not None and not report.entries and not report.unreachable:
            print_warning(unheard(name), sys.stderr)
    end_for(report.unreachable, told=False)


def collect(
    name: Name = None,
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Default: ./pdctl-collect-NAME-TIME."),
    ] = None,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """Save logs, records and facts of the hosts in a folder.

    Prints its path. Secrets, tokens and API keys are taken out on the hosts. Look through it before
    you share it. Exits with 5 when a host is missing in it.
    """
    from pdctl import ops

    with errors_as(as_json, "collecting from the hosts"):
        saved = ops.collect(name, folder, where(file, host))
    if as_json:
        print_json(saved.to_json())
    else:
        typer.echo(saved.path)
    end_for(saved.missing, told=False)


def exec_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[SERVICE] -- COMMAND...", autocompletion=complete_first_word),
    ],
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="There, without a service: an address or a host's key."),
    ] = None,
    secrets: Annotated[
        bool, typer.Option("--secrets", help="With the service's secrets in the environment.")
    ] = False,
    name: NameOption = None,
    file: FileOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line.")] = False,
) -> None:
    """Run a command beside a service, or on a host; exit as it does.

    Beside: in its directory and environment. No shell: write `sh -c '...'` for one. Its input is
    empty.
    """
    from pdctl import ops
    from pdctl.output import json_line

    def show(stream: str, text: str) -> None:
        if as_json:
            typer.echo(json_line({"schema": "pdctl.exec/1", "stream": stream, "text": text}))
            return
        target = sys.stderr if stream == "err" else sys.stdout
        target.buffer.write(text.encode("utf-8", "surrogateescape"))
        target.buffer.flush()

    target = [] if host else words[:1]
    argv = words[len(target) :]
    argv = argv[1:] if argv[:1] == ["--"] else argv
    with errors_as(as_json, lines=True):
        if not argv:
            raise UsageError("there is no command", hint="pdctl exec SERVICE -- COMMAND...")
        command = ops.Command(tuple(argv), secrets)
        if host:
            code = ops.on_host(host, command, show, where(file, None))
        else:
            code = ops.on_service(name, target[0], command, show, where(file, None))
    if as_json:
        typer.echo(json_line({"schema": "pdctl.exec/1", "stream": "exit", "code": code}))
    raise typer.Exit(code)


@lock_app.command("show")
def lock_show(
    name: Name = None, file: FileOption = None, host: HostOption = None, as_json: AsJson = False
) -> None:
    """Show who holds the lock. Exits with 5 when a host cannot be reached."""
    from pdctl import ops
    from pdctl.documents import where_asked

    with errors_as(as_json, "asking the hosts"):
        report = ops.show_lock(name, where(file, host))
    if as_json:
        print_json(report.to_json())
    elif report.holders:
        _say(report.holders, err=False)
    else:
        typer.echo(f"{report.name} is not locked{where_asked(report.unreachable)}")
    end_for(report.unreachable, told=False)


@lock_app.command("break")
def lock_break(
    name: Name = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """End a holder that will not come back; never needed for one that has ended.

    What it was doing stops half way; the next `pdctl up` or `pdctl down` finds that and goes on
    from there.
    """
    from pdctl import ops
    from pdctl.documents import where_asked

    def agree(holders: Sequence[LockHolder]) -> bool:
        _say(holders, err=True)
        if yes:
            return True
        if not sys.stdin.isatty():
            raise UsageError("breaking a lock needs your word", hint="repeat it with --yes")
        return confirmed("End it?")

    with errors_as(as_json):
        report = ops.break_locks(name, where(file, host), agree)
    if as_json:
        print_json(report.to_json())
    elif not report.holders:
        typer.echo(f"{report.name} is not locked{where_asked(report.unreachable)}")
    else:
        typer.echo(f"the lock on {report.name} is {'broken' if report.broken else 'left alone'}")
    end_for(report.unreachable, told=False)


def _say(holders: Sequence[LockHolder], *, err: bool) -> None:
    for holder in holders:
        typer.echo(f"{holder.host}: locked by {holder.text}", err=err)

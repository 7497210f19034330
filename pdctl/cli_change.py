"""Commands that change what runs: plan, up, scale, restart, drain; and what is asked before."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdctl.cli_edge import (
    AsJson,
    DrainTimeout,
    FileOption,
    HostOption,
    NameOption,
    advise,
    confirmed,
    errors_as,
    print_json,
    where,
)
from pdctl.completion import complete_instance, complete_service
from pdctl.errors import EXIT_DEGRADED, EXIT_OK, PdctlError, UsageError

if TYPE_CHECKING:
    from pdctl.plan import Plan
    from pdctl.up import UpResult

TopologyPath = Annotated[Path, typer.Argument(metavar="TOPOLOGY", help="A topology file (YAML).")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="With commands and config files.")]
Yes = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Do not ask before something that runs is stopped."),
]
WaitTimeout = Annotated[
    float | None,
    typer.Option(min=0.1, metavar="SECONDS", help="Default: the topology's startup_timeout."),
]


def up(
    path: TopologyPath,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start and return; do not wait until ready.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, like `pdctl plan`.")
    ] = False,
    yes: Yes = False,
    wait_timeout: WaitTimeout = None,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Leave what was started, to look at it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start what TOPOLOGY describes, wait until it answers.

    It is ready when every model is loaded, has generated a token, and every path from prefill to
    decode has carried bytes. Safe to repeat: what runs as wanted is left alone. What runs and
    changed is shown, asked for, drained and replaced, one instance after the other.
    """
    if dry_run:
        plan(path, as_json=as_json)
        return
    from pdctl import ops
    from pdctl.output import Progress

    options = ops.UpOptions(
        detach=detach,
        wait_timeout_s=wait_timeout,
        keep_on_failure=keep_on_failure,
        approve=approver(yes, look="`pdctl plan` shows what would be done"),
    )
    with errors_as(as_json), Progress() as report:
        result = ops.up(path, options, report)
    show_result(result, as_json)


def show_result(result: UpResult, as_json: bool) -> None:
    from pdctl.output import duration

    if as_json:
        print_json(result.to_json())
        return
    state = "is ready at" if result.ready else "is starting; it will answer at"
    counts = f"{len(result.started)} started, {len(result.kept)} unchanged"
    if result.removed:
        counts += f", {len(result.removed)} removed"
    typer.echo(f"{result.name} {state} {result.endpoint}  ({counts}, {duration(result.seconds)})")
    advise(f"pdctl ask 'Hello'   pdctl status   pdctl down {result.name}")


def plan(path: TopologyPath, verbose: Verbose = False, as_json: AsJson = False) -> None:
    """Show what `up` would do; change nothing.

    Exits with 3 when there is something to do, with 0 when there is nothing.
    """
    from pdctl import ops
    from pdctl.documents import plan_document, plan_text
    from pdctl.output import Progress, Screen

    with errors_as(as_json), Progress() as report:
        found = ops.plan_up(path, report)
    if as_json:
        print_json(plan_document(found))
    else:
        typer.echo(plan_text(found, Screen.of(sys.stdout), verbose=verbose))
    raise typer.Exit(EXIT_DEGRADED if found.changes else EXIT_OK)


def approver(yes: bool, look: str = "") -> Callable[[Plan], None]:
    """Shows a plan that touches what runs, and asks when it stops something of that. `look`: how to
    see it beforehand.
    """

    def approve(found: Plan) -> None:
        from pdctl.documents import plan_text
        from pdctl.output import Screen
        from pdctl.sizes import listed

        if not found.changes or not any(step.running for step in found.steps):
            return
        typer.echo(plan_text(found, Screen.of(sys.stderr), verbose=False), err=True)
        if yes or not found.ends:
            return
        what = f"{listed(found.ends)} of {found.deployment}"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(
                f"this would stop {what}, and there is no terminal to ask at",
                hint="--yes does it without asking" + (f"; {look}" if look else ""),
            )
        if not confirmed(f"Stop {what}?"):
            raise PdctlError("nothing was changed")

    return approve


def scale(
    numbers: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="decode=3 prefill=2, or mixed=4.")
    ],
    yes: Yes = False,
    wait_timeout: WaitTimeout = None,
    name: NameOption = None,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """Have other numbers of instances, without the file.

    More are started, the highest numbers are drained and stopped; all others are left alone. The
    numbers hold until the next `scale`, or until `up` goes back to what the file says.
    """
    from pdctl import ops
    from pdctl.output import Progress

    with errors_as(as_json), Progress() as report:
        options = ops.UpOptions(wait_timeout_s=wait_timeout, approve=approver(yes))
        wanted = dict(map(_number, numbers))
        result = ops.scale(name, wanted, options, report, where(file, host))
    show_result(result, as_json)


def _number(text: str) -> tuple[str, int]:
    from pdctl.topology_schema import ROLES

    role, _, count = text.partition("=")
    if role not in ROLES or not count.isdecimal():
        close = difflib.get_close_matches(role, ROLES, n=1) if role not in ROLES else []
        hint = f"did you mean {close[0]}?" if close else "for example decode=3, prefill=2, mixed=1"
        raise UsageError(f"{text!r} is not ROLE=N", hint=hint)
    return role, int(count)


def restart(
    services: Annotated[
        list[str] | None,
        typer.Argument(metavar="SERVICE...", help="Default: all.", autocompletion=complete_service),
    ] = None,
    rolling: Annotated[
        bool,
        typer.Option(
            "--rolling",
            help="One instance after the other, each drained first; the router only when named.",
        ),
    ] = False,
    yes: Yes = False,
    timeout: DrainTimeout = None,
    wait_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long each may take to be ready.")
    ] = 300.0,
    name: NameOption = None,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """Start services again as they are.

    With --rolling no request is lost as long as there are two instances of a role: one is drained,
    restarted, ready and linked before the next. Stops at the first that does not come back. It asks
    before it when nothing would be served meanwhile.
    """
    from pdctl import ops
    from pdctl.output import Progress, duration

    options = ops.RestartOptions(
        tuple(services or ()), rolling, timeout, wait_timeout, approver(yes)
    )
    with errors_as(as_json), Progress() as report:
        result = ops.restart(name, options, report, where(file, host))
    if as_json:
        print_json(result.to_json())
    else:
        how = f"({len(result.restarted)} restarted, {duration(result.seconds)})"
        typer.echo(f"{result.name}: {', '.join(result.restarted) or 'nothing'} restarted  {how}")


def drain(
    service: Annotated[
        str,
        typer.Argument(
            metavar="SERVICE",
            help="An instance: decode-0, prefill-1, ...",
            autocompletion=complete_instance,
        ),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let it have new requests again.")] = False,
    timeout: DrainTimeout = None,
    name: NameOption = None,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """Give an instance no new requests; wait for those it has.

    Exits with 3 when it has not finished in time: it stays drained. A restart ends the drain.
    """
    from pdctl import ops
    from pdctl.output import Progress

    with errors_as(as_json), Progress() as report:
        options = ops.DrainOptions(undo, timeout)
        result = ops.drain(name, service, options, report, where(file, host))
    if as_json:
        print_json(result.to_json())
    elif undo:
        typer.echo(f"{service} gets requests again")
    else:
        what = f"still has {result.left} under way" if result.left else "has nothing under way"
        typer.echo(f"{service} gets no new requests and {what}")
        advise(f"pdctl restart {service}   pdctl drain {service} --undo")
    raise typer.Exit(EXIT_DEGRADED if result.left else EXIT_OK)

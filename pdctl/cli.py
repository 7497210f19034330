"""The command line: options, and which function does it. Thin: no decisions about deployments here.

Heavy modules are imported by the command that needs them, so that `pdctl --help` stays quick.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from pdctl import __version__
from pdctl.cli_bench import bench_app
from pdctl.cli_change import drain, plan, restart, scale, up
from pdctl.cli_edge import (
    AsJson,
    DrainTimeout,
    FileOption,
    HostOption,
    Name,
    end_for,
    errors_as,
    mute_stdout,
    print_json,
    save_traceback,
    where,
)
from pdctl.cli_files import init, model_app, validate
from pdctl.cli_hosts import doctor, sync
from pdctl.cli_look import audit, collect, exec_command, lock_app, logs, status
from pdctl.completion import complete_name
from pdctl.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    PdctlError,
    UsageError,
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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdctl {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    del version


# ---- deployments ---------------------------------------------------------------------------------


@app.command()
def down(
    name: Name = None,
    timeout: DrainTimeout = None,
    orphans: Annotated[
        bool,
        typer.Option("--orphans", help="Only services that the topology does not name any more."),
    ] = False,
    file: FileOption = None,
    host: HostOption = None,
    as_json: AsJson = False,
) -> None:
    """Stop a deployment; prove that nothing is left.

    Processes are gone, ports free, shared memory unlinked, or it says what is not. Safe to repeat.
    """
    from pdctl import ops
    from pdctl.output import Progress, duration, print_warning
    from pdctl.sizes import counted

    stop = ops.down_orphans if orphans else ops.down
    with errors_as(as_json), Progress() as report:
        # A name is taken as it is: stopping what is already down is no mistake.
        result = stop(name, timeout, report, where(file, host))
    if as_json:
        print_json(result.to_json())
    else:
        for note in (*result.notes, *result.unreachable.values()):
            print_warning(note, sys.stderr)
        what = "is down" if result.ok else "is NOT down: see above"
        how = f"{len(result.services)} stopped, {duration(result.seconds)}"
        if result.unreachable:
            how += f"; {counted(result.hosts_ok, 'host')} ok, {len(result.unreachable)} failed"
        if orphans:
            typer.echo(f"orphans of {result.name}: {how}")
        else:
            running = result.services or not result.ok
            typer.echo(
                f"{result.name} {what}  ({how})" if running else f"{result.name} is not running"
            )
    end_for(result.unreachable, told=not as_json)
    raise typer.Exit(EXIT_OK if result.ok else EXIT_FAILED)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")],
    name: Annotated[
        str | None,
        typer.Option(
            help="The deployment; not needed when there is only one.", autocompletion=complete_name
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
    as_json: AsJson = False,
) -> None:
    """Ask one question; show how it was served.

    The answer goes to stdout, how it was served to stderr.
    """
    from pdctl import ops
    from pdctl.ask import ask as ask_endpoint
    from pdctl.ask import describe, first_model

    shown = ""

    def show(piece: str) -> None:
        nonlocal shown
        if not as_json:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            shown = piece

    with errors_as(as_json):
        if not question.strip():
            raise UsageError("the question is empty", hint="for example `pdctl ask 'Hello'`")
        try:
            url = endpoint or ops.status(name).endpoint
            answer = ask_endpoint(
                url,
                question,
                model=model or first_model(url),
                max_tokens=max_tokens,
                timeout_s=timeout,
                on_text=show,
            )
        finally:  # what is said next, perhaps why the answer broke off, has its own line
            if shown and not shown.endswith("\n"):
                typer.echo()
    if as_json:
        print_json({"schema": "pdctl.ask/1", **asdict(answer)})
        return
    for line in describe(answer):
        typer.echo(line, err=True)


app.command("sync")(sync)
app.command("doctor")(doctor)
app.command("up")(up)
app.command("plan")(plan)
app.command("scale")(scale)
app.command("restart")(restart)
app.command("drain")(drain)
app.command("status")(status)
app.command("logs")(logs)
app.command("audit")(audit)
app.command("collect")(collect)
app.command(
    "exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)(exec_command)
app.add_typer(lock_app, name="lock", no_args_is_help=True)
app.add_typer(
    bench_app,
    name="bench",
    help="Measure a deployment, or its transfers.",
)
app.command("validate")(validate)
app.command("init")(init)
app.add_typer(model_app, name="model", no_args_is_help=True)


# ---- the edge ------------------------------------------------------------------------------------


def main() -> None:
    """Runs a command and turns what it raises into a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A log line or an answer that the terminal's encoding lacks must not end the command.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    logging.basicConfig(format="warning: %(message)s")  # of what no command waits for
    try:
        app(prog_name="pdctl")
    except PdctlError as e:
        from pdctl.output import print_error

        print_error(e, sys.stderr)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        mute_stdout()
        sys.exit(EXIT_FAILED)
    except Exception as e:
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            print("error: the output cannot be written: no space left", file=sys.stderr)
            mute_stdout()
            sys.exit(EXIT_FAILED)
        # The one boundary for our own bugs: nothing of a traceback on the screen, all in a file.
        where = save_traceback()
        print(f"error: this is a bug in pdctl: {type(e).__name__}: {e}", file=sys.stderr)
        print(f"hint: please report it with the traceback in {where}", file=sys.stderr)
        sys.exit(EXIT_FAILED)

"""`pdctl bench`: its options, and where the endpoint comes from.

Everything heavy is imported when the command runs, so that `pdctl --help` stays quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdctl.errors import EXIT_INTERRUPTED, PdctlError, UsageError


def bench_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Not needed when only one deployment runs."),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Measure this URL instead of a deployment of ours.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first one served.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    request_rate: Annotated[
        str, typer.Option(metavar="inf|R", help="Requests per second; inf: all at once.")
    ] = "inf",
    burstiness: Annotated[
        float, typer.Option(help="1: Poisson arrivals; less is burstier, more is steadier.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests under way at a time.")
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")] = 256,
    output_len: Annotated[
        int | None,
        typer.Option(min=1, help="Most output tokens; default: the data set's, or 32."),
    ] = None,
    dataset: Annotated[
        Literal["random", "sharegpt", "jsonl"], typer.Option(help="Where prompts come from.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="The file, for sharegpt and jsonl.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate the full output length.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Same seed: same prompts and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")] = 1,
    goodput: Annotated[
        str | None,
        typer.Option(metavar="ttft:MS,tpot:MS", help="Count requests within these limits."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the JSON document here.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON document, not the table.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what each number means, and stop.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds each request may take.")] = 600.0,
) -> None:
    """Measure a deployment: throughput, TTFT and its stages, the hand-over, decode speed.

    `pdctl bench transfer` measures the paths of KV alone.
    """
    if explain:
        from pdctl.bench.explain import TEXT

        typer.echo(TEXT, nl=False)
        return
    from pdctl.bench.runner import Options, bench

    try:
        rate, shape = _rate(request_rate), _positive("--burstiness", burstiness)
        seconds = _positive("--timeout", timeout)
        measured = _measured(name, endpoint)
        options = Options(
            endpoint=measured.endpoint,
            deployment=measured.deployment,
            services=measured.services,
            model=model,
            num_prompts=num_prompts,
            request_rate=rate,
            burstiness=shape,
            max_concurrency=max_concurrency,
            input_len=input_len,
            output_len=output_len,
            dataset=dataset,
            dataset_path=dataset_path,
            ignore_eos=ignore_eos,
            seed=seed,
            warmup=warmup,
            goodput=goodput,
            output=output,
            as_json=as_json,
            timeout=seconds,
        )
        code = bench(options, typer.echo)
    except KeyboardInterrupt:
        typer.echo("interrupted before there was anything to report", err=True)
        code = EXIT_INTERRUPTED
    except PdctlError as e:
        if as_json:
            from pdctl.output import error_document, json_text

            typer.echo(json_text(error_document(e)))
        raise
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What to measure. `services` are the deployment's, for the record; empty for a bare URL."""

    endpoint: str
    deployment: str | None = None
    services: tuple[dict[str, str], ...] = ()


def _measured(name: str | None, endpoint: str | None) -> _Measured:
    if endpoint:
        if name:
            raise UsageError("give a deployment or --endpoint, not both")
        return _Measured(endpoint)
    from pdctl import ops

    found = ops.status(ops.resolve_name(name))
    if not found.endpoint:
        raise PdctlError(f"{found.name} has no router", hint=f"pdctl status {found.name}")
    services = tuple({"name": s.name, "role": s.role, "host": s.host} for s in found.services)
    return _Measured(found.endpoint, found.name, services)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise UsageError(f"--request-rate {text}: expected inf or a number above 0")
    return rate


def _positive(option: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {value}: expected a number above 0")
    return value

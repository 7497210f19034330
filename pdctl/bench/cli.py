"""`pdctl bench`: its options, and where the endpoint comes from.

Everything heavy is imported when the command runs, so that `pdctl --help` stays quick.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdctl.completion import complete_name
from pdctl.errors import EXIT_INTERRUPTED, PdctlError, UsageError

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="Not needed when only one deployment runs.",
        autocompletion=complete_name,
    ),
]
Endpoint = Annotated[
    str | None, typer.Option(help="Measure this URL instead of a deployment of ours.")
]
Model = Annotated[str | None, typer.Option(help="Default: the first one served.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Requests to send.")]
RequestRate = Annotated[
    str, typer.Option(metavar="inf|R", help="Requests per second; inf: all at once.")
]
Burstiness = Annotated[
    float, typer.Option(help="1: Poisson arrivals; less is burstier, more is steadier.")
]
MaxConcurrency = Annotated[
    int | None, typer.Option(min=1, help="Most requests under way at a time.")
]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each random prompt.")]
OutputLen = Annotated[
    int | None, typer.Option(min=1, help="Most output tokens; default: the data set's, or 32.")
]
Dataset = Annotated[
    Literal["random", "sharegpt", "jsonl"], typer.Option(help="Where prompts come from.")
]
DatasetPath = Annotated[Path | None, typer.Option(help="The file, for sharegpt and jsonl.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Generate the full output length.")]
Seed = Annotated[int, typer.Option(help="Same seed: same prompts and arrivals.")]
Warmup = Annotated[int, typer.Option(min=0, help="Requests before the clock starts.")]
Goodput = Annotated[
    str | None,
    typer.Option(metavar="ttft:MS,tpot:MS", help="Count requests within these limits."),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the JSON document here.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON document, not the table.")]
Explain = Annotated[bool, typer.Option("--explain", help="Print what each number means, and stop.")]
Timeout = Annotated[float, typer.Option(help="Seconds each request may take.")]


def bench_command(
    name: Name = None,
    endpoint: Endpoint = None,
    model: Model = None,
    num_prompts: NumPrompts = 100,
    request_rate: RequestRate = "inf",
    burstiness: Burstiness = 1.0,
    max_concurrency: MaxConcurrency = None,
    input_len: InputLen = 256,
    output_len: OutputLen = None,
    dataset: Dataset = "random",
    dataset_path: DatasetPath = None,
    ignore_eos: IgnoreEos = False,
    seed: Seed = 0,
    warmup: Warmup = 1,
    goodput: Goodput = None,
    output: Output = None,
    as_json: AsJson = False,
    explain: Explain = False,
    timeout: Timeout = 600.0,
) -> None:
    """Measure a deployment: throughput, TTFT and its stages, the hand-over, decode speed.

    `pdctl bench transfer` measures the paths of KV alone.
    """
    if explain:
        from pdctl.bench.explain import TEXT

        typer.echo(TEXT, nl=False)
        return
    from pdctl.bench.runner import Options, bench

    with _failures(as_json):
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
        raise typer.Exit(bench(options, typer.echo))


@contextlib.contextmanager
def _failures(as_json: bool) -> Iterator[None]:
    """What ends a benchmark without a report: with --json an error is a document too."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted before there was anything to report", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except PdctlError as e:
        if as_json:
            from pdctl.output import error_document, json_text

            typer.echo(json_text(error_document(e)))
        raise


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

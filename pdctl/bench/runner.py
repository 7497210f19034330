"""One benchmark from checked options to a delivered report: prompts, warm-up, load, Ctrl-C, output.

Imports the HTTP client; `cli` imports it only when the command runs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from pdctl import __version__, interrupts
from pdctl.bench import client, dataset, load, report
from pdctl.bench.client import Target
from pdctl.bench.dataset import DatasetName, Prompt
from pdctl.bench.load import Load, Run
from pdctl.bench.metrics import parse_goodput, summarize
from pdctl.bench.progress import Progress
from pdctl.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, PdctlError, UsageError

_OUTPUT_LEN = 32
_TEMPLATE_TOKENS = 64
"""Room left for what the chat template adds around a ShareGPT question."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    endpoint: str
    deployment: str | None
    """Name of the running deployment; None when the endpoint was given."""
    services: tuple[dict[str, str], ...]
    """Name, role and host of each; for the record."""
    model: str | None
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    input_len: int
    output_len: int | None
    dataset: DatasetName
    dataset_path: Path | None
    ignore_eos: bool
    seed: int
    warmup: int
    goodput: str | None
    output: Path | None
    as_json: bool
    timeout: float


def bench(options: Options, say: Callable[[str], None]) -> int:
    """Run the benchmark, `say` its report, and return the exit code."""
    _check(options)
    limits = parse_goodput(options.goodput) if options.goodput is not None else None
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    target, run = asyncio.run(_measure(options))
    summary = summarize(run, asked_rate=options.request_rate, goodput=limits)
    doc = report.document(
        summary,
        run.outcomes,
        versions={"pdctl": __version__, "python": platform.python_version()},
        arguments=_arguments(options),
        target={
            "endpoint": target.endpoint,
            "deployment": options.deployment,
            "services": list(options.services),
            "model": target.model,
            "max_model_len": target.max_model_len,
            "client_host": platform.node(),
        },
        started_at=started_at,
    )
    if options.output is not None:
        _write(options.output, json.dumps(doc, indent=2) + "\n")
    say(json.dumps(doc, indent=2) if options.as_json else report.table(summary))
    if run.stopped:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failed else EXIT_OK


def _check(options: Options) -> None:
    """What can be wrong before anything is sent: a long run must not end without its report."""
    if options.dataset != "random" and options.dataset_path is None:
        raise UsageError(f"--dataset {options.dataset} needs --dataset-path FILE")
    if options.dataset == "random" and options.dataset_path is not None:
        raise UsageError("--dataset-path needs --dataset sharegpt or --dataset jsonl")
    if options.output is not None:
        folder = options.output.absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or options.output.is_dir():
            raise UsageError(f"-o {options.output}: no file can be written there")


async def _measure(options: Options) -> tuple[Target, Run]:
    async with client.open_session(options.timeout) as session:
        target = await client.look(session, options.endpoint, options.model)
        warm_up, prompts = await _prompts(session, target, options)
        await _warm_up(session, target, options, warm_up)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        numbers = interrupts.heeded()

        def interrupt() -> None:
            stop.set()
            interrupts.leave_dead_terminal()
            release()  # a second Ctrl-C ends at once

        def release() -> None:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.default_int_handler)

        for number in numbers:
            loop.add_signal_handler(number, interrupt)
        try:
            with Progress(len(prompts)) as progress:
                run = await load.run(
                    session, target, prompts, _load(options), on_done=progress.done, stop=stop
                )
        finally:
            release()
        return target, run


def _load(options: Options) -> Load:
    return Load(
        rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )


async def _prompts(
    session: aiohttp.ClientSession, target: Target, options: Options
) -> tuple[list[Prompt], list[Prompt]]:
    """For the warm-up, and for the run. Random ones differ: the warm-up fills no cache."""
    if options.dataset == "random" or options.dataset_path is None:
        ids = await vocabulary(session, target)
        return (
            _random(target, options, ids, options.warmup, -1 - options.seed),
            _random(target, options, ids, options.num_prompts, options.seed),
        )
    if options.dataset == "jsonl":
        prompts = dataset.jsonl_prompts(
            options.dataset_path,
            options.num_prompts,
            output_len=options.output_len,
            default=_OUTPUT_LEN,
        )
    else:
        prompts = await _sharegpt(session, target, options, options.dataset_path)
    if len(prompts) < options.num_prompts:
        print(f"{options.dataset_path}: {len(prompts)} requests in it", file=sys.stderr)
    return prompts[: options.warmup], prompts


async def vocabulary(session: aiohttp.ClientSession, target: Target) -> Sequence[int]:
    """Token ids to draw from, none of them special."""
    if target.vocab_size is not None:
        return dataset.ordinary_ids(target.vocab_size)
    try:
        # A first token may be one that opens every text.
        return sorted(set((await client.tokenize(session, target, dataset.sample_text()))[1:]))
    except PdctlError as e:
        raise PdctlError(
            f"cannot draw random tokens: {target.endpoint} says no vocab_size, and {e}",
            hint="use --dataset jsonl",
        ) from e


def _random(
    target: Target, options: Options, ids: Sequence[int], count: int, seed: int
) -> list[Prompt]:
    output_len = options.output_len or _OUTPUT_LEN
    limit = target.max_model_len
    if limit is not None and options.input_len + output_len > limit:
        raise UsageError(
            f"--input-len {options.input_len} and --output-len {output_len} are over the model's "
            f"{limit} tokens together"
        )
    return dataset.random_prompts(
        count, input_len=options.input_len, output_len=output_len, ids=ids, seed=seed
    )


async def _sharegpt(
    session: aiohttp.ClientSession, target: Target, options: Options, path: Path
) -> list[Prompt]:
    """Questions, each with as many output tokens as its reference answer has, or --output-len."""
    prompts: list[Prompt] = []
    for conversation in dataset.sharegpt_conversations(path, seed=options.seed):
        if len(prompts) == options.num_prompts:
            break
        max_tokens = options.output_len
        if max_tokens is None:
            max_tokens = len(await client.tokenize(session, target, conversation.answer))
        if target.max_model_len is not None:
            asked = len(await client.tokenize(session, target, conversation.question))
            if asked + max_tokens + _TEMPLATE_TOKENS > target.max_model_len:
                continue
        messages = [{"role": "user", "content": conversation.question}]
        prompts.append(dataset.chat_prompt(messages, max_tokens))
    if not prompts:
        raise UsageError(f"{path}: no conversation fits the model's {target.max_model_len} tokens")
    return prompts


async def _warm_up(
    session: aiohttp.ClientSession, target: Target, options: Options, prompts: list[Prompt]
) -> None:
    """Requests that do not count, one at a time."""
    for prompt in prompts:
        outcome = await client.request(session, target, prompt, ignore_eos=options.ignore_eos)
        if outcome.failure is not None:
            raise PdctlError(
                f"the warm-up request failed: {outcome.failure.kind}: {outcome.failure.message}",
                hint="see pdctl status and pdctl logs",
            )


def _arguments(options: Options) -> dict[str, Any]:
    """As given, in JSON's terms."""
    found = asdict(options)
    for name in ("endpoint", "deployment", "services", "model", "output", "as_json"):
        del found[name]
    if math.isinf(options.request_rate):
        found["request_rate"] = "inf"
    if options.dataset_path is not None:
        found["dataset_path"] = str(options.dataset_path)
    return found


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.absolute().parent, prefix=f".{path.name}.", delete=False
        ) as f:
            f.write(text)
        os.chmod(f.name, 0o644)
        os.replace(f.name, path)
    except OSError as e:
        raise PdctlError(f"-o {path}: {e.strerror}") from e

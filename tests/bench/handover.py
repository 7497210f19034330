"""What being split costs: one request at a time, prefill and decode apart against a mixed instance.

Brings up both through pdctl (in a private home, on free ports), sends each the same long prompts in
turn, so that drift of the machine hits both alike, then several at a time, and takes them down.
Every number of a row is from the same streams. Prints a verdict for each path; the exit code only
tells whether all requests succeeded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from lab import Deployment, Lab

from pdctl import models
from pdctl.bench import client
from pdctl.bench.dataset import random_prompts
from pdctl.bench.metrics import percentile
from pdctl.bench.outcome import Outcome
from pdctl.bench.runner import vocabulary
from pdctl.errors import PdctlError

TARGETS_MS = {"shm": 2.0, "tcp": 15.0}
"""For 1,024 prompt tokens of the default model, one request at a time on an idle machine."""
WARM_UP = 2
REQUEST_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One stream, in milliseconds."""

    ttft: float
    second: float
    """Gap between first and second token."""
    step: float
    """One decode step: the median of the later gaps of the same stream."""
    transfer: float | None
    swap_in: float | None
    prefill: float | None
    kv_mib: float
    path: str

    @property
    def cost(self) -> float:
        return self.second - self.step


@dataclass(slots=True)
class Side:
    """One deployment and what it did."""

    name: str
    endpoint: str
    alone: dict[int, Sample] = field(default_factory=dict)
    """By number of the prompt: one request at a time,"""
    crowd: dict[int, Sample] = field(default_factory=dict)
    """and several."""
    failures: list[str] = field(default_factory=list)
    merged: int = 0
    """Streams that have no gaps to look at: on a busy machine tokens arrive together."""

    @property
    def samples(self) -> list[Sample]:
        return list(self.alone.values())

    @property
    def crowded(self) -> list[Sample]:
        return list(self.crowd.values())


def sample(outcome: Outcome) -> Sample | None:
    """The stream's numbers; None when some of its tokens arrived together."""
    if outcome.output_tokens != len(outcome.arrivals_s):
        return None
    assert outcome.served is not None and outcome.ttft_s is not None
    gaps, served = outcome.gaps_s, outcome.served

    def stage(name: str) -> float | None:
        return 1e3 * served.stages[name] if name in served.stages else None

    return Sample(
        ttft=1e3 * outcome.ttft_s,
        second=1e3 * gaps[0],
        step=1e3 * statistics.median(gaps[1:]),
        transfer=stage("transfer"),
        swap_in=stage("swap_in"),
        prefill=stage("prefill"),
        kv_mib=served.kv_bytes / 2**20,
        path=served.path,
    )


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    in_flight: int
    rounds: int
    """Of `in_flight` requests at a time."""
    prompt: int
    output: int


async def measure(sides: Sequence[Side], load: Load) -> None:
    """Every prompt goes to every side; who is first changes with each prompt."""
    async with client.open_session(REQUEST_S) as session:
        targets = {s.name: await client.look(session, s.endpoint, None) for s in sides}
        ids = await vocabulary(session, targets[sides[0].name])
        prompts = random_prompts(
            WARM_UP + load.requests + load.rounds * load.in_flight,
            input_len=load.prompt,
            output_len=load.output,
            ids=ids,
            seed=int.from_bytes(os.urandom(4)),
        )

        async def ask(side: Side, number: int, into: dict[int, Sample]) -> None:
            one, target = prompts[number], targets[side.name]
            take(side, number, await client.request(session, target, one, ignore_eos=True), into)

        alone = WARM_UP + load.requests
        for i in range(alone):
            for side in _from(sides, i):
                await ask(side, i, side.alone if i >= WARM_UP else {})
            print(f"{i + 1} of {alone} prompts", file=sys.stderr)
        for i in range(load.rounds):
            first = alone + i * load.in_flight
            for side in _from(sides, i):
                numbers = range(first, first + load.in_flight)
                await asyncio.gather(*(ask(side, number, side.crowd) for number in numbers))
            print(f"{i + 1} of {load.rounds} rounds of {load.in_flight}", file=sys.stderr)


def _from(sides: Sequence[Side], turn: int) -> Sequence[Side]:
    first = turn % len(sides)
    return (*sides[first:], *sides[:first])


def take(side: Side, number: int, outcome: Outcome, into: dict[int, Sample]) -> None:
    if outcome.failure is not None:
        side.failures.append(f"{outcome.failure.kind}: {outcome.failure.message}")
    elif found := sample(outcome):
        into[number] = found
    else:
        side.merged += 1


@contextmanager
def up(lab: Lab, name: str, **sections: object) -> Iterator[str]:
    """A deployment for the time of the block; its endpoint."""
    deployment = Deployment(lab, name, lab.topology(name, **sections))
    result = deployment.up()
    try:
        if result.returncode:
            raise PdctlError(f"{name} did not come up:\n{result.stderr}")
        yield deployment.endpoint
    finally:
        result = deployment.down()
        if result.returncode:
            print(f"{name} did not go down:\n{result.stderr}", file=sys.stderr)


def _terminated(*_: object) -> None:
    sys.exit(143)


def spread(values: Sequence[float | None]) -> str:
    known = sorted(v for v in values if v is not None)
    if not known:
        return f"{'-':>10}{'-':>10}"
    return f"{percentile(known, 50):>10.2f}{percentile(known, 95):>10.2f}"


def report(sides: Sequence[Side]) -> list[str]:
    """The table, median and P95 per side, and what it means."""
    lines = [" " * 26 + "".join(f"{s.name:>20}" for s in sides)]
    lines.append(" " * 26 + f"{'median':>10}{'P95':>10}" * len(sides))
    rows: dict[str, Callable[[Sample], float | None]] = {
        "TTFT (ms)": lambda s: s.ttft,
        "  prefill (ms)": lambda s: s.prefill,
        "2nd token gap (ms)": lambda s: s.second,
        "one decode step (ms)": lambda s: s.step,
        "gap - one step (ms)": lambda s: s.cost,
        "  transfer (ms)": lambda s: s.transfer,
        "  swap_in (ms)": lambda s: s.swap_in,
        "KV moved (MiB)": lambda s: s.kv_mib,
    }
    for title, pick in rows.items():
        columns = (spread([pick(s) for s in side.samples]) for side in sides)
        lines.append(f"{title:<26}" + "".join(columns))
    mixed = next(s for s in sides if s.name == "mixed")
    for side in sides:
        both = side.alone.keys() & mixed.alone.keys()
        if side is mixed or not both:
            continue
        ratio = statistics.median(side.alone[n].ttft / mixed.alone[n].ttft for n in both)
        lines.append(f"TTFT({side.name}) / TTFT(mixed): {ratio:.3f} (median over equal prompts)")
    for side in sides:
        lines += verdict(side) + crowded(side)
        if side.merged:
            lines.append(f"{side.name}: {side.merged} streams left out, whose tokens came together")
    return lines


def verdict(side: Side) -> list[str]:
    kind = side.name.removeprefix("pd-")
    if kind not in TARGETS_MS:
        return []
    target = TARGETS_MS[kind]
    if not side.samples:
        return [f"verdict: no samples over {kind}"]
    wrong = {s.path for s in side.samples} - {kind}
    if wrong:
        return [f"verdict: none, KV went by {', '.join(sorted(wrong))} and not by {kind}"]
    costs = [s.cost for s in side.samples]
    cost = statistics.median(costs)
    # Of a median of n samples, robust: 1.2533 sigma / sqrt(n), sigma from the absolute deviations.
    sigma = 1.4826 * statistics.median(abs(c - cost) for c in costs)
    error = 1.2533 * sigma / len(costs) ** 0.5
    line = (
        f"gap - one decode step over {kind}: {cost:.2f} ± {error:.2f} ms, target <= {target:g} ms"
    )
    if len(costs) < 5 or error > target:
        return [f"{line}: too few or too noisy to tell"]
    return [f"{line}: {'met' if cost <= target else 'NOT met'}"]


def crowded(side: Side) -> list[str]:
    if not side.crowded:
        return []

    def both(values: Sequence[float | None]) -> str:
        known = sorted(v for v in values if v is not None)
        if not known:
            return "-"
        return f"{percentile(known, 50):.2f} / {percentile(known, 99):.2f}"

    gaps = both([s.cost for s in side.crowded])
    transfers, swaps = (
        both([pick(s) for s in side.crowded])
        for pick in (lambda s: s.transfer, lambda s: s.swap_in)
    )
    return [
        f"several in flight, {side.name}: P50 / P99 of gap - one step {gaps} ms, transfer"
        f" {transfers} ms, swap_in {swaps} ms ({len(side.crowded)} requests)"
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=12, help="measured requests per side")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each instance")
    parser.add_argument("--transfers", nargs="+", choices=TARGETS_MS, default=list(TARGETS_MS))
    parser.add_argument("--in-flight", type=int, default=8, help="then so many at a time")
    parser.add_argument("--rounds", type=int, default=4, help="of these; 0: none")
    args = parser.parse_args()
    if args.output_tokens < 4:
        parser.error("--output-tokens: at least 4, to know a decode step")

    # Room for all that are in flight, in float32.
    alike = {"host": "local", "threads": args.threads, "kv_cache": "640MiB"}
    decode = alike | {"cpu_buffer": "640MiB"}
    with tempfile.TemporaryDirectory(prefix="pdctl-bench-") as root, ExitStack() as stack:
        weights = os.environ.get("PDCTL_TEST_MODEL")
        path = Path(weights) if weights else models.resolve("smollm2-135m", Path()).path
        lab = Lab(Path(root), path)
        sides = [
            Side(
                f"pd-{kind}",
                stack.enter_context(
                    up(lab, f"pd-{kind}", prefill=[alike], decode=[decode | {"transfer": kind}])
                ),
            )
            for kind in args.transfers
        ]
        sides.append(Side("mixed", stack.enter_context(up(lab, "mixed", mixed=[alike]))))
        load = Load(
            args.requests, args.in_flight, args.rounds, args.prompt_tokens, args.output_tokens
        )
        asyncio.run(measure(sides, load))
        print(
            f"{args.requests} requests per side, one at a time; {args.prompt_tokens} prompt and "
            f"{args.output_tokens} output tokens; {args.threads} threads per instance"
        )
        print("\n".join(report(sides)))
        failed = [f"{s.name}: {why}" for s in sides for why in s.failures]
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)  # what was brought up goes down then, too
    try:
        sys.exit(main())
    except PdctlError as e:
        sys.exit(f"error: {e}" + (f"\nhint: {e.hint}" if e.hint else ""))

"""How fast blocks move between two processes of one host, beside limits and peers in the same run.

For each block size the same scattered blocks are moved by one thread's memcpy, our shm put, a plain
Python socket loop and our tcp put; and, where installed, by iperf3, Mooncake's and NIXL's engines
(docs/transfer.md says how). Rounds are interleaved, so that a busy machine hurts all alike. CPU
seconds are of both processes together. Prints medians, then the ratios that matter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
PEERS = HERE.parents[1] / "build" / "peers"
KIB, MIB = 1 << 10, 1 << 20
Cores = Sequence[int]
"""One for the sending and one for the receiving process; empty: wherever the kernel puts them."""
DEFAULT_MODEL_BLOCK = 16 * 46_080
"""16 tokens of SmolLM2-135M in float32, as on a CPU."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to move blocks: the argv of its ends, and which end knows when all has arrived."""

    name: str
    argv: tuple[str, ...]
    told_by: str
    settings: dict[str, int | str] = field(default_factory=dict)


@dataclass(slots=True)
class Times:
    """GB/s and CPU seconds per GB, one each per round."""

    speed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.speed)


def ours(name: str, kind: str, told_by: str, **settings: int) -> Kind:
    argv = (sys.executable, str(HERE / "movers.py"), kind)
    return Kind(name, argv, told_by, dict(settings))


def kinds(streams: int) -> list[Kind]:
    found = [
        ours("memcpy", "memcpy", "sender"),
        ours("shm", "shm", "sender"),
        ours("socket loop", "socket", "receiver"),
        ours("tcp", "tcp", "receiver"),
    ]
    if streams > 1:
        found.append(ours(f"tcp x{streams}", "tcp", "receiver", streams=streams))
    for name, venv, backend in (
        ("mooncake tcp", "mooncake", "tcp"),
        ("nixl ucx tcp", "nixl", "tcp"),
        ("nixl ucx", "nixl", "any"),
    ):
        python = PEERS / venv / "bin" / "python"
        if python.exists():
            argv = (str(python), str(HERE / f"{venv}_mover.py"), backend)
            found.append(Kind(name, argv, "sender"))
        else:
            print(f"{name}: not installed, not measured ({python})", file=sys.stderr)
    return found


class End:
    """A mover process."""

    def __init__(self, kind: Kind, role: str, settings: dict[str, Any]) -> None:
        argv = [*kind.argv, role, json.dumps(settings)]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = f"{kind.name} {role}"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def answer(self, key: str) -> Any:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        for line in out:
            # Engines print what they like; ours are the JSON objects.
            if line.startswith("{") and key in (said := json.loads(line)):
                return said[key]
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def cpu_s(self) -> float:
        # The kernel's clock of all its threads: /proc counts in ticks of 10 ms.
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def pin(self, core: int) -> None:
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def pair(kind: Kind, blocks: int, size: int, cores: Cores) -> Iterator[tuple[End, End]]:
    settings: dict[str, Any] = {"blocks": blocks, "size": size, **kind.settings}
    with ExitStack() as stack:
        receiver = End(kind, "receiver", settings)
        stack.callback(receiver.close)
        ready = receiver.answer("ready")
        sender = End(kind, "sender", {**settings, **ready})
        stack.callback(sender.close)
        sender.answer("ready")
        for end, core in zip((sender, receiver), cores, strict=False):
            end.pin(core)
        yield sender, receiver


def one_round(kind: Kind, sender: End, receiver: End) -> tuple[float, float, int]:
    """Seconds, CPU seconds, bytes."""
    teller = sender if kind.told_by == "sender" else receiver
    before = sender.cpu_s() + receiver.cpu_s()
    start = time.perf_counter()
    if teller is receiver:
        receiver.go()
    sender.go()
    moved = teller.answer("moved")
    seconds = time.perf_counter() - start
    if teller is receiver:
        sender.answer("moved")
    return seconds, sender.cpu_s() + receiver.cpu_s() - before, moved


def measure(
    found: Sequence[Kind], size: int, total: int, rounds: int, cores: Cores
) -> dict[str, Times]:
    times = {kind.name: Times() for kind in found}
    with ExitStack() as stack:
        ends = {}
        for kind in found:
            try:
                ends[kind.name] = stack.enter_context(pair(kind, total // size, size, cores))
            except RuntimeError as e:
                print(f"{e}: not measured", file=sys.stderr)
        for number in range(rounds + 1):
            for kind in found:
                if kind.name not in ends:
                    continue
                try:
                    seconds, cpu, moved = one_round(kind, *ends[kind.name])
                except RuntimeError as e:
                    print(f"{e}: left out", file=sys.stderr)
                    del ends[kind.name]
                    continue
                if number:  # the first warms up
                    times[kind.name].speed.append(moved / seconds / 1e9)
                    times[kind.name].cpu.append(cpu / (moved / 1e9))
    return {name: t for name, t in times.items() if t.speed}


def iperf3(rounds: int) -> Times:
    """The limit of one TCP connection over loopback, with 1 MiB buffers and no scattering."""
    times = Times()
    for _ in range(rounds):
        server = subprocess.Popen(
            ["iperf3", "-s", "-1", "-p", "5999", "-B", "127.0.0.1"], stdout=subprocess.DEVNULL
        )
        time.sleep(0.3)
        argv = ["iperf3", "-c", "127.0.0.1", "-p", "5999", "-l", "1M", "-n", "1G", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        server.wait(10)
        end = json.loads(done.stdout)["end"]
        received = end["sum_received"]
        times.speed.append(received["bits_per_second"] / 8e9)
        load = end["cpu_utilization_percent"]
        busy = (load["host_total"] + load["remote_total"]) / 100 * received["seconds"]
        times.cpu.append(busy / (received["bytes"] / 1e9))
    return times


def ratio(over: Times, under: Times) -> str:
    """Of each round's speeds, as both suffered the same machine; of CPU seconds likewise."""
    speed = statistics.median(a / b for a, b in zip(over.speed, under.speed, strict=False))
    cpu = statistics.median(over.cpu) / max(1e-9, statistics.median(under.cpu))
    return f"{speed:5.2f} x the speed at {cpu:4.2f} x the CPU seconds"


def report(size: int, times: dict[str, Times]) -> None:
    print(f"\n{size / KIB:g} KiB blocks")
    for name, t in times.items():
        print(f"  {name:<14}{t.median:7.2f} GB/s{statistics.median(t.cpu):8.3f} CPU s/GB")
    limits = {"shm": ("memcpy", "nixl ucx"), "tcp": ("socket loop", "mooncake tcp", "nixl ucx tcp")}
    for name, others in limits.items():
        for other in others:
            if name in times and other in times:
                print(f"  {name} is {ratio(times[name], times[other])} of {other}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = (64 * KIB, 256 * KIB, DEFAULT_MODEL_BLOCK, MIB)
    parser.add_argument("--block-bytes", type=int, nargs="+", default=sizes)
    parser.add_argument("--total-mib", type=int, default=256, help="moved in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=1, help="measure tcp with so many, too")
    pin = "a core for each end: steadier; leave it out to compare with engines of many threads"
    parser.add_argument("--pin", action="store_true", help=pin)
    parser.add_argument("--only", nargs="+", help="names of the kinds to measure")
    args = parser.parse_args()
    found = [k for k in kinds(args.streams) if not args.only or k.name in args.only]
    cores = sorted(os.sched_getaffinity(0))[:2] if args.pin else ()
    print(f"{args.total_mib} MiB scattered, two processes, medians of {args.rounds} rounds")
    for size in args.block_bytes:
        report(size, measure(found, size, args.total_mib * MIB, args.rounds, cores))
    if args.only and "iperf3" not in args.only:
        return
    if shutil.which("iperf3"):
        limit = iperf3(3)
        cpu = statistics.median(limit.cpu)
        print(f"\niperf3, 1 MiB buffers: {limit.median:.2f} GB/s, {cpu:.3f} CPU s/GB")
    else:
        print("iperf3: not installed, not measured", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Real processes under random faults, with a checker on every token and every ledger.

One decode and two prefill cores (one over shared memory, one over TCP) serve a tiny model; requests
are cancelled or time out, prefill processes are killed, restarted or stopped for longer than any
deadline, and their networks are cut. Whatever happens, the tokens of a request are a prefix of what
one engine alone generates; afterwards everything serves again and nothing is held. The schedule
follows from the seed; what the machine makes of it does not.

    python tests/soak.py --seconds 300              faults
    python tests/soak.py --handovers 10000          no faults but cancels; memory of each process
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from cores import Answer, Core, Cores, running_cores
from free_ports import free_port
from tiny_llama import write_tiny_llama
from wire import Wire

from runtime.config import Address, ModelConfig, WorkerConfig
from runtime.engine.contract import EngineEvent, EngineFailed, EngineRequest, Produced
from runtime.engine.core import Engine
from runtime.protocol import Abort, Failed, Generate, RequestId, SamplingParams, Tokens

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16
OUTPUT = 40
RECOVERY_S = 60.0
COLLECTING = Path(__file__).parent / "collecting_core.py"
LEAST_LEAK = 200
"""Bytes that a request has to add to a process's memory, on average, to count as a leak. Less than
that is the allocator's, whose heaps grow ever more slowly. A request that was kept would add
thousands."""
FAULT_STATUS = {502, 503, 504}


@dataclass(frozen=True)
class Settings:
    seed: int = 1
    seconds: float = 8.0
    handovers: int | None = None
    """End after this many requests instead."""
    faults: bool = True
    longest_stop_s: float = 7.0
    """Longer than decode's patience with a silent peer and shorter than prefill's; a deadline is
    half of it."""
    concurrency: int = 8
    kv_blocks: int = 32
    buffer_blocks: int = 24


@dataclass
class Tally:
    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counters: dict[str, float] = field(default_factory=dict)


def make_prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """Chats: each prompt of a family begins with the one before it."""
    prompts = []
    for _ in range(6):
        stem: tuple[int, ...] = ()
        for _ in range(4):
            stem += tuple(rng.randrange(3, 96) for _ in range(rng.randrange(1, 70)))
            prompts.append(stem)
    return prompts


def reference(model: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """What one engine generates, one request at a time."""
    config = WorkerConfig(
        deployment="soak",
        name="alone",
        role="mixed",
        token_file="",
        listen=Address("127.0.0.1", 1),
        advertise="127.0.0.1",
        model=ModelConfig(str(model), "tiny"),
        kv_cache_bytes=64 * BLOCK_BYTES,
        threads=1,
        prefix_cache=False,
        shm_prefix="unused",
    )
    outputs: dict[RequestId, list[int]] = {}
    done = threading.Semaphore(0)

    def emit(event: EngineEvent) -> None:
        assert not isinstance(event, EngineFailed), event
        if isinstance(event, Produced):
            outputs.setdefault(event.id, []).extend(t.token for t in event.tokens)
            if event.finish:
                done.release()

    engine = Engine(config, emit)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(EngineRequest(RequestId(str(number)), prompt, params, "generate"))
        assert done.acquire(timeout=60)
    engine.stop()
    thread.join()
    return [outputs[RequestId(str(number))] for number in range(len(prompts))]


class Soak:
    def __init__(self, cores: Cores, model: Path, settings: Settings) -> None:
        self.settings = settings
        self.rng = random.Random(settings.seed)
        self.prompts = make_prompts(self.rng)
        self.expected = reference(model, self.prompts)
        self.cores = cores
        self.model = model
        self.tally = Tally()
        self.configs: dict[str, Path] = {}
        self.running: dict[str, Core] = {}
        self.wires: dict[str, Wire] = {}
        self.recovering: set[str] = set()

    # ---- the deployment -------------------------------------------------------------------------

    async def start(self) -> None:
        peers = []
        for name, transfer in (("prefill-0", "auto"), ("prefill-1", "tcp")):
            address = {"host": "127.0.0.1", "port": free_port()}
            self.wires[name] = Wire(address["port"])
            await self.wires[name].start()
            peers.append(
                {"name": name, "address": {"host": "127.0.0.1", "port": self.wires[name].port}}
            )
            self.configs[name] = self.cores.config(
                name,
                "prefill",
                str(self.model),
                peer=address,
                transfer=transfer,
                kv_cache_bytes=64 * BLOCK_BYTES,
                max_num_batched_tokens=64,
            )
        self.configs["decode-0"] = self.cores.config(
            "decode-0",
            "decode",
            str(self.model),
            kv_cache_bytes=self.settings.kv_blocks * BLOCK_BYTES,
            cpu_buffer_bytes=self.settings.buffer_blocks * BLOCK_BYTES,
            prefill_peers=peers,
        )
        script = COLLECTING if self.settings.handovers is not None else None
        started = await asyncio.gather(
            *(self.cores.start(config, script=script) for config in self.configs.values())
        )
        self.running = dict(zip(self.configs, started, strict=True))
        await self.linked()

    @property
    def deadline_s(self) -> float:
        return self.settings.longest_stop_s / 2 if self.settings.faults else RECOVERY_S

    @property
    def decode(self) -> Core:
        return self.running["decode-0"]

    async def linked(self) -> None:
        for name in self.wires:
            await self.decode.until(
                lambda name=name: name in self.decode.peers and self.decode.peers[name].path,  # type: ignore[misc]
                RECOVERY_S,
            )

    # ---- requests -------------------------------------------------------------------------------

    async def client(self, rng: random.Random, more: Callable[[], bool]) -> None:
        while more():
            self.tally.requests += 1
            await self.one(rng)

    async def one(self, rng: random.Random) -> None:
        decode, number = self.decode, rng.randrange(len(self.prompts))
        tokens = rng.randrange(1, OUTPUT + 1)
        short = self.settings.faults and rng.random() < 0.1
        request = Generate(
            id=RequestId(f"{rng.getrandbits(64):016x}"),
            prompt=self.prompts[number],
            params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            prefill=rng.choice([None, *self.wires]),
            deadline_s=rng.uniform(0.02, 0.5) if short else self.deadline_s,
        )
        answer = decode.answers[request.id] = Answer()
        decode.link.send(request)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() ** 3 * 0.3)
            decode.link.send(Abort(request.id))
        await decode.wait(request.id, RECOVERY_S)
        del decode.answers[request.id]
        self.check(answer, self.expected[number][:tokens])
        if isinstance(answer.last, Failed):
            await asyncio.sleep(0.05)  # as a client that backs off

    def check(self, answer: Answer, expected: list[int]) -> None:
        assert answer.tokens == expected[: len(answer.tokens)], (answer, expected)
        if isinstance(answer.last, Failed):
            assert self.settings.faults, answer.last
            assert answer.last.status in FAULT_STATUS, answer.last
            self.tally.failed[answer.last.status] += 1
            return
        assert isinstance(answer.last, Tokens)
        if answer.last.finish == "abort":
            self.tally.cancelled += 1
        else:
            assert (answer.tokens, answer.last.finish) == (expected, "length")
            self.tally.completed += 1

    # ---- faults ---------------------------------------------------------------------------------

    async def trouble(self, rng: random.Random, more: Callable[[], bool]) -> None:
        """One fault after the other, on either prefill instance; the last one is seen through."""
        kinds = [self.kill, self.pause, self.cut]
        while more():
            await asyncio.sleep(rng.random() * 1.5)
            name, kind = rng.choice(list(self.wires)), rng.choice(kinds)
            if name in self.recovering:
                continue
            self.recovering.add(name)
            self.tally.faults[kind.__name__] += 1
            # Often over before anybody notices, sometimes longer than all patience.
            seconds = rng.choice([0.05, 0.5, 2.0, self.settings.longest_stop_s])
            try:
                await kind(name, seconds)
            finally:
                self.recovering.discard(name)

    async def kill(self, name: str, seconds: float) -> None:
        self.running[name].process.kill()
        await self.running[name].process.wait()
        await asyncio.sleep(min(seconds, 1.0))
        self.running[name] = await self.cores.start(self.configs[name])

    async def pause(self, name: str, seconds: float) -> None:
        process = self.running[name].process
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)

    async def cut(self, name: str, seconds: float) -> None:
        self.wires[name].cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.wires[name].mend()

    # ---- the run --------------------------------------------------------------------------------

    async def run(self) -> None:
        seed, settings = self.settings.seed, self.settings
        end = time.monotonic() + settings.seconds

        def more() -> bool:
            if settings.handovers is not None:
                return self.tally.requests < settings.handovers
            return time.monotonic() < end

        troubles = [
            asyncio.create_task(self.trouble(random.Random(f"{seed} trouble {n}"), more))
            for n in range(2 if settings.faults else 0)
        ]
        try:
            async with asyncio.TaskGroup() as clients:
                for n in range(settings.concurrency):
                    clients.create_task(self.client(random.Random(f"{seed} client {n}"), more))
        finally:
            await asyncio.gather(*troubles)
        await self.recovered()

    async def recovered(self) -> None:
        """Everything serves again, and nothing is held for what is over."""
        await self.linked()
        for core in self.running.values():
            await core.idle(RECOVERY_S)
        for name in self.wires:
            answer = await self.decode.ask(
                self.prompts[-1], max_tokens=OUTPUT, ignore_eos=True, prefill=name
            )
            assert answer.tokens == self.expected[-1], name
        for core in self.running.values():
            await core.idle(RECOVERY_S)
        self.tally.counters = (await self.decode.stats()).counters

    async def close(self) -> None:
        for wire in self.wires.values():
            await wire.close()


@contextlib.asynccontextmanager
async def soaking(folder: Path, settings: Settings) -> AsyncIterator[Soak]:
    model = folder / "model"
    model.mkdir()
    write_tiny_llama(model)
    async with running_cores(folder) as cores:
        soak = Soak(cores, model, settings)
        try:
            await soak.start()
            yield soak
        finally:
            await soak.close()
    assert cores.segments() == []


async def soak(folder: Path, settings: Settings) -> Tally:
    async with soaking(folder, settings) as made:
        await made.run()
        return made.tally


# ---- memory --------------------------------------------------------------------------------------


def memory_kib(pid: int) -> int:
    """Private memory of a process: without the shared segment, whose pages are touched in turn."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise LookupError(f"process {pid} shows no RssAnon")


async def memory(folder: Path, settings: Settings, looks: int = 5) -> Tally:
    """Hand-overs with random cancels; each process's memory at even distances, and by how much it
    grew in the second half. Raises AssertionError where that is a leak.
    """
    async with soaking(folder, settings) as made:
        total = settings.handovers
        assert total is not None
        seen: list[tuple[int, dict[str, int]]] = []

        async def watch() -> None:
            for number in range(1, looks):
                while made.tally.requests < total * number // looks:
                    await asyncio.sleep(0.05)
                look()

        def look() -> None:
            now = {name: memory_kib(core.process.pid) for name, core in made.running.items()}
            seen.append((made.tally.requests, now))

        watcher = asyncio.create_task(watch())
        began = time.monotonic()
        await made.run()
        await watcher
        look()
        print(f"{total} requests, {total / (time.monotonic() - began):.0f} a second")
        print("private KiB after " + ", ".join(str(at) for at, _ in seen))
        middle, last = seen[len(seen) // 2], seen[-1]
        leaks = {}
        for name in made.running:
            sizes = [now[name] for _, now in seen]
            grown = (last[1][name] - middle[1][name]) * 1024 / (last[0] - middle[0])
            print(f"{name:<10} {', '.join(map(str, sizes))}: {grown:+.0f} bytes a request at last")
            if grown >= LEAST_LEAK:
                leaks[name] = grown
        assert not leaks, f"bytes that each request left: {leaks}"
        return made.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--handovers", type=int, help="only cancels, and memory is measured")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    settings = Settings(
        seed=args.seed,
        seconds=args.seconds,
        handovers=args.handovers,
        faults=args.handovers is None,
    )
    with tempfile.TemporaryDirectory(prefix="pdctl-soak-") as folder:
        run: Awaitable[Tally]
        if args.handovers is None:
            run = soak(Path(folder), settings)
        else:
            run = memory(Path(folder), settings)
        tally = asyncio.run(run)  # type: ignore[arg-type]
    print(f"{tally.requests} requests: {tally.completed} right to the last token, ", end="")
    print(f"{tally.cancelled} cancelled, failed {dict(tally.failed)}; faults {dict(tally.faults)}")
    shown = ("transfers", "cached_tokens", "preemptions", "swap_outs", "swap_backs")
    print("decode:", {name: int(tally.counters.get(name, 0)) for name in shown})
    print("every ledger reads zero")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""When requests are sent: open loop (Poisson or gamma arrivals) or as fast as a limit allows.

Open-loop arrivals are drawn before the run and do not wait for answers, so a slow server cannot
slow down the questions. How late this process was itself is part of the result.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from pdctl.bench.client import Target, request
from pdctl.bench.dataset import Prompt
from pdctl.bench.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Load:
    rate: float = math.inf
    """Requests per second; inf: all at once, as far as `max_concurrency` lets them."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier."""
    max_concurrency: int | None = None
    ignore_eos: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What happened. `outcomes` are in order of completion."""

    outcomes: tuple[Outcome, ...]
    duration_s: float
    attempted: int
    """Requests sent, interrupted ones included."""
    asked: int
    client_cpu_s: float
    """CPU time of this process during the run."""
    stopped: bool = False
    """Ended early, by `stop`."""

    @property
    def interrupted(self) -> int:
        """Requests sent whose answer was not waited for."""
        return self.attempted - len(self.outcomes)


def arrivals(count: int, load: Load) -> list[float]:
    """When to send each request, in seconds since the start; the first at 0."""
    if math.isinf(load.rate):
        return [0.0] * count
    rng = random.Random(f"arrivals/{load.seed}")
    scale = 1.0 / (load.rate * load.burstiness)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.gammavariate(load.burstiness, scale))
    return times[:count]


async def run(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    load: Load,
    *,
    on_done: Callable[[Outcome], None],
    stop: asyncio.Event,
) -> Run:
    """Send every prompt once and collect the outcomes. `stop` ends it early; done is done."""
    schedule = arrivals(len(prompts), load)
    slots = asyncio.Semaphore(load.max_concurrency or len(prompts))
    outcomes: list[Outcome] = []
    tasks: list[asyncio.Task[None]] = []
    cpu, origin = time.process_time(), time.perf_counter()

    async def one(index: int) -> None:
        try:
            outcome = await request(
                session,
                target,
                prompts[index],
                index=index,
                scheduled_s=schedule[index],
                origin=origin,
                ignore_eos=load.ignore_eos,
            )
            outcomes.append(outcome)
            on_done(outcome)
        finally:
            slots.release()

    async def send_all() -> None:
        for index, when in enumerate(schedule):
            await asyncio.sleep(max(0.0, origin + when - time.perf_counter()))
            await slots.acquire()
            tasks.append(asyncio.create_task(one(index)))
        await asyncio.gather(*tasks)

    sending = asyncio.create_task(send_all())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
    ended = time.perf_counter()
    for task in (sending, stopping, *tasks):
        task.cancel()
    results = await asyncio.gather(sending, *tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):  # our bug: a request's own failures are outcomes
            raise result
    return Run(
        outcomes=tuple(outcomes),
        duration_s=ended - origin,
        attempted=len(tasks),
        asked=len(prompts),
        client_cpu_s=time.process_time() - cpu,
        stopped=stop.is_set(),
    )

"""Proves that the router can reach an instance: before its first request, after a lost connection.

A heartbeat shows that an instance lives; only an answer at its URL shows that it can be asked.
"""

from __future__ import annotations

import asyncio

import aiohttp

from runtime.reasons import reason
from runtime.router.instances import Instance
from runtime.router.registry import Registry

PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 2.0


class Prober:
    """One task per unreachable instance, until it answers, is replaced, or its heartbeats stop."""

    def __init__(self, registry: Registry, session: aiohttp.ClientSession) -> None:
        self._registry = registry
        self._session = session
        self._tasks: dict[Instance, asyncio.Task[None]] = {}

    def watch(self, instance: Instance) -> None:
        """Start probing unless the instance is reachable or being probed."""
        if instance.reachable or instance in self._tasks:
            return
        task = asyncio.create_task(self._until_reached(instance))
        self._tasks[instance] = task
        task.add_done_callback(lambda _: self._tasks.pop(instance, None))

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _until_reached(self, instance: Instance) -> None:
        pause = FIRST_PAUSE_S
        while self._registry.current(instance):
            why = await self._probe(instance.info.url)
            if not why:
                self._registry.reached(instance)
                return
            instance.why_unreachable = why
            await asyncio.sleep(pause)
            pause = min(pause * 2.0, MAX_PAUSE_S)

    async def _probe(self, url: str) -> str:
        """Empty when /health answered 200, else what is wrong."""
        try:
            async with self._session.get(f"{url}/health", timeout=PROBE_TIMEOUT) as response:
                if response.status == 200:
                    return ""
                return f"/health answered {response.status}"
        except TimeoutError:
            return f"/health did not answer within {PROBE_TIMEOUT.total:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as e:
            return f"/health failed: {reason(e)}"

"""The thread that the engine is built, tested and run on, as the asyncio thread sees it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from runtime.config import WorkerConfig
from runtime.engine.contract import EngineEvent
from runtime.engine.core import Engine
from runtime.engine.ranks import RankLinks
from runtime.engine.segment import Segment
from runtime.errors import RuntimeFailure
from runtime.transfer.mailbox import Mailbox

_log = logging.getLogger(__name__)

T = TypeVar("T")

_NAME = "engine"


@dataclass(frozen=True, slots=True)
class Tested:
    """An engine that has loaded and generated a token."""

    engine: Engine
    load_s: float
    self_test_s: float


class EngineThread:
    """Builds the engine, tests it and runs it, all on one thread; reports on the asyncio thread."""

    def __init__(
        self,
        config: WorkerConfig,
        mailbox: Mailbox,
        emit: Callable[[EngineEvent], None],
        ranks: RankLinks | None,
        segment: Segment,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._config = config
        self._mailbox = mailbox
        self._emit = emit
        self._ranks = ranks
        self._segment = segment
        self._engine: Engine | None = None
        self.loaded: asyncio.Future[Tested] = loop.create_future()
        self.ended: asyncio.Future[Exception | None] = loop.create_future()
        self._thread = threading.Thread(target=self._main, name=_NAME, daemon=True)
        self._thread.start()

    async def stop(self, timeout: float) -> None:
        """Wait for the step under way; a thread that still loads ends with the process."""
        if self._engine is None:
            return
        self._engine.stop()
        await asyncio.wait([self.ended], timeout=timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.ended.done()

    def failure(self) -> Exception | None:
        """Why it ended, if it did and not because it was told to."""
        return self.ended.result() if self.ended.done() else None

    def _main(self) -> None:
        try:
            loaded = self._load()
            self._engine = loaded.engine
            self._mailbox.post(lambda: _resolve(self.loaded, loaded))
            loaded.engine.run()
        except RuntimeFailure as e:
            failure: Exception | None = e
        except Exception as e:
            # Top of the engine thread: the process ends, and says why.
            _log.exception("the engine failed")
            failure = e
        else:
            failure = None
        self._mailbox.post(lambda: _resolve(self.ended, failure))

    def _load(self) -> Tested:
        start = time.monotonic()
        engine = Engine(self._config, self._emit, self._ranks, self._segment.make)
        built = time.monotonic()
        engine.self_test()
        return Tested(engine, built - start, time.monotonic() - built)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def engine_runs() -> bool:
    """A thread of this process is still loading, or in a step that does not end."""
    return any(thread.name == _NAME for thread in threading.enumerate())

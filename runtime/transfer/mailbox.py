"""Calls from other threads, run on the asyncio thread in order.

One wake-up of the loop serves however many calls came before it ran: an engine step that ends with
64 events costs one write to the loop's self-pipe, not 64.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Mailbox:
    """`post` from any thread; never blocks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            # The loop is closed: the process is past caring about copies and tokens.
            _log.debug("a call came after the loop had closed")

    def _drain(self) -> None:
        # Cleared first: a call appended from here on either is seen below or wakes the loop again.
        self._woken = False
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:
                # Boundary of one posted event: the others must still be delivered; the request that
                # this one belonged to ends by its deadline.
                _log.exception("an event could not be handled")

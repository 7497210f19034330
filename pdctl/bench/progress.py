"""How far the run is, on stderr: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pdctl.bench.outcome import Outcome

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_PLAIN_EVERY_S = 5.0
_BAR_EVERY_S = 0.2


class Progress:
    """Context manager; `done` is called per outcome and is all that draws: no extra thread."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._failed = 0
        self._started = time.monotonic()
        self._next = 0.0
        self._bar = _bar() if sys.stderr.isatty() else None
        self._task = self._bar.add_task("bench", total=total, failed=0) if self._bar else None

    def __enter__(self) -> Self:
        self._next = time.monotonic() + (_BAR_EVERY_S if self._bar else _PLAIN_EVERY_S)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()

    def done(self, outcome: Outcome) -> None:
        self._done += 1
        self._failed += outcome.failure is not None
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (_BAR_EVERY_S if self._bar else _PLAIN_EVERY_S)
            self._show()

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, failed=self._failed)
            self._bar.refresh()
            return
        seconds = time.monotonic() - self._started
        text = f"{self._done} of {self._total} done, {self._failed} failed, {seconds:.0f} s"
        print(text, file=sys.stderr, flush=True)


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
    )

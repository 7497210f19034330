"""How things look on a terminal and off one: symbols, colour, tables, errors, progress lines.

stdout carries results only; progress, warnings and errors go to stderr. Off a terminal, and with
NO_COLOR or TERM=dumb, everything is plain lines. Knows nothing of what the words mean.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from pdctl.errors import PdctlError, TopologyError
from pdctl.events import Event

Hue = Literal["cyan", "magenta", "blue", "yellow", "green"]
Style = Literal["", "good", "bad", "warn", "dim", "bold"] | Hue
HUES: tuple[Hue, ...] = ("cyan", "magenta", "blue", "yellow", "green")
"""To tell things apart; they mean nothing."""
_COLORS: dict[Style, str] = {
    "good": "32",
    "bad": "31",
    "warn": "33",
    "dim": "2",
    "bold": "1",
    "cyan": "36",
    "magenta": "35",
    "blue": "34",
    "yellow": "33",
    "green": "32",
}
_GAP = "  "
_SPINNER_S = 0.2


@dataclass(frozen=True, slots=True)
class Screen:
    """What a stream can show. `width` is None when lines may be as long as they like."""

    live: bool
    """A terminal on which a line can be rewritten."""
    color: bool
    unicode: bool
    width: int | None

    @staticmethod
    def of(stream: TextIO) -> Screen:
        terminal = stream.isatty()
        dumb = os.environ.get("TERM", "") in ("dumb", "")
        encoding = (getattr(stream, "encoding", None) or "ascii").lower()
        return Screen(
            live=terminal and not dumb,
            color=terminal and not dumb and not os.environ.get("NO_COLOR"),
            unicode=encoding.replace("-", "") in ("utf8", "utf16", "utf32"),
            width=shutil.get_terminal_size().columns if terminal else None,
        )

    def paint(self, text: str, style: Style) -> str:
        code = _COLORS.get(style)
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and code and text else text

    def symbol(self, name: str) -> str:
        return SYMBOLS[name][0 if self.unicode else 1]


SYMBOLS = {
    "ok": ("✔", "+"),
    "failed": ("✗", "x"),
    "waiting": ("…", "."),
    "same": ("=", "="),
    "begin": (">", ">"),
    "end": ("-", "-"),
    "note": ("!", "!"),
    "log": ("│", "|"),
}
"""Beside a word, never instead of one."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    style: Style = ""


Row = Sequence[Cell | str]


def table(header: Sequence[str], rows: Sequence[Row], screen: Screen) -> str:
    """Aligned columns. A line is never wrapped: too narrow a screen loses columns on the right, and
    a last line names them.
    """
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    cells.insert(0, [Cell(title, "bold") for title in header])
    widths = [max(len(row[i].text) for row in cells) for i in range(len(header))]
    while screen.width and len(widths) > 1 and _total(widths) > screen.width:
        widths.pop()
    lines = [_line(row, widths, screen) for row in cells]
    if lost := header[len(widths) :]:
        note = f"(too narrow for {', '.join(lost)})"
        lines.append(screen.paint(note[: screen.width], "dim"))
    return "\n".join(lines)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _line(row: Sequence[Cell], widths: Sequence[int], screen: Screen) -> str:
    parts = []
    for i, (cell, width) in enumerate(zip(row, widths, strict=False)):
        text = cell.text[: screen.width] if screen.width else cell.text
        padding = " " * (width - len(text)) if i < len(widths) - 1 else ""
        parts.append(screen.paint(text, cell.style) + padding)
    return _GAP.join(parts).rstrip()


def json_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False)


def json_line(document: dict[str, Any]) -> str:
    """For streams of documents: one a line."""
    return json.dumps(document, ensure_ascii=False)


def error_document(error: PdctlError) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": "pdctl.error/1",
        "error": str(error),
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    if isinstance(error, TopologyError):
        document["problems"] = [
            {"file": p.file, "line": p.line, "field": p.field, "what": p.what, "right": p.right}
            for p in error.problems
        ]
    return document


def print_error(error: PdctlError, stream: TextIO) -> None:
    """One line for each thing that is wrong, and one for what to do."""
    screen = Screen.of(stream)
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"{screen.paint('error:', 'bad')} {line}", file=stream)
    if error.hint:
        print(f"{screen.paint('hint:', 'warn')} {error.hint}", file=stream)


def print_warning(text: str, stream: TextIO) -> None:
    print(f"{Screen.of(stream).paint('warning:', 'warn')} {text}", file=stream)


def duration(seconds: float) -> str:
    """8.3s, 4m10s, 3h05m, 2d04h"""
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


# ---- progress ------------------------------------------------------------------------------------

_SHOWN: dict[str, tuple[str, Style, str]] = {
    "keep": ("same", "dim", ""),
    "start": ("begin", "", "starting"),
    "wait": ("waiting", "dim", "waiting"),
    "ready": ("ok", "good", "ready"),
    "fail": ("failed", "bad", "failed"),
    "stop": ("end", "", "stopping"),
    "stopped": ("ok", "good", "stopped"),
}


def _ageless(text: str) -> str:
    """What stays while only an age changes."""
    return re.sub(r"\d+(\.\d+)? s\b", "", text)


class Progress:
    """Shows events as they come: a line per change, and on a terminal one line that lives.

    A phase that is long without a word is named, as `Patience` does. Use as a context manager: what
    is left of the living line goes at the end. Thread-safe.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._screen = Screen.of(self._stream)
        self._waiting: dict[str, Event] = {}
        self._live = ""
        self._drawn_at = 0.0
        self._turn = threading.Lock()
        self._phase = ""
        self._heard_at = 0.0
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._ticker.join()
        self._rewrite("")

    def __call__(self, event: Event) -> None:
        with self._turn:
            self._heard_at = time.monotonic()
            if event.kind == "phase":
                self._phase = event.text
                self._rewrite("")
            elif event.kind == "wait":
                self._wait(event)
            else:
                self._waiting.pop(event.service, None)
                self._print(self._text(event))

    def _tick(self) -> None:
        while not self._over.wait(_SPINNER_S):
            with self._turn:
                self._still(time.monotonic() - self._heard_at)

    def _still(self, seconds: float) -> None:
        """Off a terminal a phase is named once."""
        if not self._phase or self._waiting:
            return
        mark = self._screen.symbol("waiting")
        if self._screen.live and seconds > Patience.AFTER_S:
            self._rewrite(f"{mark} {duration(seconds)}  {self._phase}")
        elif not self._screen.live and seconds > Patience.AFTER_PLAIN_S:
            self._print(f"{mark} {self._phase}")
            self._phase = ""

    def _wait(self, event: Event) -> None:
        before = self._waiting.get(event.service)
        self._waiting[event.service] = event
        if not self._screen.live:
            if before is None or _ageless(before.text) != _ageless(event.text):
                self._print(self._text(event))
        elif time.monotonic() - self._drawn_at > _SPINNER_S:
            self._drawn_at = time.monotonic()
            waits = [f"{e.service}: {e.text}" for e in self._waiting.values()]
            seconds = duration(max(e.seconds or 0.0 for e in self._waiting.values()))
            self._rewrite(f"{self._screen.symbol('waiting')} {seconds}  {', '.join(waits)}")

    def _text(self, event: Event) -> str:
        screen = self._screen
        if event.kind == "log":
            return screen.paint(f"    {screen.symbol('log')} {event.text}", "dim")
        if event.kind not in _SHOWN:
            mark = screen.paint(screen.symbol("note"), "warn")
            return f"{mark} {event.text}"
        name, style, word = _SHOWN[event.kind]
        since = duration(event.seconds) if event.seconds is not None else ""
        text = f"(was {event.text})" if event.kind == "stopped" else event.text
        parts = [f"{event.host:<8}", f"{event.service:<10}", f"{word:<8}" if word else ""]
        detail = "  ".join(p for p in (*parts, since, text) if p)
        return f"{screen.paint(screen.symbol(name), style)} {detail}"

    def _print(self, text: str) -> None:
        self._rewrite("")
        print(text, file=self._stream, flush=True)
        self._drawn_at = 0.0  # the living line comes back with the next event

    def _rewrite(self, text: str) -> None:
        if not self._screen.live or (not text and not self._live):
            return
        self._live = text[: (self._screen.width or 80) - 1]
        self._stream.write(f"\r\x1b[K{self._live}")
        self._stream.flush()


class Patience:
    """Says what is waited for, as soon as it takes longer than `AFTER_S`; gone when it ends.

    On a terminal a line that counts the seconds; elsewhere one plain line, later.
    """

    AFTER_S = 1.0
    AFTER_PLAIN_S = 5.0

    def __init__(self, what: str, stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = stream if stream is not None else sys.stderr
        self._screen = Screen.of(self._stream)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _wait(self) -> None:
        begun = time.monotonic()
        live = self._screen.live
        if self._over.wait(self.AFTER_S if live else self.AFTER_PLAIN_S):
            return
        mark = self._screen.symbol("waiting")
        if not live:
            print(f"{mark} {self._what}", file=self._stream, flush=True)
            return
        while True:
            text = f"{mark} {duration(time.monotonic() - begun)}  {self._what}"
            self._stream.write(f"\r\x1b[K{text[: (self._screen.width or 80) - 1]}")
            self._stream.flush()
            if self._over.wait(_SPINNER_S):
                break
        self._stream.write("\r\x1b[K")
        self._stream.flush()


def repaint(text: str, *, first: bool) -> str:
    """What draws `text` over what is on the terminal, without clearing it before: no flicker.

    Lines that do not fit the screen are left out: it must not scroll.
    """
    lines = text.splitlines()[: shutil.get_terminal_size().lines - 1]
    begin = "\x1b[2J\x1b[H" if first else "\x1b[H"
    return begin + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"

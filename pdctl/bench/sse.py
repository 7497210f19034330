"""Server-sent events out of a byte stream, however the network cut it.

Follows the WHATWG rules for what matters here: LF, CR and CRLF line ends, comments, several `data:`
lines per event, a byte order mark. An event that its blank line never ended is not an event.
"""

from __future__ import annotations

from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    """`message` unless the stream said otherwise."""
    data: str


class Parser:
    """Feed bytes as they come; whole events come back. The same bytes give the same events."""

    def __init__(self) -> None:
        self._rest = b""
        self._started = False
        self._skip_lf = False
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Event]:
        data = self._rest + chunk
        if not self._started:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data  # not enough to tell a byte order mark from text
                return []
            self._started = True
            data = data.removeprefix(_BOM)
        lines, self._rest = self._split(data)
        return [event for line in lines if (event := self._take(line)) is not None]

    def _split(self, data: bytes) -> tuple[list[bytes], bytes]:
        # A CR ends its line at once; an LF after it, perhaps in the next chunk, is then dropped.
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        if data.endswith(b"\r"):
            self._skip_lf = True
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return lines[:-1], lines[-1]

    def _take(self, line: bytes) -> Event | None:
        if not line:
            name, data = self._name or "message", self._data
            self._name, self._data = "", []
            return Event(name, "\n".join(data)) if data else None
        field, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

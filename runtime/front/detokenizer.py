"""Turns a request's output tokens into text as they come, and finds stop strings in it.

Owns three promises: no partial character is ever emitted, nothing of a stop string is ever emitted,
and the text does not depend on how it was cut into tokens. Knows nothing of HTTP or sampling.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """One choice of one request. `stopped`: a stop string was seen, nothing more comes."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain. Special tokens are silent."""
        if token in self._vocabulary.special_ids:
            return ""
        return self._advance(self._utf8.decode(self._vocabulary.token_bytes(token)))

    def finish(self) -> str:
        """What was held back, now that nothing follows; an unfinished character becomes U+FFFD."""
        text = self._advance(self._utf8.decode(b"", True))
        if not self.stopped:
            text += self._held
        self._held = ""
        return text

    def _advance(self, new: str) -> str:
        if self.stopped or not new:
            return ""
        if not self._stop:
            return new
        text = self._held + new
        cut = _first_stop(text, self._stop)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return text[:cut]
        keep = _pending(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where to cut: before the stop string that ends first, whatever chunks the text came in."""
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(found)[1] if found else None


def _pending(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that could be the beginning of a stop string."""
    longest = 0
    for s in stop:
        for size in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:size]):
                longest = size
                break
    return longest

"""The JSON of answers: chunks and whole bodies, usage, log probabilities.

Owns the shapes. Knows no sockets and no engine; `completions` drives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from runtime.front.detokenizer import Detokenizer
from runtime.front.tokenizer import Tokenizer
from runtime.protocol import OutputToken, Served, TokenLogprob

Json = dict[str, object]

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class Choice:
    """One output sequence as it grows."""

    index: int
    prompt_index: int
    prompt_tokens: int
    detokenizer: Detokenizer
    tokens: list[OutputToken] = field(default_factory=list)
    text: str = ""
    cut: bool = False
    """A stop string ended its text; the core's last word on it has not come yet."""
    finish: Literal["stop", "length"] | None = None
    served: Served | None = None
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    last_at: float = 0.0
    """When its latest tokens came; 0: none have."""
    announced: bool = False
    """Its first chunk has been sent."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one burst of tokens adds to a choice."""

    choice: Choice
    text: str
    tokens: Sequence[OutputToken]
    offset: int
    """Length of the choice's text before this piece."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str


class Format(Protocol):
    """How one endpoint spells its answers."""

    def chunk(self, piece: Piece) -> Json:
        """The choice object of one SSE chunk."""

    def whole(self, choice: Choice) -> Json:
        """The choice object of a complete body."""

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json: ...


class ChatFormat:
    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool, ids: bool) -> None:
        self._head, self._tokenizer = head, tokenizer
        self._logprobs, self._ids = logprobs, ids

    def chunk(self, piece: Piece) -> Json:
        delta: Json = {"content": piece.text}
        if not piece.choice.announced:
            delta = {"role": "assistant", **delta}
        choice: Json = {
            "index": piece.choice.index,
            "delta": delta,
            "logprobs": self._content(piece.tokens),
            "finish_reason": piece.choice.finish,
        }
        return choice | _ids(piece.tokens, self._ids)

    def whole(self, choice: Choice) -> Json:
        body: Json = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._content(choice.tokens),
            "finish_reason": choice.finish,
        }
        return body | _ids(choice.tokens, self._ids)

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        kind = "chat.completion.chunk" if chunk else "chat.completion"
        return _envelope(self._head, kind, choices)

    def _content(self, tokens: Iterable[OutputToken]) -> Json | None:
        if not self._logprobs:
            return None
        content = []
        for token in tokens:
            lp = token.logprob or TokenLogprob(token.token, _FLOOR)
            top = [self._entry(id_, value) for id_, value in lp.top]
            content.append(self._entry(token.token, lp.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": max(logprob, _FLOOR),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionFormat:
    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: bool, ids: bool) -> None:
        self._head, self._tokenizer = head, tokenizer
        self._logprobs, self._ids = logprobs, ids

    def chunk(self, piece: Piece) -> Json:
        choice: Json = {
            "index": piece.choice.index,
            "text": piece.text,
            "logprobs": self._columns(piece.tokens, piece.offset),
            "finish_reason": piece.choice.finish,
        }
        return choice | _ids(piece.tokens, self._ids)

    def whole(self, choice: Choice) -> Json:
        body: Json = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._columns(choice.tokens, 0),
            "finish_reason": choice.finish,
        }
        return body | _ids(choice.tokens, self._ids)

    def envelope(self, choices: list[Json], *, chunk: bool) -> Json:
        return _envelope(self._head, "text_completion", choices)

    def _columns(self, tokens: Iterable[OutputToken], offset: int) -> Json | None:
        if not self._logprobs:
            return None
        texts, values, tops, offsets = (
            list[str](),
            list[float](),
            list[dict[str, float]](),
            list[int](),
        )
        for token in tokens:
            lp = token.logprob or TokenLogprob(token.token, _FLOOR)
            text = self._tokenizer.token_text(token.token)
            texts.append(text)
            values.append(max(lp.logprob, _FLOOR))
            # OpenAI's list always has the chosen token, even when it is not among the most likely.
            candidates = [*lp.top, (token.token, lp.logprob)]
            tops.append({self._tokenizer.token_text(t): max(v, _FLOOR) for t, v in candidates})
            offsets.append(offset)
            offset += 0 if token.token in self._tokenizer.special_ids else len(text)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _ids(tokens: Iterable[OutputToken], wanted: bool) -> Json:
    return {"token_ids": [t.token for t in tokens]} if wanted else {}


def _envelope(head: Head, kind: str, choices: list[Json]) -> Json:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": None,
        "choices": choices,
    }


def usage(choices: Sequence[Choice]) -> Json:
    """A prompt counts once, however many choices it has."""
    firsts = {c.prompt_index: c for c in reversed(choices)}.values()
    prompt = sum(c.prompt_tokens for c in firsts)
    completion = sum(len(c.tokens) for c in choices)
    served = [c.served for c in firsts if c.served is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(s.cached_tokens for s in served),
            "decode_cached_tokens": sum(s.decode_cached_tokens for s in served),
        },
    }


def served_object(choice: Choice, *, instance: str, stages: dict[str, float]) -> Json:
    """The `pdctl` object: how this choice was served, with the front's own stages added."""
    served = choice.served or Served(prefill="", decode=instance, path="")
    return {
        **msgspec.to_builtins(served),
        "stages": {**served.stages, **stages},
        "ttft_s": choice.ttft_s,
        "e2e_s": choice.e2e_s,
    }


SSE_DONE = b"data: [DONE]\n\n"

"""Which OpenAI parameters are ignored, which are refused, and what a typo was meant to be.

Owns the documented lists. A parameter that changes the output is never ignored silently: it is
served or refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from runtime.errors import RequestError

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted and without effect: bookkeeping of the caller, or of a cache that needs no hint here."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Refused, unless the value asks for nothing (listed here; null always does)."""


def strip_parameters(body: dict[str, object], known: Collection[str]) -> dict[str, object]:
    """The body without nulls and what is ignored. Raises RequestError for what is not served."""
    kept: dict[str, object] = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in UNSUPPORTED:
            _require_inert(name, value, body)
        elif name in known:
            kept[name] = value
        else:
            raise RequestError(_unknown(name, known), param=name, code="unknown_parameter")
    return kept


def _require_inert(name: str, value: object, body: dict[str, object]) -> None:
    inert = UNSUPPORTED[name]
    if name == "best_of":
        inert = (body.get("n") or 1,)
    # 0 == False and 1 == True in Python; in JSON they are different values.
    if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in inert):
        return
    raise RequestError(
        f"{name} is not supported by this server; leave it out",
        param=name,
        code="unsupported_parameter",
    )


def _unknown(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, [*known, *IGNORED, *UNSUPPORTED], n=1)
    shown = name if len(name) <= 64 else name[:64] + "…"
    return f"unknown parameter {shown!r}" + (f"; did you mean {close[0]!r}?" if close else "")

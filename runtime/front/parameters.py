"""Which OpenAI parameters are ignored, which are refused, and what a typo was meant to be.

Owns the documented lists. A parameter that changes the output is never ignored silently: it is
served or refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from msgspec import Raw

from runtime.errors import RequestError
from runtime.front.content import small

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


def strip_parameters(body: Mapping[str, Raw], known: Collection[str]) -> dict[str, Raw]:
    """The body without nulls and what is ignored. Raises RequestError for what is not served."""
    kept: dict[str, Raw] = {}
    for name, value in body.items():
        if name in IGNORED or _is_null(value):
            continue
        if name in UNSUPPORTED:
            _require_inert(name, value, body)
        elif name in known:
            kept[name] = value
        else:
            raise _unknown(name, known)
    return kept


def _is_null(value: Raw) -> bool:
    return len(value) == 4 and small(value) is None


def _require_inert(name: str, json: Raw, body: Mapping[str, Raw]) -> None:
    value, inert = small(json), UNSUPPORTED[name]
    if name == "best_of":
        inert = ((small(body["n"]) if "n" in body else None) or 1,)
    # 0 == False and 1 == True in Python; in JSON they are different values.
    if any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in inert):
        return
    raise RequestError(
        f"{name} is not supported by this server; leave it out",
        param=name,
        code="unsupported_parameter",
    )


def _unknown(name: str, known: Collection[str]) -> RequestError:
    shown = name if len(name) <= 64 else name[:64] + "…"
    close = difflib.get_close_matches(shown, [*known, *IGNORED, *UNSUPPORTED], n=1)
    message = f"unknown parameter {shown!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    return RequestError(message, param=shown, code="unknown_parameter")

"""The large fields of a body, prompts, token ids and messages, read from their undecoded JSON.

What a field cannot be is found out before it is built: 8 MiB of small lists as Python objects
would hold the interpreter, and with it every stream of the process, for seconds. Raises ValueError
in words that follow the field's name.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

MAX_CHOICES = 128
MAX_TOKEN_IDS = 1 << 20
"""In one list, more than any context has room for."""
MAX_SMALL_BYTES = 1 << 16
"""Of the JSON of any other value."""

_ROLES = ("system", "developer", "user", "assistant")
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_string = msgspec.json.Decoder(str)
_strings = msgspec.json.Decoder(tuple[str, ...])
_ids = msgspec.json.Decoder(tuple[_TokenId, ...])
_lists_of_ids = msgspec.json.Decoder(tuple[tuple[_TokenId, ...], ...])
_objects = msgspec.json.Decoder(list[dict[str, Raw]])


def small(value: Raw) -> object:
    """What the JSON stands for, or that it is too large to be any value we know."""
    if len(value) > MAX_SMALL_BYTES:
        return f"over {MAX_SMALL_BYTES} bytes"
    return msgspec.json.decode(value)


def string(value: Raw) -> str:
    try:
        return _string.decode(value)
    except msgspec.ValidationError:
        raise ValueError("must be a string") from None


def token_ids(value: Raw) -> tuple[int, ...]:
    _few_ids(bytes(value))
    try:
        return _ids.decode(value)
    except msgspec.ValidationError:
        raise ValueError("must be a list of token ids") from None


def prompts(value: Raw) -> tuple[str | tuple[int, ...], ...]:
    """A string, a list of strings, a list of token ids, or a list of those: as prompts."""
    found = _prompts(bytes(value))
    if not found:
        raise ValueError(
            "must be a string, a list of strings, a list of token ids, or a list of those"
        )
    return found


def _prompts(raw: bytes) -> tuple[str | tuple[int, ...], ...]:
    """Empty for what is none. Each decoder stops at the first element that is not its own."""
    if raw.startswith(b'"'):
        return (_string.decode(raw),)
    try:
        return _strings.decode(raw)
    except msgspec.ValidationError:
        pass
    if b'"' in raw:
        return ()
    # Only brackets of lists are left. An 8 MiB body has room for millions of them.
    if raw.count(b"[") > 1 + MAX_CHOICES:
        raise ValueError(f"times n is over the limit of {MAX_CHOICES} choices")
    _few_ids(raw)
    try:
        return (_ids.decode(raw),)
    except msgspec.ValidationError:
        pass
    try:
        return _lists_of_ids.decode(raw)
    except msgspec.ValidationError:
        return ()


def _few_ids(raw: bytes) -> None:
    count = raw.count(b",") + 1
    if count > MAX_TOKEN_IDS:
        raise ValueError(f"has {count} token ids; at most {MAX_TOKEN_IDS} are allowed")


def messages(value: Raw) -> list[dict[str, str]]:
    try:
        found = _objects.decode(value)
    except msgspec.ValidationError as e:
        _, _, at = str(e).partition("$[")
        if at:
            index = at.partition("]")[0]
            raise ValueError(f"[{index}] must be an object with role and content") from None
        found = []
    if not found:
        raise ValueError("must be a list of at least one message")
    return [_message(m, i) for i, m in enumerate(found)]


def _message(value: dict[str, Raw], index: int) -> dict[str, str]:
    role = small(value["role"]) if "role" in value else None
    if role not in _ROLES:
        raise ValueError(f"[{index}].role is {role!r}; it must be one of {', '.join(_ROLES)}")
    for name, item in value.items():
        # Clients send an answer's message back as they got it, with its empty fields.
        if name not in ("role", "content", "name") and small(item) not in (None, [], ""):
            raise ValueError(f"[{index}].{name} is not supported")
    content = value.get("content")
    if content is None or bytes(content) == b"null":
        if role != "assistant":
            raise ValueError(f"[{index}].content is missing")
        text = ""
    else:
        try:
            text = _text(content)
        except ValueError as e:
            raise ValueError(f"[{index}].content {e}") from e
    return {"role": "system" if role == "developer" else str(role), "content": text}


def _text(content: Raw) -> str:
    """Message content: a string, or text parts, which are joined by newlines."""
    try:
        return _string.decode(content)
    except msgspec.ValidationError:
        pass
    try:
        parts = _objects.decode(content)
    except msgspec.ValidationError:
        raise ValueError("must be a string or a list of text parts") from None
    return "\n".join(_part(part) for part in parts)


def _part(part: dict[str, Raw]) -> str:
    kind = small(part["type"]) if "type" in part else None
    if kind != "text":
        raise ValueError(f"has a part of type {kind!r}; only 'text' parts are supported")
    try:
        return _string.decode(part["text"])
    except (LookupError, msgspec.ValidationError):
        raise ValueError("has a text part whose 'text' is not a string") from None

"""Byte sizes as people write them: `512MiB`, `2GB`, `1.5GiB`, `65536`; and counts. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_LIMIT = 1 << 50
_MANY = 8
"""Names in one line."""


def parse_size(value: int | str) -> int:
    """Bytes of a size. Raises ValueError whose text says what is wrong and what would be right."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"must be a size, not {value!r}; write it like 512MiB, 2GB or 65536")
    if isinstance(value, int):
        return _checked(Decimal(value), str(value))
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write it like 512MiB, 2GB or 65536")
    number, unit = match.groups()
    scale = _UNITS.get(unit.lower() or "b")
    if scale is None:
        raise ValueError(f"{value!r} has an unknown unit {unit!r}; {_suggest(number, unit)}")
    return _checked(Decimal(number) * scale, value)


def format_size(nbytes: int) -> str:
    """The shortest exact form in binary units, else one decimal: 268435456 -> 256MiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit.lower()]
        if nbytes >= scale:
            exact = nbytes % scale == 0
            return f"{nbytes // scale}{unit}" if exact else f"{nbytes / scale:.1f}{unit}"
    return f"{nbytes}B"


def exact_size(nbytes: int) -> str:
    """The shortest form that `parse_size` reads back as the same number: 1572864 -> 1536KiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes % _UNITS[unit.lower()] == 0:
            return f"{nbytes // _UNITS[unit.lower()]}{unit}"
    return f"{nbytes}B"


def counted(number: int, what: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """All of a few; of many, the first ones and how many more: `a, b, c and 95 more`."""
    if len(names) <= _MANY:
        return ", ".join(names)
    return f"{', '.join(names[: _MANY - 2])} and {len(names) - _MANY + 2} more"


def _suggest(number: str, unit: str) -> str:
    letter = unit[:1].upper()
    if letter and letter in "KMGT":
        return f"write {number}{letter}iB (1024) or {number}{letter}B (1000)"
    return "use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB"


def _checked(nbytes: Decimal, text: str) -> int:
    if nbytes != int(nbytes):
        raise ValueError(f"{text!r} is not a whole number of bytes; use a smaller unit")
    if nbytes < 1:
        raise ValueError(f"{text!r} is no memory at all; write a size like 512MiB")
    if nbytes > _LIMIT:
        raise ValueError(f"{text!r} is more than any host has; check the unit")
    return int(nbytes)

"""A piece of memory that blocks are copied from and to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` bytes at `address` in this process. Whoever made it keeps the memory alive."""

    address: int
    nbytes: int

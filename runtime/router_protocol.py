"""What instances and the router say to each other: JSON over HTTP, POST /internal/register and
/internal/drain. Every other message is in protocol.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.protocol import PeerAddress


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Sent at start, every heartbeat, and (with `leaving`) when draining. Authorization: Bearer
    <token>."""

    version: int
    name: str
    role: Literal["prefill", "decode", "mixed"]
    url: str
    incarnation: str
    ready: bool
    leaving: bool = False
    draining: bool = False
    """What the router answered last: one that was restarted learns from it who is drained."""
    peer: PeerAddress | None = None
    """Prefill: where decode instances connect. The router passes it on to them."""
    model: str
    fingerprint: dict[str, str | int]
    max_model_len: int
    running: int = 0
    waiting: int = 0
    peers: dict[str, str | None] = {}
    """Decode: path to each linked prefill peer, None where down. The router pairs only what is
    linked."""


class RegistrationReply(msgspec.Struct, frozen=True, kw_only=True):
    heartbeat_s: float
    """Send the next one after this long."""
    draining: bool = False
    """This instance gets no new request; those under way go on."""
    peers: dict[str, PeerAddress] = {}
    """Decode: the prefill instances there are, by name."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """POST /internal/drain, from pdctl. Holds for this process: a restarted one is not drained."""

    name: str
    draining: bool

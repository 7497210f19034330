"""Measures every path of KV of a running deployment, beside the limits of the same hosts.

Asks decode instances to have blocks moved (their /internal/measure), a little at a time and in
turns, so that a busy machine hurts all columns alike. Owns what is asked and the medians; how it is
shown is transfer_report.py's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdctl.agent import shim_call
from pdctl.errors import PdctlError
from pdctl.find import Where, located
from pdctl.fleet import on_all
from pdctl.health import get_json, post_json
from pdctl.status import status

What = Literal["path", "memcpy", "socket"]
WHATS: tuple[What, ...] = ("path", "memcpy", "socket")

MOVED_BYTES = 64 << 20
LATENCIES = 20
RUNS = (1, 4, 16)
"""So many neighbouring blocks at a time: a short prompt's blocks are scattered, a long one's are
not."""
_TIMEOUT_S = 60.0
_TRIES = 5
_BUSY_S = 0.3


@dataclass(slots=True)
class Row:
    """Speeds in GB/s with so many neighbouring blocks at a time."""

    run: int
    speeds: dict[What, list[float]] = field(default_factory=lambda: {w: [] for w in WHATS})

    def median(self, what: What) -> float | None:
        found = self.speeds[what]
        return statistics.median(found) if found else None


@dataclass(slots=True)
class Pair:
    """One way: from a prefill instance to a decode instance."""

    prefill: str
    decode: str
    path: str
    url: str
    block_bytes: int = 0
    latencies_s: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    error: str = ""

    @property
    def limit(self) -> What:
        """What this path can at best be: a copy within the host, or what the network carries."""
        return "memcpy" if self.path in ("shm", "cuda_ipc") else "socket"


@dataclass(slots=True)
class Transfers:
    name: str
    pairs: list[Pair]
    partial: bool = False
    """Interrupted: some of it was not measured."""

    @property
    def failed(self) -> bool:
        return any(pair.error for pair in self.pairs)


def measure(name: str | None, where: Where, rounds: int, tell: Callable[[str], None]) -> Transfers:
    """Raises PdctlError when there is nothing to measure. An interrupt gives what there is."""
    found = status(name, where)
    pairs = [
        Pair(prefill, service.name, path, service.url)
        for service in found.services
        if service.role == "decode" and service.health == "healthy"
        for prefill, path in sorted(service.peers.items())
        if path is not None
    ]
    if not pairs:
        raise PdctlError(
            f"{found.name} has no healthy decode instance with a prefill peer",
            hint=f"pdctl status {found.name}",
        )
    token = _token(found.name, where)
    transfers = Transfers(found.name, pairs)
    try:
        for number, pair in enumerate(pairs, start=1):
            tell(f"{number} of {len(pairs)}: {pair.prefill} to {pair.decode} over {pair.path}")
            try:
                _measure_pair(pair, token, rounds)
            except PdctlError as e:
                pair.error = str(e)
    except KeyboardInterrupt:
        transfers.partial = True
    return transfers


def _token(name: str, where: Where) -> str:
    with located(name, where) as found:
        answers = on_all(
            found.reachable(), lambda h: shim_call(h, "token", {"deployment": found.name})
        )
    token = next((a["token"] for a in answers if a["token"]), None)
    if not token:
        raise PdctlError(f"no host has the token of {name}", hint=f"pdctl status {name}")
    return str(token)


def _measure_pair(pair: Pair, token: str, rounds: int) -> None:
    def ask(what: What, blocks: int, run: int) -> Mapping[str, Any]:
        question = {"what": what, "peer": pair.prefill, "blocks": blocks, "run": run}
        return _post(f"{pair.url}/internal/measure", question, token)

    for _ in range(LATENCIES):
        answer = ask("path", 1, 1)
        pair.block_bytes = answer["nbytes"]
        pair.latencies_s.append(answer["seconds"])
    _, ledger = get_json(f"{pair.url}/ledger")
    # Half of the buffer: requests need the rest.
    room = int((ledger.get("totals") or {}).get("buffer_blocks_total", 2)) // 2
    blocks = max(1, min(MOVED_BYTES // pair.block_bytes, room))
    pair.rows = [Row(run) for run in RUNS if run <= blocks]
    for number in range(rounds + 1):
        for row in pair.rows:
            for what in WHATS:
                answer = ask(what, blocks, row.run)
                if number:  # the first warms up
                    row.speeds[what].append(answer["nbytes"] / answer["seconds"] / 1e9)


def _post(url: str, question: Mapping[str, Any], token: str) -> Mapping[str, Any]:
    """The answer. Raises PdctlError. Requests come first, so a full buffer is waited for."""
    for left in reversed(range(_TRIES)):
        code, answer = post_json(url, question, token=token, timeout_s=_TIMEOUT_S)
        if code == 200:
            return answer
        if code != 503 or not left:
            break
        time.sleep(_BUSY_S)
    error = answer.get("error")
    said = error.get("message") if isinstance(error, dict) else None
    raise PdctlError(f"{url}: {said or (f'HTTP {code}' if code else 'no answer')}")

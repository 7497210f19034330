"""What a decode instance counts, and what it says of how a request was served.

Owns the counters of the hand-over (Stats.counters) and every Served. Changes no request. For the
asyncio thread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from runtime.errors import Leg
from runtime.protocol import Served
from runtime.transfer.decode_request import DecodeRequest

_NAMES = (
    *("transfers", "transfer_failures", "transfer_seconds", "reserve_seconds", "swap_in_seconds"),
    *("swap_outs", "swap_out_bytes", "swap_out_seconds", "swap_outs_without_room"),
    *("swap_backs", "swapped_seconds", "prompt_tokens", "cached_tokens"),
    *("requests_aborted", "requests_failed"),
)
"""Beside kv_bytes_<path> for each path that was used."""


class Accounts:
    def __init__(self, instance: str, block_size: int) -> None:
        self._loop = asyncio.get_running_loop()
        self.instance = instance
        self._block_size = block_size
        # From the start, so that who watches sees a zero and not a gap.
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_NAMES, 0.0))

    def served(self, request: DecodeRequest) -> Served:
        """As far as known now."""
        return request.served(self.instance, self._loop.time(), self._block_size)

    def reserved(self, request: DecodeRequest) -> None:
        self.counters["reserve_seconds"] += request.granted - request.arrived

    def resumed(self, request: DecodeRequest) -> None:
        """Its prompt's KV is in the device pool."""
        served, counters = self.served(request), self.counters
        counters["transfers"] += 1
        counters[f"kv_bytes_{served.path}"] += served.kv_bytes
        counters["prompt_tokens"] += served.prompt_tokens
        counters["cached_tokens"] += served.decode_cached_tokens
        counters["transfer_seconds"] += served.stages["transfer"]
        counters["swap_in_seconds"] += served.stages["swap_in"]

    def swapped_out(self, nbytes: int, seconds: float) -> None:
        self.counters["swap_outs"] += 1
        self.counters["swap_out_bytes"] += nbytes
        self.counters["swap_out_seconds"] += seconds

    def no_room_to_swap(self) -> None:
        self.counters["swap_outs_without_room"] += 1

    def swapped_back(self, away_s: float) -> None:
        self.counters["swap_backs"] += 1
        self.counters["swapped_seconds"] += away_s

    def aborted(self) -> None:
        self.counters["requests_aborted"] += 1

    def failed(self) -> None:
        self.counters["requests_failed"] += 1

    def hand_over_failed(self, request: DecodeRequest, leg: Leg) -> None:
        """Also counted as failed; here when it was the hand-over that failed."""
        if request.landing is not None and leg != "decode" and not request.resumed:
            self.counters["transfer_failures"] += 1

"""Which requests get device blocks before their KV comes: with the reservation, or only when some
of it has landed in the buffer.

Owns that choice, and nothing that is held. For the asyncio thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.engine.contract import EngineControl
from runtime.transfer.decode_request import DecodeRequest


class Pledges:
    def __init__(self, engine: EngineControl) -> None:
        self._engine = engine
        # Device blocks that only wait for KV: more, and what runs had to make room for them.
        self._most = engine.pool_map.num_blocks // 2

    def needs(
        self, request: DecodeRequest, others: Iterable[DecodeRequest], free: int, *, direct: bool
    ) -> int:
        """Blocks of the buffer, of which `free` are free, for a request whose turn it is.

        With device blocks at once, when it could run soon, what the prefix cache has need not come,
        and the rest goes straight there if it can (`direct`).
        """
        pledged = sum(other.pledged_blocks for other in others)
        if pledged and pledged + request.num_blocks > self._most:
            return request.num_blocks
        room = request.num_blocks if direct else free
        request.adopted = self._engine.adopt(request.for_engine, room)
        request.submitted = request.adopted is not None
        return 0 if direct and request.adopted else request.missing_blocks

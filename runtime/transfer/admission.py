"""What decode refuses before it holds anything for a request, and how a refusal is said to the
front.
"""

from __future__ import annotations

import msgspec

from runtime.config import WorkerConfig
from runtime.engine.contract import EngineControl
from runtime.errors import TOO_LONG, CapacityError, LegError, RequestError
from runtime.protocol import Failed, Generate


class Admission:
    """Sizes only: which peer serves is PeerTable's."""

    def __init__(self, config: WorkerConfig, engine: EngineControl, buffer_blocks: int) -> None:
        self._max_queued = config.max_queued
        self._layout = engine.layout
        self._pool_blocks = engine.pool_map.num_blocks
        self._buffer_blocks = buffer_blocks

    def check(self, message: Generate, waiting: int) -> int:
        """Blocks that the prompt needs. Raises RequestError when it can never fit, CapacityError
        when too many wait already.
        """
        tokens = len(message.prompt)
        if not tokens:
            raise RequestError("the prompt is empty")
        blocks, size = self._layout.blocks_for(tokens), self._layout.block_size
        if blocks > self._buffer_blocks:
            raise RequestError(
                f"a prompt of {tokens} tokens needs {blocks} blocks of the CPU buffer,"
                f" which has {self._buffer_blocks} ({self._buffer_blocks * size} tokens; a larger"
                " cpu_buffer holds more)",
                code=TOO_LONG,
            )
        # One more token than the prompt, or decoding could not even begin.
        needed = self._layout.blocks_for(tokens + 1)
        if needed > self._pool_blocks:
            raise RequestError(
                f"a prompt of {tokens} tokens needs {needed} blocks of KV cache,"
                f" there are {self._pool_blocks} ({self._pool_blocks * size} tokens; a larger"
                " kv_cache holds more)",
                code=TOO_LONG,
            )
        if waiting >= self._max_queued:
            raise CapacityError(f"{waiting} requests already wait for the CPU buffer")
        return blocks


def refusal(
    message: Generate, error: RequestError | CapacityError | LegError, instance: str
) -> Failed:
    """The last message for a request that was not admitted by `instance`."""
    failed = Failed(id=message.id, message=str(error), status=503, instance=instance)
    if isinstance(error, CapacityError):
        return msgspec.structs.replace(failed, retry_after_s=error.retry_after_s)
    if isinstance(error, LegError):
        return msgspec.structs.replace(
            failed, status=error.status, leg=error.leg, instance=error.instance
        )
    return msgspec.structs.replace(failed, status=error.status, code=error.code)

"""A free block of the device pool, to test a path with."""

from __future__ import annotations

import itertools

from runtime.engine.contract import EngineControl, EngineRequest
from runtime.protocol import RequestId, SamplingParams

# Of no prompt: so it is found in no prefix cache, and a block that others read is never given.
_NO_TOKEN = -1


# Of this process, not of a session: blocks stay taken when their session is over, and sessions of
# another incarnation of the peer have the same numbers.
_numbers = itertools.count(1)


def take_block(engine: EngineControl) -> tuple[RequestId, int] | None:
    """Its number, and the id that the engine drops to have it back. None: there is none to be had
    now, for requests come first.
    """
    id_ = RequestId(f"path-test.{next(_numbers)}")
    request = EngineRequest(id_, (_NO_TOKEN,), SamplingParams(max_tokens=1), "decode")
    adopted = engine.adopt(request, 1)
    return (id_, adopted.blocks[0]) if adopted else None

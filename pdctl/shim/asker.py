"""Whether the pdctl that asked is still there: what takes long ends with it."""

from __future__ import annotations

import select


def gone() -> bool:
    """Whether the other end of our input is closed."""
    poll = select.poll()
    poll.register(0, 0)  # the end alone is always told
    return any(event & select.POLLHUP for _, event in poll.poll(0))

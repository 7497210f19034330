"""Which prefill peers a decode instance may use now, and why it may not use the others.

Owns the choice of a peer for a request. Sessions come and go by peer_client; for the asyncio
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runtime.errors import CapacityError, LegError, RequestError
from runtime.protocol import PeerGone, PeerState
from runtime.transfer.decode_request import DecodeSession

_NOT_YET = "not connected yet"


class PeerTable:
    """`send` takes the changes for the front."""

    def __init__(self, names: Iterable[str], send: Callable[[PeerState | PeerGone], None]) -> None:
        self._up: dict[str, DecodeSession] = {}
        self._reasons = dict.fromkeys(names, _NOT_YET)
        """Every peer that is dialled; what was said last where it is down."""
        self._send = send

    def expect(self, name: str) -> None:
        """This peer is dialled from now on."""
        self._reasons.setdefault(name, _NOT_YET)

    def forget(self, name: str) -> None:
        """It is not dialled any more, and there is no session with it."""
        self._reasons.pop(name, None)
        self._send(PeerGone(name))

    def up(self, session: DecodeSession) -> None:
        """The path was tested: requests may use it."""
        self._up[session.peer] = session
        self._send(_state(session))

    def lost(self, session: DecodeSession) -> None:
        """Not usable from now on; `down` follows with the reason."""
        if self._up.get(session.peer) is session:
            del self._up[session.peer]
            # So that `down` tells the front, even if it says what was said before.
            self._reasons[session.peer] = ""

    def down(self, name: str, reason: str) -> None:
        """There is no session with this peer. Told to the front when it is news."""
        if self._reasons.get(name) != reason:
            self._reasons[name] = reason
            self._send(PeerState(name=name, path=None, reason=reason))

    def choose(self, name: str | None, load: Callable[[DecodeSession], int]) -> DecodeSession:
        """The named peer, or the one with the least load.

        Raises RequestError for an unknown name, LegError when the peer is down, CapacityError when
        all are.
        """
        if name is None:
            if not self._up:
                raise CapacityError("no prefill instance is linked")
            return min(self._up.values(), key=load)
        if session := self._up.get(name):
            return session
        if name not in self._reasons:
            raise RequestError(f"{name} is no prefill peer of this instance")
        reason = self._reasons[name] or "the link was lost"
        raise LegError(f"{name} is down: {reason}", leg="prefill", instance=name)

    def states(self, load: Callable[[DecodeSession], int]) -> dict[str, PeerState]:
        """With how many requests still need each peer."""
        down = {
            name: PeerState(name=name, path=None, reason=reason)
            for name, reason in self._reasons.items()
        }
        return down | {name: _state(session, load(session)) for name, session in self._up.items()}


def _state(session: DecodeSession, requests: int = 0) -> PeerState:
    welcome = session.welcome
    return PeerState(
        name=session.peer,
        path=welcome.path,
        incarnation=welcome.incarnation,
        reason=session.reason,
        requests=requests,
    )

"""What a peer sends is checked before anything is indexed, sized or timed with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_engine import FORBIDDEN_TOKEN, expected
from handoff_lab import Pair, drive, prompt
from msgspec import inspect

from runtime.protocol import (
    Failed,
    FirstToken,
    KvProgress,
    KvReady,
    OutputToken,
    PeerReply,
    PeerRequest,
    Prefill,
    PrefillFailed,
    RequestId,
    SamplingParams,
    TokenLogprob,
    Tokens,
)
from runtime.transfer.prefill_request import PrefillSession

CHECKED_ELSEWHERE = {
    # Echoed, or compared for equality.
    *("Ping.seq", "Pong.seq", "Hello.version", "Hello.fingerprint"),
    # By the engine and the session that they are for: PrefillHandoff._refusal, path_test.py,
    # Stepper._impossible and DecodeRequest.flaw.
    *("Prefill.prompt", "Prefill.params", "Prefill.blocks", "PathTest.blocks", "FirstToken.token"),
}


def unbounded(kind: inspect.Type) -> bool:
    """Whether a number in it may be any."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return (kind.ge, kind.gt) == (None, None) or (kind.le, kind.lt) == (None, None)
        case inspect.UnionType():
            return any(map(unbounded, kind.types))
        case inspect.VarTupleType():
            return unbounded(kind.item_type)
        case inspect.DictType():
            return unbounded(kind.value_type)
        case inspect.StructType():
            return any(unbounded(field.type) for field in kind.fields)
    return False


def test_every_number_has_bounds_or_is_checked_where_its_meaning_is_known() -> None:
    open_ended = set()
    for union in (PeerRequest, PeerReply):
        kinds = inspect.type_info(union)
        assert isinstance(kinds, inspect.UnionType)
        for kind in kinds.types:
            assert isinstance(kind, inspect.StructType)
            open_ended |= {
                f"{kind.cls.__name__}.{field.name}"
                for field in kind.fields
                if unbounded(field.type)
            }
    assert open_ended == CHECKED_ELSEWHERE


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1e-9, 1e10])
def test_no_time_is_endless_negative_or_no_number(seconds: float) -> None:
    message = {"type": "KvReady", "nonce": 1, "nbytes": 0, "transfer_s": seconds}
    with pytest.raises(msgspec.ValidationError, match="transfer_s"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=PeerReply)


def change(both: Pair, how: Callable[[PeerReply], PeerReply | None]) -> None:
    """Have prefill send other messages: what `how` makes of them, if it is not None."""
    handoff: Any = both.prefill.role._handoff  # type: ignore[attr-defined]
    real = handoff._tell

    def tell(session: PrefillSession, message: PeerReply) -> None:
        real(session, how(message) or message)

    handoff._tell = tell


def first(token: OutputToken, **more: Any) -> FirstToken:
    values = {"cached_tokens": 0, "queue_s": 0.0, "prefill_s": 0.0, "finish": None, **more}
    return FirstToken(nonce=1, token=token, **values)


BAD_FIRST = {
    "negative": first(OutputToken(-1)),
    "beyond the vocabulary": first(OutputToken(1000)),
    "beyond an int": first(OutputToken(1 << 31)),
    "logprob of another": first(OutputToken(1, TokenLogprob(1000, -1.0))),
    "top": first(OutputToken(1, TokenLogprob(1, -1.0, ((-1, -2.0),)))),
    "nan": first(OutputToken(1, TokenLogprob(1, math.nan))),
    "nan on top": first(OutputToken(1, TokenLogprob(1, -1.0, ((1, math.nan),)))),
    "cached": first(OutputToken(1), cached_tokens=41),
}


@pytest.mark.parametrize("what", BAD_FIRST)
def test_a_senseless_first_token_fails_its_request_only(what: str) -> None:
    async def scenario(both: Pair) -> None:
        session = both.handoff.peers._up["prefill-0"]
        bad: list[int] = []

        def spoil(message: PeerReply) -> PeerReply | None:
            if not isinstance(message, FirstToken) or bad:
                return None
            bad.append(message.nonce)
            return msgspec.structs.replace(BAD_FIRST[what], nonce=message.nonce)

        change(both, spoil)
        last = await both.decode.answer(both.decode.ask(prompt(40)))
        assert isinstance(last, Failed) and (last.status, last.leg) == (502, "prefill")
        id_ = both.decode.ask(prompt(40))
        assert isinstance(await both.decode.answer(id_), Tokens)
        assert both.decode.tokens_of(id_) == expected(prompt(40), 4)
        assert both.handoff.peers._up["prefill-0"] is session

    drive("shm", scenario)


@pytest.mark.parametrize("twice", [FirstToken, KvReady])
def test_what_comes_twice_fails_its_request_only(twice: type) -> None:
    async def scenario(both: Pair) -> None:
        handoff: Any = both.prefill.role._handoff  # type: ignore[attr-defined]
        both.decode.engine.pause("adopt", "decode")
        real = handoff._tell
        seen: list[PeerReply] = []

        def tell(session: PrefillSession, message: PeerReply) -> None:
            real(session, message)
            if isinstance(message, twice) and not seen:
                seen.append(message)
                real(session, message)

        handoff._tell = tell
        last = await both.decode.answer(both.decode.ask(prompt(40)))
        assert isinstance(last, Failed) and (last.status, last.leg) == (502, "prefill")
        both.decode.engine.pause()
        id_ = both.decode.ask(prompt(40))
        assert isinstance(await both.decode.answer(id_), Tokens)

    drive("shm", scenario)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (KvReady, {"transfer_s": math.nan}),
        (KvProgress, {"blocks": -1}),
        (PrefillFailed, {"status": 10**6}),
    ],
)
def test_a_number_out_of_bounds_ends_the_session_and_is_counted_nowhere(
    kind: type, changes: dict[str, Any]
) -> None:
    async def scenario(both: Pair) -> None:
        session = both.handoff.peers._up["prefill-0"]
        spoiled: list[int] = []

        def spoil(message: PeerReply) -> PeerReply | None:
            if not isinstance(message, kind) or spoiled:
                return None
            spoiled.append(1)
            return msgspec.structs.replace(message, **changes)

        change(both, spoil)
        tokens = (1, FORBIDDEN_TOKEN, 2) if kind is PrefillFailed else prompt(40)
        last = await both.decode.answer(both.decode.ask(tokens))
        assert isinstance(last, Failed) and last.status == 502
        assert "not a message of this protocol" in session.why_lost
        await both.decode.until(lambda: both.handoff.peers._up)
        await both.idle()
        assert isinstance(await both.decode.answer(both.decode.ask(prompt(30))), Tokens)
        assert all(math.isfinite(n) for n in both.decode.role.counters().values())

    drive("shm", scenario)


def test_prefill_takes_no_deadline_that_is_no_time() -> None:
    async def scenario(both: Pair) -> None:
        session = both.handoff.peers._up["prefill-0"]
        bad = Prefill(
            id=RequestId("bad"),
            nonce=1 << 40,
            prompt=prompt(8),
            params=SamplingParams(max_tokens=1),
            blocks=(1, 2),
            deadline_s=math.nan,
        )
        session.link.send(bad)
        await both.decode.until(lambda: session.why_lost)
        await both.decode.until(lambda: both.handoff.peers._up)
        await both.idle()

    drive("shm", scenario)


def test_a_request_that_is_late_when_its_turn_comes_costs_nobody_else() -> None:
    async def scenario(both: Pair) -> None:
        session = both.handoff.peers._up["prefill-0"]
        last = await both.decode.answer(both.decode.ask(prompt(8), deadline_s=-1.0))
        assert isinstance(last, Failed) and last.status == 504
        id_ = both.decode.ask(prompt(40))
        assert isinstance(await both.decode.answer(id_), Tokens)
        assert both.handoff.peers._up["prefill-0"] is session

    drive("shm", scenario)

"""Puts that go wrong, over each transport: never a success, and never a block free too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import expected
from handoff_lab import BLOCK_BYTES, Pair, prompt
from handoff_lab import drive as run
from rdma_lab import BUFFERED

from runtime.engine.roles import PrefillRole
from runtime.errors import TransferError
from runtime.protocol import Failed, Tokens
from runtime.transfer import peer_client
from runtime.transfer.base import Sender


@pytest.fixture(params=BUFFERED)
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


def sender_of(both: Pair) -> Sender:
    assert isinstance(both.prefill.role, PrefillRole)
    [session] = both.prefill.role._handoff._sessions.values()
    assert session.sender is not None
    return session.sender


def change_put(both: Pair, put: Callable[..., int]) -> None:
    """`put(real, nonce, source, runs, whole)` in place of the sender's own."""
    sender = sender_of(both)
    real = sender.put
    sender.put = lambda *args: put(real, *args)  # type: ignore[method-assign]


def test_a_put_that_fails_is_a_failed_transfer(kind: str) -> None:
    def fail(real: Any, *put: Any) -> int:
        raise TransferError("the wire is cut")

    async def scenario(both: Pair) -> None:
        change_put(both, fail)
        id_ = both.decode.ask(prompt(40))
        last = await both.decode.answer(id_)
        assert isinstance(last, Failed)
        assert (last.status, last.leg, last.instance) == (502, "transfer", "prefill-0")
        assert "the wire is cut" in last.message
        assert both.decode.role.counters()["transfer_failures"] == 1

    run(kind, scenario)


def test_a_failed_put_that_may_still_write_ends_the_session_before_its_blocks_are_free(
    kind: str,
) -> None:
    def fail(real: Any, *put: Any) -> int:
        raise TransferError("the wire is cut")

    async def scenario(both: Pair) -> None:
        held: list[int] = []
        real = both.handoff._on_terminal

        def on_terminal(request: Any, message: Any) -> None:
            real(request, message)
            held.append(both.decode.ledger.buffer_blocks)

        both.handoff._on_terminal = on_terminal
        change_put(both, fail)
        sender_of(both).put_fences = False  # type: ignore[misc]
        old = both.handoff.peers._up["prefill-0"]
        id_ = both.decode.ask(prompt(40))
        last = await both.decode.answer(id_)
        assert isinstance(last, Failed) and (last.status, last.leg) == (502, "transfer")
        assert "the wire is cut" in last.message
        # Where the receiver itself refuses late bytes, as over tcp, they are free at once.
        assert held == [0 if kind == "tcp" else 10]
        await both.decode.until(lambda: both.handoff.peers._up.get("prefill-0", old) is not old)
        again = both.decode.ask(prompt(40))
        await both.decode.answer(again)
        assert both.decode.tokens_of(again) == expected(prompt(40), 4)

    run(kind, scenario)


def test_a_writer_that_gives_nothing_back_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "TERMINAL_S", 0.3)

    async def scenario(both: Pair) -> None:
        assert isinstance(both.prefill.role, PrefillRole)
        monkeypatch.setattr(both.prefill.role._handoff, "_tell_terminal", lambda *_: None)
        both.prefill.engine.pause("prefill")
        old = both.handoff.peers._up["prefill-0"]
        id_ = both.decode.ask(prompt(40))
        await both.decode.until(lambda: both.prefill.ledger.outgoing)
        both.decode.role.abort(id_)
        assert both.decode.ledger.quarantined_blocks == 10
        await both.decode.until(lambda: not both.decode.ledger.quarantined_blocks)
        assert "not given back" in old.why_lost
        monkeypatch.undo()
        both.prefill.engine.pause()
        await both.decode.until(lambda: both.handoff.peers._up)

    run("shm", scenario)


def test_too_few_bytes_never_look_like_success(kind: str) -> None:
    async def scenario(both: Pair) -> None:
        change_put(both, lambda real, *put: real(*put) - 1)
        id_ = both.decode.ask(prompt(40))
        last = await both.decode.answer(id_)
        assert isinstance(last, Failed) and (last.status, last.leg) == (502, "transfer")
        assert str(10 * BLOCK_BYTES) in last.message

    run(kind, scenario)


def test_bytes_that_never_arrive_over_tcp_never_look_like_success() -> None:
    async def scenario(both: Pair) -> None:
        change_put(both, lambda real, nonce, source, runs, whole: int(runs[:, 2].sum()))
        id_ = both.decode.ask(prompt(40), deadline_s=0.5)
        last = await both.decode.answer(id_)
        assert isinstance(last, Failed) and (last.status, last.leg) == (504, "transfer")

    run("tcp", scenario)


async def renewed(both: Pair, old: object) -> None:
    """Another session is up, and serves."""
    await both.decode.until(lambda: both.handoff.peers._up.get("prefill-0", old) is not old)
    id_ = both.decode.ask(prompt(41))
    await both.decode.answer(id_)
    assert both.decode.tokens_of(id_) == expected(prompt(41), 4)


def test_a_data_connection_that_dies_alone_ends_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a firewall forgot it: the puts go nowhere, and the pings of both ends go on."""
    monkeypatch.setattr(peer_client, "STALL_S", 0.2)

    async def scenario(both: Pair) -> None:
        change_put(both, lambda real, nonce, source, runs, whole: int(runs[:, 2].sum()))
        old = both.handoff.peers._up["prefill-0"]
        last = await both.decode.answer(both.decode.ask(prompt(40), deadline_s=600.0))
        assert isinstance(last, Failed) and last.status == 502
        assert "nothing of the KV that it has put came" in last.message
        await renewed(both, old)

    run("tcp", scenario)


def test_kv_that_comes_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is that blocks come, not when the last one does."""
    monkeypatch.setattr(peer_client, "STALL_S", 5.0)

    async def scenario(both: Pair) -> None:
        session = both.handoff.peers._up["prefill-0"]
        real, most = session.receiver.landed, 0
        session.receiver.landed = lambda nonce, told: min(most, real(nonce, told))
        id_ = both.decode.ask(prompt(40))
        await both.decode.until(lambda: any(r.ready for r in session.requests.values()))
        [nonce] = session.requests
        await both.decode.until(lambda: real(nonce, 10) == 10)  # prefill's word may be here first
        for at in range(0, 60, 4):
            most = at // 6
            both.handoff.on_received(session, nonce)
            assert not session.stalled(1000.0 + at)
        assert session.stalled(1000.0 + at + 9)
        most = 10
        both.handoff.on_received(session, nonce)
        await both.decode.answer(id_)
        assert not session.stalled(2000.0)

    run("tcp", scenario)


def test_a_failed_put_over_tcp_ends_the_session() -> None:
    """Whether or not decode sees the connection's end."""

    def fail(real: Any, *put: Any) -> int:
        raise TransferError("the wire is cut")

    async def scenario(both: Pair) -> None:
        change_put(both, fail)
        old = both.handoff.peers._up["prefill-0"]
        last = await both.decode.answer(both.decode.ask(prompt(40)))
        assert isinstance(last, Failed) and last.status == 502
        await renewed(both, old)

    run("tcp", scenario)


def test_a_bad_put_over_tcp_fails_its_request_only() -> None:
    async def scenario(both: Pair) -> None:
        def astray(real: Any, nonce: int, source: Any, runs: Any, whole: int) -> int:
            if nonce % 2:
                runs = runs + np.array([0, BLOCK_BYTES, 0])
            total: int = real(nonce, source, runs, whole)
            return total

        change_put(both, astray)
        ids = [both.decode.ask(prompt(9, n)) for n in range(6)]
        ends = [await both.decode.answer(id_) for id_ in ids]
        failed = [e for e in ends if isinstance(e, Failed)]
        assert len(failed) == 3
        assert {(e.status, e.leg) for e in failed} == {(502, "transfer")}
        for n, (id_, end) in enumerate(zip(ids, ends, strict=True)):
            if isinstance(end, Tokens):
                assert both.decode.tokens_of(id_) == expected(prompt(9, n), 4)

    run("tcp", scenario)

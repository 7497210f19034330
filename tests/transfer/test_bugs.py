"""An exception that nobody expects, on any thread or task of a session: a traceback in the log, the
session ends with what needs it, and the next one serves.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import expected
from handoff_lab import Pair, drive, prompt
from transport_rig import Rig, eventually

from runtime.engine.roles import PrefillRole
from runtime.protocol import Failed
from runtime.transfer import peer_client, tcp
from runtime.transfer.base import ReceiverEvents
from runtime.transfer.rdma import RdmaReceiver

BUG = "an index of nobody"


def bug(*_: object, **__: object) -> Any:
    raise IndexError(BUG)


async def later_bug(*_: object) -> None:
    bug()


def traced(caplog: pytest.LogCaptureFixture) -> bool:
    return any(r.exc_info and BUG in str(r.exc_info[1]) for r in caplog.records)


async def serves(both: Pair, old: object) -> None:
    """By another session."""
    await both.decode.until(lambda: both.handoff.peers._up.get("prefill-0", old) is not old)
    id_ = both.decode.ask(prompt(41))
    await both.decode.answer(id_)
    assert both.decode.tokens_of(id_) == expected(prompt(41), 4)


@pytest.mark.parametrize(
    ("kind", "at"),
    [("shm", "decode._on_first"), ("tcp", "decode.on_received")]
    + [
        (kind, f"prefill.{name}")
        for kind in ("shm", "tcp")
        for name in ("_on_first", "_on_computed", "_on_put", "_on_put_end")
    ],
)
def test_a_bug_in_an_event_ends_the_session_now(
    kind: str, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(both: Pair) -> None:
        assert isinstance(both.prefill.role, PrefillRole)
        side, name = at.split(".")
        handoff = both.handoff if side == "decode" else both.prefill.role._handoff
        old = both.handoff.peers._up["prefill-0"]
        setattr(handoff, name, bug)
        last = await both.decode.answer(both.decode.ask(prompt(40), deadline_s=600.0))
        delattr(handoff, name)
        assert isinstance(last, Failed) and last.status == 502
        assert "this instance stops" not in last.message
        assert side == "prefill" or f"IndexError: {BUG}" in last.message
        assert traced(caplog)
        await serves(both, old)

    drive(kind, scenario)


@pytest.mark.parametrize("task", ["_watch", "_prove"])
def test_a_bug_beside_the_receive_loop_ends_the_session(
    task: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(both: Pair) -> None:
        old = both.handoff.peers._up["prefill-0"]
        with monkeypatch.context() as patched:
            patched.setattr(peer_client.PeerClient, task, later_bug)
            both.cut()
            await both.decode.until(
                lambda: BUG in both.decode.role.peers()["prefill-0"].reason,
            )
        assert traced(caplog)
        await serves(both, old)

    drive("shm", scenario)


def test_a_bug_in_a_reader_of_tcp_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "receive_header", bug)
    rig = Rig.make("tcp", blocks=8, size=4096)
    rig.connect()
    try:
        eventually(lambda: rig.closed)
        assert rig.closed == [f"data connection: IndexError: {BUG}"]
        assert rig.receiver.writer_gone() and traced(caplog)
    finally:
        rig.close()


def test_a_bug_in_the_reader_of_rdma_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed: list[str] = []
    ended: list[str] = []
    queue = SimpleNamespace(
        fd=0,
        poll=bug,
        receive=lambda *_: None,
        close=lambda: ended.append("queue pair"),
        close_events=lambda: None,
    )
    memory = SimpleNamespace(lkey=1, close=lambda: ended.append("memory"))
    device = SimpleNamespace(register=lambda *_, **__: memory)
    adapter = SimpleNamespace(device=device, connect=lambda *_: None, gpu=None)
    end: Any = SimpleNamespace(pool=None)
    offer: Any = SimpleNamespace(adapter=adapter, end=end, queue=queue, close=lambda: None)
    nothing: Any = lambda *_: None  # noqa: E731
    events = ReceiverEvents(lambda call: call(), nothing, nothing, closed.append)
    with caplog.at_level(logging.ERROR):
        receiver = RdmaReceiver(offer, end, events)
        eventually(lambda: closed)
    assert closed == [f"rdma: IndexError: {BUG}"]
    assert receiver.writer_gone() and ended[0] == "queue pair" and traced(caplog)
    receiver.close()
    assert ended[-1] == "memory"

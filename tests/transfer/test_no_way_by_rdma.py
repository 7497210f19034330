"""`auto`, where both ends have an RDMA device and nothing goes between them: another path is taken.

The devices are stand-ins: real ones are in tests/rdma_vm.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import expected
from handoff_lab import pair

from runtime.errors import TransferError
from runtime.protocol import Hello, RdmaEnd
from runtime.transfer import paths
from runtime.transfer.base import ReceiverEvents
from runtime.transfer.paths import OpenedPath, ReceiverPaths, SenderPaths
from runtime.transfer.rdma import RdmaReceiver
from runtime.transfer.shm import ShmReceiver

END = RdmaEnd(
    device="none0", fabric="", gid=bytes(16), lid=0, mtu=5, number=1, psn=1, address=0, key=0
)
PROMPT = (1, 2, 3, 4, 5)


class Offer:
    path = "rdma"
    no_pool = ""
    end = END

    def close(self) -> None:
        pass


class LosesItsConnection(ShmReceiver):
    """As a queue pair does that the first write brings down."""

    path = "rdma"

    def __init__(self, events: ReceiverEvents) -> None:
        self._events = events

    def expect(self, nonce: int, blocks: tuple[int, ...]) -> None:
        self._events.post(lambda: self._events.on_closed("the queue pair failed"))

    def writer_gone(self) -> bool:
        return True


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Hello]:
    """Two hosts with devices; the hellos after which prefill's end was connected by rdma."""
    real, tried = SenderPaths._open, []

    async def open_path(self: SenderPaths, path: Any, hello: Hello) -> OpenedPath:
        if path == "shm":
            raise TransferError("elsewhere")
        if path == "rdma" and hello.rdma:
            tried.append(hello)
            sender: Any = SimpleNamespace(
                path="rdma",
                pool_bytes=0,
                put_fences=False,
                put_lands=False,
                put=lambda *_: 0,
                abort=lambda: None,
                close=lambda: None,
            )
            return OpenedPath("rdma", sender, rdma=END)
        return await real(self, path, hello)

    monkeypatch.setattr(SenderPaths, "_open", open_path)
    monkeypatch.setattr(ReceiverPaths, "offer_rdma", lambda *_: Offer())
    return tried


@pytest.mark.parametrize("when", ["opened", "tested"])
def test_auto_goes_on_without_rdma_and_says_why(
    when: str, tried: list[Hello], monkeypatch: pytest.MonkeyPatch
) -> None:
    def receiver(offer: Offer, peer: RdmaEnd, events: ReceiverEvents) -> Any:
        if when == "opened":
            raise TransferError("No route to host")
        return LosesItsConnection(events)

    monkeypatch.setattr(paths, "RdmaReceiver", receiver)

    async def main() -> None:
        async with pair("tcp", transfer="auto") as both:
            why = both.decode.role.peers()["prefill-0"].reason
            words = {"opened": "No route to host", "tested": "the queue pair failed"}
            assert words[when] in why
            assert len(tried) == 1
            id_ = both.decode.ask(PROMPT, max_tokens=3)
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(PROMPT, 3)

    asyncio.run(main())


def test_a_receiver_that_cannot_connect_leaves_nothing_registered() -> None:
    ended: list[str] = []

    def fail(*_: object) -> None:
        raise TransferError("No route to host")

    memory = SimpleNamespace(lkey=1, close=lambda: ended.append("memory"))
    adapter = SimpleNamespace(
        device=SimpleNamespace(register=lambda *_, **__: memory), connect=fail, gpu=None
    )
    offer: Any = SimpleNamespace(
        adapter=adapter, end=END, queue=None, close=lambda: ended.append("queue pair")
    )
    events = ReceiverEvents(lambda _: None, *[lambda *_: None] * 3)  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="No route"):
        RdmaReceiver(offer, END, events)
    assert ended[:2] == ["queue pair", "memory"]

"""The peers that a router names: dialled, found again elsewhere, forgotten; never mid-session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import expected
from free_ports import free_port
from handoff_lab import BLOCK_BYTES, Instance, config, pair, start

from runtime.config import Address, PeerConfig
from runtime.engine.roles import DecodeRole
from runtime.protocol import Failed, PeerAddress, PeerGone, Tokens
from runtime.transfer import peer_client
from runtime.transfer.decode_request import DecodeSession

PROMPT = tuple(range(10))


async def prefill(name: str, port: int) -> Instance:
    return await start(config(name, "prefill", peer=Address("127.0.0.1", port)))


@contextlib.asynccontextmanager
async def decode(*configured: PeerConfig) -> AsyncIterator[Instance]:
    instance = await start(
        config(
            "decode-0",
            "decode",
            cpu_buffer_bytes=16 * BLOCK_BYTES,
            prefill_peers=list(configured),
        )
    )
    try:
        yield instance
    finally:
        await instance.close()


def path_to(d: Instance, name: str) -> str | None:
    state = d.role.peers().get(name)
    return state.path if state else None


def at(port: int) -> PeerAddress:
    return PeerAddress("127.0.0.1", port)


async def serves(d: Instance, name: str) -> None:
    answer = await d.answer(id_ := d.ask(PROMPT, prefill=name))
    assert isinstance(answer, Tokens), answer
    assert d.tokens_of(id_) == expected(PROMPT, 4)


def test_a_named_peer_is_dialled_and_a_request_can_name_only_it() -> None:
    async def main() -> None:
        port = free_port()
        p = await prefill("prefill-0", port)
        async with decode() as d:
            assert d.role.peers() == {}
            d.role.set_peers({"prefill-0": at(port)})
            await d.until(lambda: path_to(d, "prefill-0"))
            await serves(d, "prefill-0")
            refused = await d.answer(d.ask(PROMPT, prefill=f"127.0.0.1:{port}"))
            assert isinstance(refused, Failed) and refused.status == 400
        await p.close()

    asyncio.run(main())


def test_a_router_that_knows_nobody_costs_no_link() -> None:
    async def main() -> None:
        port = free_port()
        p = await prefill("prefill-0", port)
        async with decode() as d:
            d.role.set_peers({"prefill-0": at(port)})
            await d.until(lambda: path_to(d, "prefill-0"))
            d.role.set_peers({})
            await asyncio.sleep(0.2)
            assert path_to(d, "prefill-0")
            await serves(d, "prefill-0")
            await p.close()
            await d.until(lambda: PeerGone("prefill-0") in d.events)
            assert d.role.peers() == {}
            again = await prefill("prefill-0", port)
            d.role.set_peers({"prefill-0": at(port)})
            await d.until(lambda: path_to(d, "prefill-0"))
            await again.close()

    asyncio.run(main())


def test_a_peer_that_moved_is_found_at_its_new_address() -> None:
    async def main() -> None:
        old_port, new_port = free_port(), free_port()
        old = await prefill("prefill-0", old_port)
        async with decode() as d:
            d.role.set_peers({"prefill-0": at(old_port)})
            await d.until(lambda: path_to(d, "prefill-0"))
            new = await prefill("prefill-0", new_port)
            incarnation = d.role.peers()["prefill-0"].incarnation
            d.role.set_peers({"prefill-0": at(new_port)})
            await d.until(
                lambda: (
                    path_to(d, "prefill-0")
                    and d.role.peers()["prefill-0"].incarnation != incarnation
                )
            )
            await serves(d, "prefill-0")
            await new.idle()
            await new.close()
        await old.close()

    asyncio.run(main())


def test_a_configured_peer_stays_whatever_the_router_knows() -> None:
    async def main() -> None:
        port = free_port()
        async with decode(PeerConfig("prefill-0", Address("127.0.0.1", port))) as d:
            d.role.set_peers({"prefill-0": at(free_port())})
            d.role.set_peers({})
            p = await prefill("prefill-0", port)
            await d.until(lambda: path_to(d, "prefill-0"))
            await p.close()
            await d.until(lambda: not path_to(d, "prefill-0"))
            assert "prefill-0" in d.role.peers()
            assert not [e for e in d.events if isinstance(e, PeerGone)]

    asyncio.run(main())


@pytest.mark.parametrize("resumed", [False, True])
def test_requests_that_need_the_peer_are_counted(resumed: bool) -> None:
    """What a drained prefill instance still owes: not what decode goes on with alone."""

    async def main() -> None:
        port = free_port()
        p = await prefill("prefill-0", port)
        async with decode() as d:
            d.role.set_peers({"prefill-0": at(port)})
            await d.until(lambda: path_to(d, "prefill-0"))
            d.engine.pause("decode" if resumed else "adopt")
            id_ = d.ask(PROMPT)
            await d.until(lambda: d.tokens_of(id_))
            needs = lambda: d.role.peers()["prefill-0"].requests  # noqa: E731
            if resumed:
                await d.until(lambda: needs() == 0)
            else:
                assert needs() == 1
            d.engine.pause()
            await d.answer(id_)
            assert needs() == 0
        await p.close()

    asyncio.run(main())


def test_blocks_granted_in_the_turn_in_which_the_session_is_lost_are_free_again() -> None:
    async def main() -> None:
        port = free_port()
        p = await prefill("prefill-0", port)
        async with decode() as d:
            assert isinstance(d.role, DecodeRole)
            handoff, sessions = d.role._handoff, []
            opened = handoff.session_opened
            handoff.session_opened = lambda s: (sessions.append(s), opened(s))[1]  # type: ignore[method-assign]
            everything = handoff.reservations.take_spare(16)
            assert everything
            d.role.set_peers({"prefill-0": at(port)})
            await d.until(lambda: handoff.reservations.waiting)  # its path test
            sessions[0].link._reader.feed_eof()
            handoff.reservations.give_back(everything)
            await d.until(lambda: path_to(d, "prefill-0"))
            assert len(sessions) == 2 and sessions[0].writer.lost
            assert not sessions[0].writer.open
            await serves(d, "prefill-0")
            await d.idle()
        await p.close()

    asyncio.run(main())


def test_a_session_lost_in_the_turn_of_its_path_tests_answer_is_never_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with pair("shm") as both:
            real_prove, real_down = peer_client.prove_path, both.handoff.session_down
            real_up = both.handoff.peers.up
            lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            proven: list[DecodeSession] = []
            up: list[bool] = []

            async def prove(session: DecodeSession, reservations: Any) -> None:
                await real_prove(session, reservations)
                if proven:
                    return
                proven.append(session)
                session.abort("the network broke")  # type: ignore[attr-defined]
                await lost

            def down(session: DecodeSession, why: str) -> None:
                real_down(session, why)
                if session in proven and not lost.done():
                    lost.set_result(None)

            both.handoff.session_down = down
            both.handoff.peers.up = lambda s: (up.append(s.writer.lost), real_up(s))
            monkeypatch.setattr(peer_client, "prove_path", prove)
            both.cut()
            await both.decode.until(lambda: False in up)
            assert proven[0].writer.lost and up == [False]
            await serves(both.decode, "prefill-0")

    asyncio.run(main())

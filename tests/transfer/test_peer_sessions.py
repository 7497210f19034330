"""The peers that a router names: dialled, found again elsewhere, forgotten; never mid-session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from fake_engine import expected
from free_ports import free_port
from handoff_lab import BLOCK_BYTES, Instance, config, start

from runtime.config import Address, PeerConfig
from runtime.protocol import Failed, PeerAddress, PeerGone, Tokens

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

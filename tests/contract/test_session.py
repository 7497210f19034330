"""What holds of every session, whatever the transport: proof of the token, checks, choice of the
path.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
from collections.abc import AsyncIterator
from typing import Any

import handoff_lab
import msgspec
import pytest
from fake_engine import expected
from free_ports import free_port
from gpu_stand_in import StandIn
from handoff_lab import BLOCK_BYTES, Instance, config, pair, start
from rdma_lab import KINDS, devices_for, on_gpus, path_of

from runtime.config import Address, PeerConfig, RdmaConfig
from runtime.errors import TransferError
from runtime.kv.region import Region
from runtime.protocol import PeerState
from runtime.transfer import cuda_ipc, peer_client, peer_server

ELSEWHERE = PeerConfig("prefill-7", Address("", 0))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@contextlib.asynccontextmanager
async def refused_pair(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> AsyncIterator[tuple[Instance, Instance]]:
    """Instances that will not link."""
    port = free_port()
    address = Address("127.0.0.1", port)
    gpu = prefill.pop("gpu", False), decode.pop("gpu", False)
    p = await start(config("prefill-0", "prefill", peer=address, **prefill), gpu=gpu[0])
    peers = decode.pop("prefill_peers", [PeerConfig("prefill-0", address)])
    peers = [PeerConfig(peer.name, address) for peer in peers]
    d = await start(
        config(
            "decode-0",
            "decode",
            cpu_buffer_bytes=16 * BLOCK_BYTES,
            prefill_peers=peers,
            **decode,
        ),
        gpu=gpu[1],
    )
    try:
        yield p, d
    finally:
        await d.close()
        await p.close()


def reason(d: Instance) -> str:
    states = [e for e in d.events if isinstance(e, PeerState)]
    assert all(e.path is None for e in states)
    return states[-1].reason if states else ""


def why_refused(prefill: dict[str, Any], decode: dict[str, Any]) -> str:
    async def main() -> str:
        async with refused_pair(prefill, decode) as (p, d):
            await d.until(lambda: reason(d))
            await asyncio.sleep(0.3)  # it stays so: dialling again changes nothing
            assert p.role.peers() == {}
            assert p.ledger.idle()
            return reason(d)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({}, {"deployment": "other"}, ["deployment", "other", "test"]),
        ({}, {"block_size": 8}, ["block_size", "8", "4"]),
        ({"transfer": "tcp"}, {"transfer": "shm"}, ["transfer", "shm", "tcp"]),
        ({"transfer": "shm"}, {"transfer": "tcp"}, ["transfer", "shm", "tcp"]),
        ({}, {"prefill_peers": [ELSEWHERE]}, ["prefill-0", "prefill-7"]),
    ],
)
def test_what_differs_is_named(
    prefill: dict[str, Any], decode: dict[str, Any], words: list[str]
) -> None:
    text = why_refused(prefill, decode)
    assert all(word in text for word in words), text


def test_another_model_is_refused_naming_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    real = handoff_lab.make_role

    def other_model(parts: handoff_lab.Parts) -> handoff_lab.Role:
        if parts.config.role == "decode":
            parts.fingerprint["model"] = "another"
        return real(parts)

    monkeypatch.setattr(handoff_lab, "make_role", other_model)
    text = why_refused({}, {})
    assert "(model)" in text and "another" in text and "fake" in text


def test_a_wrong_token_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = handoff_lab.make_role

    def other_token(parts: handoff_lab.Parts) -> handoff_lab.Role:
        if parts.config.role == "decode":
            object.__setattr__(parts, "token", b"another token")
        return real(parts)

    monkeypatch.setattr(handoff_lab, "make_role", other_token)
    assert "token" in why_refused({}, {})


def _hide_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two hosts: prefill's /dev/shm has no such segment."""
    real = peer_client.PeerClient.__init__

    def init(self: Any, peer: Any, local: Any, *rest: Any) -> None:
        hello = msgspec.structs.replace(local.hello, segment="pdctl-test-elsewhere")
        real(self, peer, dataclasses.replace(local, hello=hello), *rest)

    monkeypatch.setattr(peer_client.PeerClient, "__init__", init)


def test_shm_that_was_asked_for_never_becomes_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_segment(monkeypatch)
    text = why_refused({}, {"transfer": "shm"})
    assert "(transfer)" in text and "pdctl-test-elsewhere" in text


@pytest.mark.parametrize("same_host", [True, False])
def test_auto_takes_shm_where_the_segment_opens_else_tcp(
    monkeypatch: pytest.MonkeyPatch, same_host: bool
) -> None:
    if not same_host:
        _hide_segment(monkeypatch)

    async def main() -> None:
        port = free_port()
        address = Address("127.0.0.1", port)
        p = await start(config("prefill-0", "prefill", peer=address))
        d = await start(
            config(
                "decode-0",
                "decode",
                cpu_buffer_bytes=16 * BLOCK_BYTES,
                prefill_peers=[PeerConfig("prefill-0", address)],
            )
        )
        try:
            await d.until(lambda: d.peer_path)
            assert d.peer_path == ("shm" if same_host else "tcp")
            told = d.role.peers()["prefill-0"].reason
            assert told == "" if same_host else "no shm: segment pdctl-test-elsewhere" in told
            id_ = d.ask((1, 2, 3, 4, 5), max_tokens=3)
            await d.answer(id_)
            assert d.tokens_of(id_) == expected((1, 2, 3, 4, 5), 3)
        finally:
            await d.close()
            await p.close()

    asyncio.run(main())


def test_a_new_session_of_an_instance_ends_the_older_one(kind: str) -> None:
    async def main() -> None:
        async with pair(kind) as both:
            both.prefill.engine.pause("prefill")
            id_ = both.decode.ask((1, 2, 3))
            await both.decode.until(lambda: both.prefill.ledger.outgoing)
            twin = await start(
                config(
                    "decode-0",
                    "decode",
                    cpu_buffer_bytes=16 * BLOCK_BYTES,
                    prefill_peers=both.decode.config.prefill_peers,
                    transfer=path_of(kind),
                    rdma=RdmaConfig(**devices_for(kind)[1]),
                ),
                gpu=on_gpus(kind),
            )
            await twin.until(lambda: twin.peer_path)
            failed = await both.decode.answer(id_)
            assert failed.leg == "prefill"  # type: ignore[union-attr]
            await twin.close()
            both.prefill.engine.pause()
            await both.decode.until(lambda: both.handoff.peers._up)

    asyncio.run(main())


def test_strangers_are_cut_off(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "HANDSHAKE_S", 0.3)

    async def main() -> None:
        async with pair(kind) as both:
            for first in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"pdctl/1\n" + b"0" * 64, b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", both.port)
                writer.write(first)
                async with asyncio.timeout(5):
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(1000):
                            pass
                writer.close()
            id_ = both.decode.ask((1, 2, 3), max_tokens=2)
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected((1, 2, 3), 2)

    asyncio.run(main())


def test_a_connection_that_breaks_at_the_worst_moment_is_only_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = peer_server.detach
    failed: list[int] = []
    unhandled: list[dict[str, Any]] = []

    def broken_once(fd: int) -> Any:
        if not failed:
            failed.append(fd)
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return real(fd)

    async def reset(_: asyncio.StreamWriter) -> None:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        async with pair("tcp"):
            assert failed
        monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", reset)
        async with refused_pair({}, {"deployment": "another"}) as (_, d):
            await d.until(lambda: "another" in reason(d))

    monkeypatch.setattr(peer_server, "detach", broken_once)
    asyncio.run(main())
    assert not unhandled


# ---- cuda_ipc ----------------------------------------------------------------------------------


def test_auto_takes_cuda_ipc_between_gpus_of_one_host() -> None:
    async def main() -> None:
        async with pair("cuda_ipc", transfer="auto") as both:
            assert both.decode.role.peers()["prefill-0"].reason == ""
            prompt = tuple(range(1, 30))
            id_ = both.decode.ask(prompt, max_tokens=3)
            last = await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected(prompt, 3)
            assert last.served.path == "cuda_ipc"  # type: ignore[union-attr]

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["share", "map", "pool", "read"])
def test_auto_takes_shm_where_a_gpu_cannot_be_reached_and_says_why(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> Any:
        raise TransferError("stand-in failure")

    def move_other(engine: Any, to: Region, source: Region, runs: Any) -> int:
        return move(engine, to, Region(source.address + BLOCK_BYTES, source.nbytes), runs)

    real, move = StandIn.share, cuda_ipc.move
    wrong: tuple[Any, str, Any] = {
        "share": (StandIn, "share", fail),
        "map": (StandIn, "map", fail),
        # As if the place within the allocation were another: the path test sees it.
        "pool": (StandIn, "share", lambda self, address: (real(self, address)[0], 0)),
        # As if prefill read other blocks than meant.
        "read": (cuda_ipc, "move", move_other),
    }[broken]
    monkeypatch.setattr(*wrong)

    async def main() -> None:
        async with pair("shm", gpu=True, transfer="auto") as both:
            told = both.decode.role.peers()["prefill-0"].reason
            assert told.startswith("no cuda_ipc: ")
            words = {
                "pool": "other bytes than those sent are in the device pool",
                "read": "other bytes than those sent are in the buffer",
            }
            assert words.get(broken, "stand-in failure") in told
            id_ = both.decode.ask((1, 2, 3, 4, 5), max_tokens=3)
            await both.decode.answer(id_)
            assert both.decode.tokens_of(id_) == expected((1, 2, 3, 4, 5), 3)

    asyncio.run(main())


@pytest.mark.parametrize(("prefill", "decode"), [(False, True), (True, False), (False, False)])
def test_cuda_ipc_that_was_asked_for_needs_both_on_gpus(prefill: bool, decode: bool) -> None:
    text = why_refused({"gpu": prefill}, {"gpu": decode, "transfer": "cuda_ipc"})
    assert "cuda_ipc was asked for" in text and "its KV cache is not on a GPU" in text
    assert ("decode-0" if not decode else "prefill-0") in text.partition("asked for")[2]

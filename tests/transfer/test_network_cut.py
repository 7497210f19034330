"""A network that drops every packet between prefill and decode, in two network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cores import Core, Cores, running_cores
from fake_engine import expected

from runtime.protocol import Failed

PROMPT = tuple(range(100))
BLOCK_BYTES = 2 * 2 * 8 * 4 * 16
PREFILL, DECODE, PORT = "10.77.0.1", "10.77.0.2", 4242


class Wire:
    """A veth pair between two namespaces."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.names = [f"pdctl-{tag}-p", f"pdctl-{tag}-d"]

    def ip(self, *args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)

    def lay(self) -> None:
        prefill, decode = self.names
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        self.ip(
            "-n", prefill, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", decode
        )
        for name, address in zip(self.names, (PREFILL, DECODE), strict=True):
            self.ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "eth0", "up")

    def cut(self) -> None:
        self.ip("-n", self.names[0], "link", "set", "eth0", "down")

    def mend(self) -> None:
        self.ip("-n", self.names[0], "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.ip("netns", "delete", name)


@pytest.fixture
def wire() -> Iterator[Wire]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and `ip`")
    made = Wire()
    try:
        made.lay()
    except subprocess.CalledProcessError as e:
        made.remove()
        pytest.skip(f"no network namespaces here: {e.stderr.decode().strip()}")
    try:
        yield made
    finally:
        made.remove()


async def start(cores: Cores, wire: Wire, kind: str, device: str) -> tuple[Core, Core]:
    address = {"host": PREFILL, "port": PORT}
    prefill = cores.config("prefill-0", "prefill", "fake", peer=address)
    decode = cores.config(
        "decode-0",
        "decode",
        "fake",
        cpu_buffer_bytes=64 * BLOCK_BYTES,
        prefill_peers=[{"name": "prefill-0", "address": address}],
        transfer=kind,
        device=device,
    )
    # One block of KV at a time: the network is cut in the middle of a prompt.
    p, d = await asyncio.gather(
        *(
            cores.start(config, fake=True, within=("ip", "netns", "exec", name), env=env)
            for config, name, env in (
                (prefill, wire.names[0], {"FAKE_STEP_S": "0.05"}),
                (decode, wire.names[1], {}),
            )
        )
    )
    await d.linked("prefill-0")
    return p, d


@pytest.mark.parametrize(("kind", "device"), [("tcp", "cuda:0"), ("shm", "cpu")])
def test_a_cut_network_fails_what_needs_it_and_leaves_nothing(
    tmp_path: Path, wire: Wire, kind: str, device: str
) -> None:
    async def scenario(cores: Cores) -> None:
        prefill, decode = await start(cores, wire, kind, device)
        assert (await decode.ask(PROMPT, max_tokens=3)).tokens == expected(PROMPT, 3)
        late = decode.send(PROMPT[::-1], deadline_s=2.0)
        lost = decode.send((7, *PROMPT), deadline_s=60.0)
        await decode.ledger(lambda ledger: ledger.reservations > 0)
        wire.cut()
        for id_, status in ((late, 504), (lost, 502)):
            last = (await decode.wait(id_)).last
            assert isinstance(last, Failed)
            assert (last.status, last.leg) in ((status, "prefill"), (status, "transfer"))
        await decode.until(lambda: decode.peers["prefill-0"].path is None)
        held = (await decode.stats()).ledger
        # shm: the writer may have missed everything but the cut: its blocks are nobody's.
        assert bool(held.quarantined_blocks) == (kind == "shm"), held
        wire.mend()
        await decode.linked("prefill-0")
        assert (await decode.ask((8, *PROMPT), max_tokens=3)).tokens == expected((8, *PROMPT), 3)
        await decode.idle()
        await prefill.idle()

    async def main() -> None:
        async with running_cores(tmp_path) as cores:
            await scenario(cores)
        assert cores.segments() == []

    asyncio.run(main())

"""Stands in for the engine core: the real link protocol, output dictated by the prompt.

A prompt may contain a JSON object that says what to do, for example
    {"say": "text", "burst": 2, "delay": 0.01, "fail_at": 3, "status": 502, "die_at": 1, "hang":
    true} Tokens are bytes (the tests' tokenizer gives byte b the id b). It counts aborts in its
    Stats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
from typing import Any

from runtime.link import Link, LinkClosed
from runtime.protocol import (
    Abort,
    Command,
    CoreReady,
    Failed,
    Generate,
    GetStats,
    Ledger,
    Measure,
    Measured,
    OutputToken,
    PeerGone,
    PeerState,
    RequestId,
    Served,
    SetPeers,
    Stats,
    TokenLogprob,
    Tokens,
)

EOS = 257


class FakeCore:
    def __init__(self, link: Link[Command], options: argparse.Namespace) -> None:
        self.link = link
        self.options = options
        self.running: dict[str, asyncio.Task[None]] = {}
        self.aborts = 0
        self.peers: set[str] = set()
        self.generates: list[Generate] = []

    async def greet(self) -> None:
        await asyncio.sleep(self.options.load)
        self.link.send(
            CoreReady(
                incarnation="inc-1",
                fingerprint={"model": "fake", "layers": 1},
                max_model_len=self.options.context,
                vocab_size=300,
                eos_token_ids=(EOS,),
                num_device_blocks=64,
                num_buffer_blocks=32,
                load_s=0.5,
                self_test_s=0.25,
            )
        )
        peer = PeerState(name="prefill-0", path="shm", incarnation="inc-p")
        if self.options.unlinked:
            peer = PeerState(name="prefill-0", path=None, reason="connection refused")
        self.link.send(peer)

    async def serve(self) -> None:
        while True:
            match await self.link.receive():
                case Generate() as request:
                    self.generates.append(request)
                    self.running[request.id] = asyncio.create_task(self.generate(request))
                case Abort(id=id_):
                    self.abort(id_)
                case GetStats(seq=seq):
                    self.link.send(self.stats(seq))
                case Measure() as ask:
                    self.link.send(self.measured(ask))
                case SetPeers(peers=peers):
                    self.set_peers(set(peers))

    def set_peers(self, names: set[str]) -> None:
        """Never linked, and gone as soon as they are not named."""
        for name in names - self.peers:
            self.link.send(PeerState(name=name, path=None, reason="no route"))
        for name in self.peers - names:
            self.link.send(PeerGone(name))
        self.peers = names

    def abort(self, id_: RequestId) -> None:
        self.aborts += 1
        task = self.running.pop(id_, None)
        if task is not None:
            task.cancel()
            if not self.options.silent_aborts:
                served = self.served(self.generates[-1])
                self.link.send(Tokens(id=id_, tokens=(), finish="abort", served=served))

    def stats(self, seq: int) -> Stats:
        last = self.generates[-1] if self.generates else None
        return Stats(
            seq=seq,
            ledger=Ledger(requests=len(self.running), running=len(self.running)),
            device_blocks_total=64,
            device_blocks_cached=2,
            buffer_blocks_total=32,
            peers={"prefill-0": PeerState(name="prefill-0", path="shm")},
            counters={
                "aborts": self.aborts,
                "generates": len(self.generates),
                "last_seed": last.params.seed if last else -1,
                "last_deadline_s": last.deadline_s if last else -1,
                "last_named_prefill": float(last is not None and last.prefill == "prefill-0"),
            },
        )

    def measured(self, ask: Measure) -> Measured:
        if ask.blocks > 32:
            return Measured(seq=ask.seq, error="no 33 blocks to be had", status=503)
        path = "shm" if ask.what == "path" else ""
        return Measured(seq=ask.seq, path=path, nbytes=ask.blocks * 4096, seconds=0.5)

    async def generate(self, request: Generate) -> None:
        script = script_of(request)
        tokens = [*script.get("say", "ok").encode(), EOS]
        if request.params.ignore_eos:
            tokens = tokens[:-1] * -(-request.params.max_tokens // (len(tokens) - 1))
        cut = tokens[: request.params.max_tokens]
        burst = script.get("burst", 1)
        first = self.served(request, kv_bytes=0)
        for at in range(0, len(cut), burst):
            if at >= script.get("die_at", 1 << 30):
                os._exit(7)
            if at >= script.get("fail_at", 1 << 30):
                return self.fail(request, script)
            if script.get("hang") and at:
                await asyncio.sleep(3600)
            part = cut[at : at + burst]
            last = at + burst >= len(cut)
            self.link.send(
                Tokens(
                    id=request.id,
                    tokens=tuple(output(t, request.params.logprobs) for t in part),
                    finish=None if not last else "stop" if cut[-1] == EOS else "length",
                    served=self.served(request) if last else first if at == 0 else None,
                )
            )
            await self.link.drain()
            await asyncio.sleep(script.get("delay", 0))
        self.running.pop(request.id, None)

    def fail(self, request: Generate, script: dict[str, Any]) -> None:
        self.running.pop(request.id, None)
        self.link.send(
            Failed(
                id=request.id,
                message="scripted failure",
                status=script.get("status", 502),
                leg=script.get("leg", "prefill"),
                instance="prefill-0",
                retry_after_s=script.get("retry_after_s"),
                code=script.get("code"),
            )
        )

    def served(self, request: Generate, *, kv_bytes: int = 4096) -> Served:
        return Served(
            prefill="prefill-0",
            decode=self.options.name,
            path="shm",
            kv_bytes=kv_bytes,
            prompt_tokens=len(request.prompt),
            cached_tokens=3,
            decode_cached_tokens=2,
            stages={"reserve": 0.001, "prefill": 0.002, "transfer": 0.003, "decode": 0.004},
        )


def script_of(request: Generate) -> dict[str, Any]:
    text = bytes(t for t in request.prompt if t < 256).decode("utf-8", "replace")
    start, end = text.find("{"), text.rfind("}")
    script: dict[str, Any] = json.loads(text[start : end + 1]) if 0 <= start < end else {}
    return script


def output(token: int, logprobs: int | None) -> OutputToken:
    if logprobs is None:
        return OutputToken(token)
    top = tuple((97 + i, -0.5 - i) for i in range(logprobs))
    return OutputToken(token, TokenLogprob(token, -0.25, top))


async def main(options: argparse.Namespace) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=options.fd))
    link: Link[Command] = Link(reader, writer, Command)
    core = FakeCore(link, options)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)  # as the real one
    greeting = asyncio.create_task(core.greet())
    try:
        await core.serve()
    except LinkClosed:
        greeting.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("fd", type=int)
    parser.add_argument("name")
    parser.add_argument("--load", type=float, default=0.0, help="seconds before it is ready")
    parser.add_argument("--unlinked", action="store_true", help="its prefill peer is down")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--silent-aborts", action="store_true")
    asyncio.run(main(parser.parse_args()))

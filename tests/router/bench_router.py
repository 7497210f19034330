"""What the router costs beside going direct: requests per second, added latency, CPU per request.

Run: python tests/router/bench_router.py [--seconds S] [--connections N] [--chunks N]
Backend, router and load are three processes; direct and routed runs alternate, so that both meet
the same machine. Not a test: pytest does not collect it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from runtime.protocol import PROTOCOL_VERSION

TOKEN = "bench-token"
EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
)
ANSWER = json.dumps({"id": "cmpl-1", "choices": [{"index": 0, "text": " word" * 32}]}).encode()


class Backend(asyncio.Protocol):
    """As little HTTP server as possible: one answer per request, streamed when asked to."""

    chunks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pending = b""

    def data_received(self, data: bytes) -> None:
        self._pending += data
        head, found, rest = self._pending.partition(b"\r\n\r\n")
        if not found or len(rest) < _content_length(head):
            return
        streams = b'"stream": true' in rest
        self._pending = b""
        if not streams:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(ANSWER), ANSWER)
            )
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        self._next(self.chunks)

    def _next(self, left: int) -> None:
        """One event per turn of the loop, each a write of its own, as tokens come."""
        if left == 0:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
        asyncio.get_running_loop().call_later(0.001, self._next, left - 1)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def _backend(chunks: int) -> None:
    Backend.chunks = chunks
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass(slots=True)
class Result:
    requests: int
    seconds: float
    p50_us: float
    p99_us: float

    @property
    def rate(self) -> float:
        return self.requests / self.seconds


def _request(stream: bool) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "word " * 200, "stream": stream}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


async def _client(port: int, stream: bool, until: float, times: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request(stream)
    while time.perf_counter() < until:
        start = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"unexpected answer: {head!r}")
        if stream:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await reader.readexactly(_content_length(head))
        times.append(time.perf_counter() - start)
    writer.close()


async def _load(port: int, stream: bool, connections: int, seconds: float) -> Result:
    times: list[float] = []
    start = time.perf_counter()
    clients = (_client(port, stream, start + seconds, times) for _ in range(connections))
    await asyncio.gather(*clients)
    elapsed = time.perf_counter() - start
    cuts = statistics.quantiles(times, n=100)
    return Result(len(times), elapsed, cuts[49] * 1e6, cuts[98] * 1e6)


def _cpu_seconds(pid: int) -> float:
    """Of the router's main thread, in nanoseconds' grain: ticks are too coarse for short runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def _deployment(chunks: int) -> Iterator[tuple[int, int, int]]:
    """(backend port, router port, router pid)"""
    me = [sys.executable, __file__, "--backend", str(chunks)]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(me, stdout=subprocess.PIPE, text=True) as backend,
    ):
        assert backend.stdout is not None
        backend_port = int(backend.stdout.readline())
        # The probe gets an answer from it too: any path is fine for this backend.
        router_port = _free_port()
        config = _write_config(Path(folder), router_port)
        command = [sys.executable, "-m", "runtime", "router", "--config", str(config)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as router:
            try:
                _register(router_port, backend_port)
                yield backend_port, router_port, router.pid
            finally:
                router.terminate()
                backend.terminate()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _write_config(folder: Path, port: int) -> Path:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    path = folder / "router.json"
    config = {
        "deployment": "bench",
        "token_file": str(token),
        "listen": {"host": "127.0.0.1", "port": port},
        "heartbeat_timeout_s": 3600.0,
    }
    path.write_text(json.dumps(config))
    return path


def _register(router_port: int, backend_port: int) -> None:
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        info = {
            "version": PROTOCOL_VERSION,
            "name": name,
            "role": role,
            "url": f"http://127.0.0.1:{backend_port}",
            "incarnation": "one",
            "ready": True,
            "model": "tiny",
            "fingerprint": {},
            "max_model_len": 4096,
            "peers": {"prefill-0": "shm"} if role == "decode" else {},
        }
        _retry(
            urllib.request.Request(
                f"http://127.0.0.1:{router_port}/internal/register",
                json.dumps(info).encode(),
                {"Authorization": f"Bearer {TOKEN}"},
            )
        )
    _retry(urllib.request.Request(f"http://127.0.0.1:{router_port}/ready"))


def _retry(request: urllib.request.Request) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).read()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _compare(ports: tuple[int, int, int], stream: bool, connections: int, seconds: float) -> None:
    backend, router, pid = ports
    uvloop.run(_load(router, stream, connections, 0.5))  # warm up
    direct, routed, cpu = [], [], 0.0
    for _ in range(3):
        direct.append(uvloop.run(_load(backend, stream, connections, seconds / 3)))
        before = _cpu_seconds(pid)
        routed.append(uvloop.run(_load(router, stream, connections, seconds / 3)))
        cpu += _cpu_seconds(pid) - before
    name = f"{'stream' if stream else 'json'}, {connections} connection(s)"
    d, r = statistics.median(x.rate for x in direct), statistics.median(x.rate for x in routed)
    d50 = statistics.median(x.p50_us for x in direct)
    r50, r99 = (
        statistics.median(x.p50_us for x in routed),
        statistics.median(x.p99_us for x in routed),
    )
    per_request = cpu / sum(x.requests for x in routed) * 1e6
    print(
        f"{name:26s} direct {d:7.0f}/s p50 {d50:7.0f} us | routed {r:6.0f}/s p50 {r50:7.0f} us "
        f"p99 {r99:7.0f} us | ratio {r / d:.2f}, added p50 {r50 - d50:6.0f} us, "
        f"router CPU {per_request:5.0f} us/request"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--backend", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.backend is not None:
        uvloop.run(_backend(args.backend))
        return
    with _deployment(args.chunks) as ports:
        for stream in (False, True):
            for connections in (1, args.connections):
                _compare(ports, stream, connections, args.seconds)


if __name__ == "__main__":
    main()

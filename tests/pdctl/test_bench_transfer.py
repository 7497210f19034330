"""`pdctl bench transfer`: what it asks instances, and what it makes of the answers."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from pdctl import cli
from pdctl.bench import transfer, transfer_report
from pdctl.bench.transfer import Pair, Row, Transfers
from pdctl.find import ANYWHERE
from pdctl.output import Screen
from pdctl.status import DeploymentStatus, ServiceStatus

BLOCK = 1 << 20
SECONDS_A_BLOCK = {"path": 0.002, "memcpy": 0.001, "socket": 0.004}


class Decode(ThreadingHTTPServer):
    """A decode instance's front, as far as this command sees it."""

    daemon_threads = True
    busy = 0
    buffer_blocks = 16
    interrupt_at = -1

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Decode

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"totals": {"buffer_blocks_total": self.server.buffer_blocks}})

    def do_POST(self) -> None:
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tokens.add(self.headers["Authorization"])
        self.server.asked.append(ask)
        if self.server.busy:
            self.server.busy -= 1
            self._answer(503, {"error": {"message": "requests come first"}})
        elif ask["peer"] == "prefill-1":
            self._answer(502, {"error": {"message": "prefill-1 was lost"}})
        else:
            seconds = SECONDS_A_BLOCK[ask["what"]] * ask["blocks"]
            self._answer(200, {"path": "shm", "nbytes": ask["blocks"] * BLOCK, "seconds": seconds})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, peers: dict[str, str | None]) -> Iterator[Decode]:
    server = Decode()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    decode = ServiceStatus(
        name="decode-0",
        role="decode",
        host="local",
        state="running",
        health="healthy",
        reason="",
        pid=1,
        uptime_s=1.0,
        url=f"http://127.0.0.1:{server.server_address[1]}",
        ports={},
        supervised=True,
        exit=None,
        strays=(),
        peers=peers,
    )
    found = DeploymentStatus("demo", "http://router", (decode,))
    monkeypatch.setattr(transfer, "status", lambda *_: found)
    monkeypatch.setattr(transfer, "_token", lambda *_: "secret")
    monkeypatch.setattr(transfer, "_BUSY_S", 0.01)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def silent(_: str) -> None:
    pass


def test_it_measures_a_pair_beside_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, {"prefill-0": "shm", "prefill-2": None}) as server:
        found = transfer.measure("demo", ANYWHERE, 3, silent)
    (pair,) = found.pairs
    assert (pair.prefill, pair.decode, pair.path) == ("prefill-0", "decode-0", "shm")
    assert pair.block_bytes == BLOCK and len(pair.latencies_s) == transfer.LATENCIES
    assert server.tokens == {"Bearer secret"}
    assert max(a["blocks"] for a in server.asked) == server.buffer_blocks // 2
    assert [row.run for row in pair.rows] == [1, 4]  # 16 at a time do not fit
    for row in pair.rows:
        assert all(len(speeds) == 3 for speeds in row.speeds.values())
        assert row.median("path") == pytest.approx(BLOCK / 0.002 / 1e9)
        assert transfer_report.ratio(pair, row) == pytest.approx(0.5)  # of memcpy
    assert not found.failed and not found.partial


def test_a_full_buffer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, {"prefill-0": "tcp"}) as server:
        server.busy = 2
        found = transfer.measure("demo", ANYWHERE, 1, silent)
        assert not found.failed
        assert transfer_report.ratio(found.pairs[0], found.pairs[0].rows[0]) == pytest.approx(2.0)
        server.busy = 1000
        assert "requests come first" in transfer.measure("demo", ANYWHERE, 1, silent).pairs[0].error


def test_one_pair_that_fails_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, {"prefill-0": "shm", "prefill-1": "shm"}):
        result = CliRunner().invoke(cli.app, ["bench", "transfer", "--rounds", "1", "--json"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["schema"] == "pdctl.bench.transfer/1" and not document["partial"]
    good, bad = document["pairs"]
    assert good["error"] is None and good["rows"][0]["ratio_to_limit"] == pytest.approx(0.5)
    assert good["one_block_s"]["p50"] == pytest.approx(0.002)
    assert "prefill-1 was lost" in bad["error"] and bad["rows"] == []


def test_an_interrupt_shows_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfer.post_json
    asked = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked > transfer.LATENCIES + 10:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(transfer, "post_json", interrupted)
    with serving(monkeypatch, {"prefill-0": "shm"}):
        result = CliRunner().invoke(cli.app, ["bench", "transfer"])
    assert result.exit_code == 130
    assert "one block of 1024 KiB in 2.00 ms" in result.stdout
    assert "interrupted: the rest was not measured" in result.stdout


def test_nothing_to_measure_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, {"prefill-0": None}):
        result = CliRunner().invoke(cli.app, ["bench", "transfer"])
    assert result.exit_code != 0 and "no healthy decode instance" in str(result.exception)


def test_the_table() -> None:
    row = Row(4, {"path": [2.0, 4.0, 3.0], "memcpy": [6.0] * 3, "socket": [2.0] * 3})
    pair = Pair("prefill-0", "decode-0", "tcp", "http://h", BLOCK, [0.001, 0.003, 0.002], [row])
    screen = Screen.of(io.StringIO())
    lines = transfer_report.text(Transfers("demo", [pair]), screen).splitlines()
    assert lines[0].startswith("prefill-0 to decode-0 over tcp: one block of 1024 KiB in 2.00 ms")
    assert lines[1].split("  ")[-1] == "of socket loop"
    assert lines[2].split() == ["4096", "3.00", "6.00", "2.00", "1.50"]


@pytest.mark.parametrize("argv", [["bench", "--explain"], ["bench", "serve", "--explain"]])
def test_bench_itself_stays_a_command(argv: list[str]) -> None:
    result = CliRunner().invoke(cli.app, argv)
    assert result.exit_code == 0 and "TTFT" in result.stdout

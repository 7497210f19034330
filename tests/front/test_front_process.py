"""The worker front as a process: start that cannot work, drain, the core's death, registration."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from free_ports import free_port

from runtime.config import Address, ModelConfig, WorkerConfig
from runtime.errors import ConfigError
from runtime.front.server import serve_worker
from runtime.protocol import PeerAddress
from runtime.router_protocol import Registration, RegistrationReply

HERE = Path(__file__).parent
ENV = os.environ | {"PYTHONPATH": str(HERE.parents[1])}


class Worker:
    """One front process and what one would do to it."""

    def __init__(self, argv: list[str], port: int) -> None:
        self.port = port
        self.process = subprocess.Popen(
            [sys.executable, *argv], env=ENV, stderr=subprocess.PIPE, text=True
        )

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                pass
            assert self.process.poll() is None, self.stderr()
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.05)

    def post(self, **script: Any) -> http.client.HTTPResponse:
        """A streaming completion; returns once its first token is there."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        body = {"model": "tiny", "prompt": json.dumps(script), "stream": True, "max_tokens": 100}
        connection.request("POST", "/v1/completions", json.dumps(body))
        return connection.getresponse()

    def core(self) -> psutil.Process:
        (core,) = psutil.Process(self.process.pid).children()
        return core

    def stderr(self) -> str:
        return self.process.communicate(timeout=20)[1]


Start = Callable[..., Worker]


@pytest.fixture
def start(byte_model: Path, token_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a worker over the scripted core; what still runs at the end is stopped."""
    workers: list[Worker] = []

    def start_worker(**changes: Any) -> Worker:
        listen = {"listen": Address("127.0.0.1", free_port())}
        config = worker_config(byte_model, token_file, **(listen | changes))
        file = tmp_path / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        worker = Worker([str(HERE / "fake_worker.py"), str(file)], config.listen.port)
        workers.append(worker)
        return worker

    yield start_worker
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait(10)
        if worker.process.stderr is not None:
            worker.process.stderr.close()


def worker_config(model: Path, token_file: Path, **changes: Any) -> WorkerConfig:
    defaults: dict[str, Any] = {
        "deployment": "test",
        "name": "decode-0",
        "role": "decode",
        "token_file": str(token_file),
        "advertise": "127.0.0.1",
        "model": ModelConfig(str(model), "tiny"),
        "kv_cache_bytes": 1 << 20,
        "shm_prefix": "pdctl.test.decode-0",
    }
    return WorkerConfig(**(defaults | changes))


def text_of(raw: bytes) -> str:
    events = [e[6:] for e in raw.decode().strip().split("\n\n")]
    return "".join(json.loads(e)["choices"][0]["text"] for e in events if e != "[DONE]")


# ---- stopping ------------------------------------------------------------------------------------


def test_sigterm_finishes_what_runs_and_takes_nothing_new(start: Start) -> None:
    worker = start()
    worker.wait_ready()
    core = worker.core()
    running = worker.post(say="0123456789", delay=0.1)
    worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 5
    while worker.get("/ready")[0] != 503:
        assert time.monotonic() < deadline
    assert "draining" in worker.get("/ready")[1]["waiting_for"]
    assert worker.get("/health")[0] == 200
    refused = worker.post(say="x")
    assert refused.status == 503 and refused.getheader("Retry-After")
    raw = running.read()
    assert text_of(raw) == "0123456789" and raw.endswith(b"data: [DONE]\n\n")
    assert worker.process.wait(10) == 0
    assert not core.is_running()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_sigterm_finishes_a_request_that_still_arrives(start: Start, path: str) -> None:
    worker = start()
    worker.wait_ready()
    said = json.dumps({"say": "abc"})
    asked = (
        {"messages": [{"role": "user", "content": said}]} if "chat" in path else {"prompt": said}
    )
    body = json.dumps({"model": "tiny"} | asked).encode()
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:10])
    deadline = time.monotonic() + 5
    while worker.get("/ledger")[1]["front_requests"] != 1:
        assert time.monotonic() < deadline, "it is not known"
        time.sleep(0.02)
    worker.process.send_signal(signal.SIGTERM)
    while worker.get("/ready")[0] != 503:
        assert time.monotonic() < deadline
    connection.send(body[10:])
    answer = connection.getresponse()
    assert answer.status == 200
    assert "abc" in answer.read().decode() or path == "/tokenize"
    assert worker.process.wait(10) == 0


def test_drain_has_a_deadline(start: Start) -> None:
    worker = start(drain_timeout_s=0.3)
    worker.wait_ready()
    running = worker.post(say="ab", hang=True)
    began = time.monotonic()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(10) == 0
    assert time.monotonic() - began < 15
    with pytest.raises(http.client.IncompleteRead):
        running.read()


def test_a_second_signal_ends_at_once(start: Start) -> None:
    worker = start(drain_timeout_s=60.0)
    worker.wait_ready()
    core = worker.core()
    running = worker.post(say="ab", hang=True)
    worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 5
    while worker.get("/ready")[0] != 503:
        assert time.monotonic() < deadline
    began = time.monotonic()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(10) == 0
    assert time.monotonic() - began < 15
    assert not core.is_running()
    running.close()


def test_a_stop_of_all_at_once_alarms_nobody(start: Start, router: Router) -> None:
    """The router first, then both processes by one signal, as `down` does it."""
    worker = start(router=router.url)
    worker.wait_ready()
    router.seen.get(timeout=5)
    worker.post(say="x").read()
    router.shutdown()
    router.server_close()
    core = worker.core()
    worker.process.send_signal(signal.SIGTERM)
    core.send_signal(signal.SIGTERM)
    log = worker.stderr()
    assert " output tokens in " in log and "client's id" not in log
    assert "the engine core has ended" in log or "draining" in log
    assert "ERROR" not in log and "WARNING" not in log and "Traceback" not in log


def test_the_fronts_death_ends_the_core(start: Start) -> None:
    worker = start()
    worker.wait_ready()
    core = worker.core()
    worker.process.kill()
    core.wait(5)


def test_what_is_no_http_is_answered_and_not_logged(start: Start) -> None:
    worker = start()
    worker.wait_ready()
    with socket.create_connection(("127.0.0.1", worker.port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nbad header\r\n\r\n")
        assert b" 400 " in client.recv(65536)
    worker.process.send_signal(signal.SIGTERM)
    log = worker.stderr()
    assert "draining" in log and "Traceback" not in log


# ---- the core's death ---------------------------------------------------------------------------


def test_core_death_fails_requests_and_ends_the_front(start: Start) -> None:
    worker = start()
    worker.wait_ready()
    streaming = worker.post(say="ab", hang=True)
    waiting = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    body = {"model": "tiny", "prompt": json.dumps({"say": "abc", "hang": True})}
    waiting.request("POST", "/v1/completions", json.dumps(body))
    deadline = time.monotonic() + 5
    while worker.get("/ledger")[1]["ledger"]["requests"] < 2:
        assert time.monotonic() < deadline
    worker.core().kill()
    answer = waiting.getresponse()
    error = json.load(answer)["error"]
    assert answer.status == 502 and answer.getheader("x-pdctl-failed-leg") == "decode"
    assert (error["leg"], error["instance"]) == ("decode", "decode-0")
    assert worker.get("/health")[0] == 503
    assert worker.post(say="x").status == 502
    with pytest.raises(http.client.IncompleteRead) as broken:
        streaming.read()
    assert b'"error"' in broken.value.partial and b"[DONE]" not in broken.value.partial
    assert worker.process.wait(10) == 1
    log = worker.stderr()
    assert "the engine core ended by SIGKILL" in log and "2 requests failed" in log


# ---- a start that cannot work -------------------------------------------------------------------


def test_a_taken_port_is_one_line_and_starts_nothing(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = start(listen=Address("127.0.0.1", taken.getsockname()[1]))
        assert worker.process.wait(20) == 1
    assert "Address already in use" in worker.stderr()


def never(_: int) -> list[str]:
    raise AssertionError("the core was started")


def test_mistakes_are_found_before_the_core_starts(
    byte_model: Path, token_file: Path, tmp_path: Path
) -> None:
    def config(model: Path = byte_model, token: Path = token_file, **changes: Any) -> WorkerConfig:
        return worker_config(model, token, **({"listen": Address("127.0.0.1", 0)} | changes))

    readable = tmp_path / "readable"
    readable.write_text("x")
    readable.chmod(0o644)
    empty = tmp_path / "empty"
    empty.touch(0o600)
    cases = [
        (config(tmp_path / "none.gguf"), "No such file"),
        (config(listen=Address("192.0.2.1", 80)), "192.0.2.1:80"),
        (config(listen=Address("no-such-host.invalid", 80)), "no-such-host.invalid:80"),
        (config(token=tmp_path / "missing"), "missing"),
        (config(token=readable), "readable by others"),
        (config(api_key_file=str(readable)), "api_key_file"),
        (config(api_key_file=str(empty)), "api_key_file"),
    ]
    for mistaken, words in cases:
        with pytest.raises(ConfigError) as failure:
            serve_worker(mistaken, never)
        assert words in str(failure.value) and "\n" not in str(failure.value)


@pytest.mark.parametrize(("text", "words"), [("{", "truncated"), ('{"colour": 1}', "colour")])
def test_a_mistake_is_one_line_on_stderr(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    argv = [sys.executable, "-m", "runtime", "worker", "--config", str(file)]
    result = subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert words in result.stderr and result.stderr.count("\n") == 1, result.stderr


# ---- registration -------------------------------------------------------------------------------


class Router(http.server.ThreadingHTTPServer):
    """Takes registrations; `status` is what it answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RouterHandler)
        self.seen: queue.Queue[tuple[str | None, Registration]] = queue.Queue()
        self.status = 200
        self.reply = RegistrationReply(heartbeat_s=0.2)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class RouterHandler(http.server.BaseHTTPRequestHandler):
    server: Router

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/internal/register"
        registration = msgspec.json.decode(raw, type=Registration)
        self.server.seen.put((self.headers["Authorization"], registration))
        body = msgspec.json.encode(self.server.reply)
        if self.server.status != 200:
            body = b'{"error": {"message": "go away"}}'
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def router() -> Iterator[Router]:
    server = Router()
    yield server
    server.shutdown()
    server.server_close()


def test_registers_beats_and_leaves(start: Start, router: Router) -> None:
    worker = start(router=router.url)
    worker.wait_ready()
    deadline = time.monotonic() + 5
    while True:
        authorization, registration = router.seen.get(timeout=5)
        if registration.ready:
            break
        assert time.monotonic() < deadline
    assert authorization == "Bearer deployment-token"
    assert registration.name == "decode-0" and registration.role == "decode"
    assert registration.url == f"http://127.0.0.1:{worker.port}"
    assert registration.incarnation == "inc-1" and registration.max_model_len == 512
    assert registration.peers == {"prefill-0": "shm"}
    began = time.monotonic()
    for _ in range(3):
        router.seen.get(timeout=5)
    assert 0.3 < time.monotonic() - began < 3, "heartbeats"
    running = worker.post(say="abcdef", delay=0.1)
    worker.process.send_signal(signal.SIGTERM)
    while not (registration := router.seen.get(timeout=5)[1]).leaving:
        pass
    assert not registration.ready
    running.read()
    assert worker.process.wait(10) == 0


def test_what_the_router_says_reaches_the_core_and_comes_back(start: Start, router: Router) -> None:
    at = PeerAddress("192.0.2.7", 9100)
    router.reply = RegistrationReply(heartbeat_s=0.2, draining=True, peers={"prefill-1": at})
    worker = start(router=router.url)
    worker.wait_ready()
    deadline = time.monotonic() + 10
    while not (registration := router.seen.get(timeout=5)[1]).draining:
        assert time.monotonic() < deadline
    assert worker.post(say="x").status == 200, "drained is the router's business"
    while "prefill-1" not in registration.peers:
        registration = router.seen.get(timeout=5)[1]
        assert time.monotonic() < deadline
    assert registration.peers["prefill-1"] is None
    router.reply = RegistrationReply(heartbeat_s=0.2)
    while "prefill-1" in registration.peers or registration.draining:
        registration = router.seen.get(timeout=5)[1]
        assert time.monotonic() < deadline


def test_prefill_tells_where_decode_finds_it(start: Start, router: Router) -> None:
    worker = start(
        role="prefill",
        name="prefill-0",
        peer=Address("127.0.0.1", 9100),
        advertise="192.0.2.9",
        router=router.url,
    )
    worker.wait_ready()
    assert router.seen.get(timeout=5)[1].peer == PeerAddress("192.0.2.9", 9100)


def test_a_router_that_is_down_or_refuses_is_retried_and_logged_once(
    start: Start, router: Router
) -> None:
    router.status = 401
    worker = start(router=router.url)
    worker.wait_ready()
    for _ in range(3):
        router.seen.get(timeout=5)
    assert worker.post(say="x").status == 200, "it serves all the same"
    router.status = 200
    router.seen.get(timeout=5)
    router.seen.get(timeout=5)
    worker.process.send_signal(signal.SIGTERM)
    log = worker.stderr()
    assert log.count("cannot register with the router") == 1 and "go away" in log
    assert "registered with the router again" in log
    assert "deployment-token" not in log

"""The router as a process: how it starts, how it refuses to, how it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

from runtime.protocol import PROTOCOL_VERSION

TOKEN = "process-token"


def write_config(folder: Path, port: int, **more: Any) -> Path:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    config = {
        "deployment": "test",
        "token_file": str(token),
        "listen": {"host": "127.0.0.1", "port": port},
    }
    path = folder / "router.json"
    path.write_text(json.dumps(config | more))
    return path


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "runtime", "router", "--config", str(config)]


@contextmanager
def running(config: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(config), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def start_to_fail(config: Path) -> str:
    """The one line that a start which cannot work leaves on stderr."""
    ended = subprocess.run(command(config), capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        line = start_to_fail(write_config(tmp_path, port))
    assert line.startswith(f"router: cannot listen on 127.0.0.1:{port}: ")
    assert "taken" in line


def test_a_wrong_config_is_one_clear_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port(), polcy="round_robin")
    assert "polcy" in start_to_fail(config)


@pytest.mark.parametrize(("mode", "text"), [(0o644, "k"), (0o600, "# none\n")])
def test_a_key_file_that_is_open_or_empty_is_one_clear_line(
    tmp_path: Path, mode: int, text: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    keys.chmod(mode)
    line = start_to_fail(write_config(tmp_path, free_port(), api_key_file=str(keys)))
    assert f"api_key_file {keys}: " in line


def test_what_is_no_http_is_answered_and_not_logged(tmp_path: Path) -> None:
    port = free_port()
    with running(write_config(tmp_path, port), port) as router:
        for raw in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + raw)
                assert b" 400 " in b"".join(iter(lambda c=client: c.recv(65536), b""))
        router.terminate()
        log = router.communicate(timeout=20)[1]
    assert "stopped" in log and "Traceback" not in log


class _Decode(BaseHTTPRequestHandler):
    """An instance with a stream that lasts until the test lets it end."""

    protocol_version = "HTTP/1.1"
    may_end = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b"data: {}\n\n")
        self.may_end.wait(20)
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=20)


def _register_mixed(router: str, url: str) -> None:
    info = {
        "version": PROTOCOL_VERSION,
        "name": "mixed-0",
        "role": "mixed",
        "url": url,
        "incarnation": "one",
        "ready": True,
        "model": "tiny",
        "fingerprint": {},
        "max_model_len": 64,
    }
    _post(f"{router}/internal/register", info).read()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{router}/ready", timeout=2)
            return
        except urllib.error.HTTPError:
            time.sleep(0.02)
    raise AssertionError("the router did not become ready")


def test_sigterm_lets_streams_finish_and_takes_no_new_request(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, port)
    instance = ThreadingHTTPServer(("127.0.0.1", 0), _Decode)
    threading.Thread(target=instance.serve_forever, daemon=True).start()
    router = f"http://127.0.0.1:{port}"
    try:
        with running(config, port) as process:
            _register_mixed(router, f"http://127.0.0.1:{instance.server_address[1]}")
            stream = _post(f"{router}/v1/completions", {"model": "tiny", "stream": True})
            assert stream.readline() == b"data: {}\n"
            os.kill(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                except ConnectionRefusedError:
                    break
                time.sleep(0.02)
            else:
                raise AssertionError("it still takes connections")
            assert process.poll() is None, "it did not wait for the stream"
            _Decode.may_end.set()
            assert stream.read().endswith(b"data: [DONE]\n\n")
            assert process.wait(10) == 0
    finally:
        instance.shutdown()
        instance.server_close()


def test_the_router_imports_no_torch_and_binds_only_what_it_was_told(tmp_path: Path) -> None:
    port = free_port()
    with running(write_config(tmp_path, port), port) as process:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps
        with pytest.raises(OSError), socket.socket() as outside:
            outside.settimeout(1)
            outside.connect(("127.0.0.2", port))

"""`pdctl ask` against an endpoint that says what the test wants."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from pdctl import cli
from pdctl.ask import API_KEY_ENV, Answer, ask, describe, first_model
from pdctl.bench.client import look, open_session
from pdctl.errors import PdctlError, UsageError

README = Path(__file__).parents[2] / "README.md"
PIECE = b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n'


class Endpoint(BaseHTTPRequestHandler):
    key: ClassVar[str] = ""
    stream: ClassVar[bytes] = b""
    models: ClassVar[bytes] = b'{"data": [{"id": "toy"}]}'
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self._answer(200, self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.status, self.stream)

    def _answer(self, status: int, body: bytes) -> None:
        known = not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"
        self.send_response(status if known else 401)
        self.end_headers()
        self.wfile.write(body if known else b'{"error": {"message": "a key is needed"}}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv(API_KEY_ENV, raising=False)
    monkeypatch.setattr(Endpoint, "stream", PIECE)
    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def question(url: str) -> Answer:
    return ask(url, "?", model="toy", max_tokens=1, timeout_s=10, on_text=lambda _: None)


def test_the_key_comes_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "key", "k1")
    for refused in (first_model, question):
        with pytest.raises(PdctlError, match="401: a key is needed") as failure:
            refused(url)
        assert API_KEY_ENV in failure.value.hint
    monkeypatch.setenv(API_KEY_ENV, "k1")
    assert first_model(url) == "toy"
    assert question(url).text == "hi"


def test_why_nobody_answers_is_in_the_systems_words() -> None:
    for refused in (first_model, question):
        with pytest.raises(PdctlError, match=r"^http://127.0.0.1:9: Connection refused$"):
            refused("http://127.0.0.1:9")


@pytest.mark.parametrize("key", ["k1\n", "schlüssel-Б"])
def test_a_key_is_sent_as_the_server_reads_it(
    url: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    sent = f"Bearer {key.strip()}".encode().decode("latin-1")  # as http.server decodes headers
    monkeypatch.setattr(Endpoint, "key", sent.removeprefix("Bearer "))
    monkeypatch.setenv(API_KEY_ENV, key)
    assert first_model(url) == "toy"
    assert question(url).text == "hi"


@pytest.mark.parametrize("key", ["one\ntwo", "\udcff"])
def test_a_key_that_cannot_be_sent_is_said(
    url: str, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(API_KEY_ENV, key)
    for refused in (first_model, question, lambda _: open_session(1.0)):
        with pytest.raises(UsageError, match=f"{API_KEY_ENV} has a line break") as failure:
            refused(url)
        assert key not in str(failure.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "http://[zz]:1"),
        *("http://a b:1", "http://a..b:1", "http://" + "x" * 70, "ftp://h", "h:1", "http://"),
    ],
)
def test_an_endpoint_that_is_no_url_is_said(url: str) -> None:
    for refused in (first_model, question):
        with pytest.raises(UsageError, match="not an http URL") as failure:
            refused(url)
        assert "http://HOST:PORT" in failure.value.hint


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://a..b:1"])
def test_bench_says_it_too(url: str) -> None:
    async def asked() -> None:
        async with open_session(1.0) as session:
            await look(session, url, None)

    with pytest.raises(UsageError, match="not a URL"):
        asyncio.run(asked())


def test_a_reader_that_leaves_is_not_the_endpoints_fault(url: str) -> None:
    def gone(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ask(url, "?", model="toy", max_tokens=1, timeout_s=10, on_text=gone)


@pytest.mark.parametrize("stream", [b"data: {\n\n", b"data: 5\n\n", b'data: {"choices": [{}]}\n\n'])
def test_what_is_no_chat_stream_is_said(
    url: str, monkeypatch: pytest.MonkeyPatch, stream: bytes
) -> None:
    monkeypatch.setattr(Endpoint, "stream", stream)
    with pytest.raises(PdctlError, match="not a stream of chat chunks"):
        question(url)


BROKEN = b'data: {"error": {"message": "decode-0 died"}}\n\n'


@pytest.mark.parametrize("text", ["hi", "hi\\n"])
def test_why_it_broke_off_has_its_own_line(
    url: str, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(Endpoint, "stream", PIECE.replace(b"hi", text.encode()) + BROKEN)
    monkeypatch.setattr("sys.argv", ["pdctl", "ask", "?", "--endpoint", url])
    screen = io.StringIO()  # both streams, as a terminal has them
    with redirect_stdout(screen), redirect_stderr(screen), pytest.raises(SystemExit):
        cli.main()
    assert screen.getvalue().startswith(
        "hi\nerror: the answer failed in mid-stream: decode-0 died\n"
    )
    assert "pdctl status" in screen.getvalue()


@pytest.mark.parametrize("status", [502, 503, 504])
def test_what_cannot_be_served_now_says_where_to_look(
    url: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(Endpoint, "status", status)
    monkeypatch.setattr(Endpoint, "stream", b'{"error": {"message": "no healthy pair"}}')
    with pytest.raises(PdctlError, match=f"HTTP {status}: no healthy pair") as failure:
        question(url)
    assert "pdctl status" in failure.value.hint


def test_an_endpoint_without_a_model_is_no_broken_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "models", b'{"data": []}')
    with pytest.raises(PdctlError, match="serves no model now") as failure:
        first_model(url)
    assert "pdctl status" in failure.value.hint


def test_the_readme_shows_it_as_it_is() -> None:
    served = {
        "prefill": "prefill-0",
        "decode": "decode-0",
        "path": "shm",
        "kv_bytes": 2_211_840,
        "prompt_tokens": 42,
        "cached_tokens": 0,
        "decode_cached_tokens": 0,
        "stages": {
            "reserve": 0.2e-3,
            "prefill_queue": 0.3e-3,
            "prefill": 85.2e-3,
            "transfer": 1.5e-3,
            "swap_in": 0.0,
        },
    }
    router_ms = {"admit": 0.1, "route": 0.2}
    lines = describe(Answer("Paris.", "stop", 0.0928, 0.3739, 8, served, router_ms))
    assert "\n".join(lines) in README.read_text()

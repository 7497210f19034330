"""What pdctl reads out of the router's state: who does not serve yet, who still has requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from free_ports import free_port

from pdctl.draining import Drain, known_to
from pdctl.errors import PdctlError
from pdctl.routing import Routed, RouterClient, owed, unseen
from pdctl.services import ServiceSpec


def spec(name: str, url: str = "") -> ServiceSpec:
    role = name.partition("-")[0]
    return ServiceSpec("demo", name, role, "a", argv=("x",), url=url)  # type: ignore[arg-type]


def routed(name: str, state: str = "ready", *links: str, in_flight: int = 0) -> Routed:
    reason = "" if state == "ready" else f"{name} is {state}"
    role = name.partition("-")[0]
    return Routed(name, role, state, reason, f"{name}-now", in_flight, frozenset(links))


SERVICES = [spec(n) for n in ("router", "prefill-0", "prefill-1", "decode-0")]


UNLINKED = "the path from decode-0 to prefill-1"


def view(**changes: Routed | None) -> dict[str, Routed]:
    whole: dict[str, Routed | None] = {
        "prefill_0": routed("prefill-0"),
        "prefill_1": routed("prefill-1"),
        "decode_0": routed("decode-0", "ready", "prefill-0", "prefill-1"),
    }
    return {r.name: r for r in (whole | changes).values() if r is not None}


@pytest.mark.parametrize(
    ("seen", "lacks"),
    [
        (view(), ""),
        (None, "it does not answer"),
        (view(prefill_1=None), "prefill-1 to register"),
        (view(prefill_1=routed("prefill-1", "starting")), "prefill-1 is starting"),
        (view(prefill_1=routed("prefill-1", "draining")), ""),
        (
            view(decode_0=routed("decode-0", "ready", "prefill-0")),
            "the path from decode-0 to prefill-1",
        ),
    ],
)
def test_what_the_router_lacks(seen: dict[str, Routed] | None, lacks: str) -> None:
    assert unseen(seen, SERVICES, {}) == lacks


def test_decode_serves_only_with_a_link() -> None:
    assert routed("decode-0", "ready", "prefill-0").serves and routed("mixed-0").serves
    assert not routed("decode-0").serves
    assert not routed("decode-0", "draining", "prefill-0").serves


def test_the_former_process_is_not_the_new_one() -> None:
    assert unseen(view(), SERVICES, {"prefill-0": "prefill-0-now"}) == "prefill-0 to register"
    assert unseen(view(), SERVICES, {"prefill-0": "prefill-0-before"}) == ""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    pages: dict[str, Any]
    posted: list[tuple[str, Any, str | None]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(server.pages.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.posted.append((self.path, body, self.headers["Authorization"]))
            self.reply(server.pages.get(self.path))

        def reply(self, page: Any) -> None:
            body = json.dumps(page or {"error": {"message": "no such page"}}).encode()
            self.send_response(200 if page else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.pages, server.posted = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_the_view_and_drain_go_with_the_token(server: Server) -> None:
    router = RouterClient(server.url, "t")
    assert router.view() is None
    with pytest.raises(PdctlError, match="no such page"):
        router.drain("decode-0", True)
    server.pages["/internal/drain"] = {"name": "decode-0"}
    router.drain("decode-0", True)
    body = {"name": "decode-0", "draining": True}
    assert server.posted[-1] == ("/internal/drain", body, "Bearer t")
    with pytest.raises(PdctlError, match="does not answer"):
        RouterClient(f"http://127.0.0.1:{free_port()}", "t").drain("decode-0", True)


def ledger(front: int = 0, requests: int = 0, **peers: int) -> dict[str, Any]:
    named = {name.replace("_", "-"): {"requests": n} for name, n in peers.items()}
    return {"front_requests": front, "ledger": {"requests": requests}, "peers": named}


def test_what_a_decode_instance_owes(server: Server) -> None:
    decode = spec("decode-0", server.url)
    assert (
        owed(decode, view(decode_0=routed("decode-0", "draining", in_flight=2)), []) == "2 requests"
    )
    assert "does not answer" in owed(decode, view(), [])
    server.pages["/ledger"] = ledger(front=1)
    assert owed(decode, view(), []) == "1 request"
    server.pages["/ledger"] = ledger()
    assert owed(decode, view(), []) == ""
    assert owed(decode, view(decode_0=routed("decode-0", "dead", in_flight=2)), []) == ""


def test_what_a_prefill_instance_owes_is_known_at_decode_too(server: Server) -> None:
    """A request that waits for room there will still come."""
    prefill, decode = spec("prefill-0", server.url), spec("decode-0", server.url)
    server.pages["/ledger"] = ledger(requests=7, prefill_0=3)
    assert owed(prefill, view(), [decode]) == "3 requests of decode-0"
    server.pages["/ledger"] = ledger(requests=2)
    assert owed(prefill, view(), [decode]) == "2 requests"
    server.pages["/ledger"] = ledger()
    assert owed(prefill, view(), [decode]) == ""


def test_a_decode_instance_that_does_not_answer_may_have_requests(server: Server) -> None:
    prefill = spec("prefill-0", server.url)
    decode = spec("decode-0", f"http://127.0.0.1:{free_port()}")
    server.pages["/ledger"] = ledger()
    assert "decode-0" in owed(prefill, view(), [decode])
    assert owed(prefill, view(decode_0=routed("decode-0", "dead")), [decode]) == ""


def test_a_router_that_does_not_answer_is_not_one_without_requests(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdctl.draining.ROUTER_S", 0.2)
    router, prefill = RouterClient(server.url, "t"), spec("prefill-0", server.url)
    assert known_to(router, [prefill]) == {}
    left = Drain(router, [prefill], [prefill]).wait(0.2, lambda _: None)
    assert "does not answer" in left["prefill-0"]
    server.pages["/internal/instances"] = {
        "instances": [{"name": "prefill-0", "role": "prefill", "state": "ready"}]
    }
    server.pages["/ledger"] = ledger()
    assert known_to(router, [prefill]) == {"prefill-0": ""}
    assert Drain(router, [prefill], [prefill]).wait(0.2, lambda _: None) == {}


def test_who_was_drained_before_is_not_given_back_by_a_router_that_was_late(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdctl.draining.ROUTER_S", 0.2)
    router, decode = RouterClient(server.url, "t"), spec("decode-0", server.url)
    drain = Drain(router, [decode], [decode])
    with pytest.raises(PdctlError, match="does not answer"), drain.held(lambda _: None):
        pass
    assert server.posted == [], "nothing is marked then"

    drained = {"name": "decode-0", "role": "decode", "state": "draining"}
    monkeypatch.setattr("pdctl.draining.ROUTER_S", 30)
    server.pages["/internal/drain"] = {"name": "decode-0"}
    views = iter([None, {"decode-0": Routed.parse(drained)}])
    monkeypatch.setattr(RouterClient, "view", lambda _: next(views))
    with contextlib.suppress(KeyboardInterrupt), drain.held(lambda _: None):
        raise KeyboardInterrupt
    assert [body["draining"] for _, body, _ in server.posted] == [True], "and stays drained"

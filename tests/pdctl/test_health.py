"""Waiting: for readiness, for peers, and not a moment longer once it is hopeless."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from free_ports import free_port

from pdctl.errors import HostsFailed, ServiceFailed, failed_services
from pdctl.health import Watcher, probe_ready, wait_ready
from pdctl.records import ExitRecord, Identity, ServiceRecord
from pdctl.services import ServiceSpec

SELF = Identity(pid=4711, start_ticks=1, boot_id="b")
"""Who answers; the test's server says so."""


@dataclass
class Fake:
    """A service whose /ready says what the test wants."""

    url: str
    status: int = 200
    body: Any = field(default_factory=dict)
    hang_s: float = 0.0

    def spec(self, **more: Any) -> ServiceSpec:
        return ServiceSpec("demo", "a", "decode", "local", argv=("x",), url=self.url, **more)


@pytest.fixture
def fake() -> Iterator[Fake]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(fake.hang_s)
            answer = fake.body
            if isinstance(answer, dict):
                answer = {"pid": SELF.pid} | answer
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(fake.status if self.path == "/ready" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake = Fake(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield fake
    server.shutdown()
    server.server_close()


ALIVE = ServiceRecord(
    deployment="demo",
    name="a",
    host="local",
    dir="/d",
    state="running",
    supervised=True,
    spec=None,
    spec_hash="",
    service=SELF,
    shim=None,
    exit=None,
    uptime_s=1.0,
    rebooted=False,
    strays=(),
)
DEAD = replace(
    ALIVE,
    state="exited",
    supervised=False,
    exit=ExitRecord(code=3, signal=None, error="", at=0.0, ran_s=0.5, asked=False),
)


@dataclass
class Told:
    record: ServiceRecord | None = ALIVE
    ready: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def watcher(self) -> Watcher:
        return Watcher(
            observe=lambda: {"a": self.record} if self.record else {},
            tail=lambda name: [f"last words of {name}"],
            on_ready=lambda service, _: self.ready.append(service.name),
            on_wait=lambda _, reason, __: self.waits.append(reason),
        )


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def test_ready_at_once(fake: Fake) -> None:
    told = Told()
    wait_ready([fake.spec()], told.watcher(), soon(20))
    assert told.ready == ["a"]


def test_it_waits_and_tells_what_for(fake: Fake) -> None:
    told = Told()
    fake.status, fake.body = 503, {"waiting_for": "the model to load"}
    timer = threading.Timer(0.5, lambda: setattr(fake, "status", 200))
    timer.start()
    wait_ready([fake.spec()], told.watcher(), soon(20))
    assert told.ready == ["a"] and set(told.waits) == {"the model to load"}


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, {"reasons": ["no instance", "no pair"]}, "no instance; no pair"),
        (503, {"error": {"message": "dying"}}, "dying"),
        (500, {}, "HTTP 500"),
        (200, {"peers": {}}, "no path to p-0, p-1"),
        (200, {"peers": {"p-0": "shm", "p-1": None}}, "no path to p-1"),
        (200, {"peers": {"p-0": {"path": "shm"}, "p-1": {"path": None}}}, "no path to p-1"),
        (200, {"peers": {"p-0": {"path": "shm"}, "p-1": {"path": "tcp"}}}, ""),
    ],
)
def test_what_ready_means(fake: Fake, status: int, body: Any, reason: str) -> None:
    fake.status, fake.body = status, body
    found = probe_ready(fake.spec(), SELF, ("p-0", "p-1"))
    assert (found.ready, found.reason, found.reachable) == (not reason, reason, True)


def test_last_words_of_a_start_that_cannot_work_are_the_error(fake: Fake) -> None:
    told = Told()
    told.record = DEAD
    lines = ["core: kv_cache: 900 GiB cannot be allocated", "INFO the core has ended"]
    watcher = replace(told.watcher(), tail=lambda _: lines)
    with pytest.raises(ServiceFailed, match=r"code 3 after 0.5 s: core: kv_cache: 900 GiB"):
        wait_ready([fake.spec()], watcher, soon(60))


def test_a_death_ends_the_wait_at_once_also_while_ready_hangs(fake: Fake) -> None:
    told = Told()
    fake.hang_s = 1.5
    threading.Timer(0.3, lambda: setattr(told, "record", DEAD)).start()
    begun = time.monotonic()
    with pytest.raises(ServiceFailed) as caught:
        wait_ready([fake.spec()], told.watcher(), soon(60))
    assert time.monotonic() - begun < 1.4
    failed = caught.value
    assert str(failed) == "a on local: exited with code 3 after 0.5 s"
    assert failed.exit_status == 3 and failed.log_tail == ("last words of a",)


def test_the_death_of_one_that_was_ready_ends_the_wait_for_the_others(fake: Fake) -> None:
    told = Told()
    records = {"a": ALIVE, "b": replace(ALIVE, name="b")}
    watcher = replace(told.watcher(), observe=lambda: records)
    slow = replace(fake.spec(), name="b", url=f"http://127.0.0.1:{free_port()}")
    threading.Timer(0.3, lambda: records.update(a=DEAD)).start()
    with pytest.raises(ServiceFailed, match="a on local: exited with code 3"):
        wait_ready([fake.spec(), slow], watcher, soon(60))
    assert told.ready == ["a"]


def test_all_that_ended_are_named(fake: Fake) -> None:
    records = {n: replace(DEAD, name=n) for n in ("a", "b")} | {"c": replace(ALIVE, name="c")}
    specs = [replace(fake.spec(), name=n) for n in records]
    watcher = replace(Told().watcher(), observe=lambda: records)
    with pytest.raises(HostsFailed) as caught:
        wait_ready(specs, watcher, soon(60))
    assert [(e.service, e.log_tail) for e in failed_services(caught.value)] == [
        ("a", ("last words of a",)),
        ("b", ("last words of b",)),
    ]
    assert str(caught.value).endswith("b on local: exited with code 3 after 0.5 s\n1 ok, 2 failed")
    assert caught.value.exit_code == 1


def test_all_that_are_late_are_named(fake: Fake) -> None:
    fake.status, fake.body = 503, {"waiting_for": "the model to load"}
    records = {n: replace(ALIVE, name=n) for n in ("a", "b")}
    specs = [replace(fake.spec(), name=n) for n in records]
    watcher = replace(Told().watcher(), observe=lambda: records)
    with pytest.raises(HostsFailed, match=r"a on local is not ready .*\n.*b on local is not") as e:
        wait_ready(specs, watcher, soon(0.3))
    assert "--wait-timeout" in e.value.hint


def test_an_exit_that_answers_ready_is_still_a_failure(fake: Fake) -> None:
    """Another server on its port must not make a dead service look alive."""
    with pytest.raises(ServiceFailed, match="exited with code 3"):
        wait_ready([fake.spec()], Told(record=DEAD).watcher(), soon(20))


def test_the_deadline_names_what_was_missing(fake: Fake) -> None:
    fake.status, fake.body = 503, {"waiting_for": "the model to load"}
    with pytest.raises(ServiceFailed, match=r"not ready after 0 s: the model to load") as caught:
        wait_ready([fake.spec()], Told().watcher(), soon(0.3))
    assert caught.value.log_tail == ("last words of a",)
    assert "--wait-timeout" in caught.value.hint


def test_nobody_listens() -> None:
    spec = Fake(f"http://127.0.0.1:{free_port()}").spec()
    assert probe_ready(spec, SELF, ()).reachable is False
    with pytest.raises(ServiceFailed, match="no answer yet"):
        wait_ready([spec], Told().watcher(), soon(0.3))


def test_a_proxy_of_the_environment_is_not_asked(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert probe_ready(fake.spec(), SELF, ()).ready


@pytest.mark.parametrize("body", [{"pid": 4712}, {"pid": None}, [1], b"hello"])
def test_a_stranger_on_the_port_is_not_the_service(fake: Fake, body: Any) -> None:
    fake.body = body
    found = probe_ready(fake.spec(), SELF, ())
    assert not found.ready and "not by this service" in found.reason
    assert not probe_ready(fake.spec(), None, ()).ready

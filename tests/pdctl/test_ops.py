"""up, status, logs and down of whole (stub) deployments on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from supervision import Home, Site, eventually, gone

from pdctl import ops, state
from pdctl.agent import Session
from pdctl.errors import Locked, PdctlError, ServiceFailed, UsageError
from pdctl.hosts import LocalHost

SERVICES = ["router", "prefill-0", "decode-0"]
PREFILL = {"host": "local", "kv_cache": "1MiB"}
DECODE = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}


def up(path: Path, **options: Any) -> ops.UpResult:
    return ops.up(path, ops.UpOptions(**options), ops.silent)


def down(name: str = "demo", timeout: float = 5.0) -> ops.DownResult:
    return ops.down(name, timeout, ops.silent)


def pids(name: str = "demo") -> dict[str, int | None]:
    return {s.name: s.pid for s in ops.status(name).services}


def token(home: Home, service: str) -> str:
    return (home.dir("demo", service) / "token").read_text().strip()


def assert_nothing_left(home: Home, ports: list[int]) -> None:
    assert home.processes() == []
    assert home.segments() == []
    assert not home.dir("demo", "x").parent.exists()
    assert list(Path.cwd().iterdir()) == [], "no evidence of nothing"
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_up_twice_and_down_twice(home: Home, site: Site) -> None:
    path = site.topology()
    first = up(path)
    assert list(first.started) == SERVICES and first.ready
    before = pids()
    ports = [p for s in ops.status("demo").services for p in s.ports.values()]

    second = up(path)
    assert (list(second.kept), second.started) == (SERVICES, ())
    assert pids() == before and second.endpoint == first.endpoint

    result = down()
    assert result.ok and {s.name for s in result.services} == set(SERVICES)
    assert all(s.segments for s in result.services if s.name != "router")
    assert_nothing_left(home, ports)
    again = down()
    assert again.ok and again.services == ()
    assert json.dumps(again.to_json())


def test_one_token_for_all_as_long_as_anything_runs(home: Home, site: Site) -> None:
    up(site.topology())
    tokens = {token(home, s) for s in SERVICES}
    assert len(tokens) == 1 and len(next(iter(tokens))) == 64
    decode = pids()["decode-0"]
    assert decode
    os.kill(decode, signal.SIGKILL)
    eventually(lambda: gone(decode))
    up(home.root / "demo.yaml")
    assert {token(home, s) for s in SERVICES} == tokens
    down()
    up(home.root / "demo.yaml")
    assert token(home, "router") not in tokens
    down()


def test_only_what_changed_is_replaced_and_orphans_go(home: Home, site: Site) -> None:
    port = free_port()
    router = {"host": "local", "port": port}
    up(site.topology(router=router, prefill=[PREFILL | {"replicas": 2}]))
    before = pids()
    result = up(site.topology(router=router, decode=[DECODE | {"env": {"SOME": "change"}}]))
    assert list(result.removed) == ["prefill-1"]
    assert list(result.started) == ["decode-0"]
    after = pids()
    assert after["router"] == before["router"] and after["prefill-0"] == before["prefill-0"]
    assert after["decode-0"] != before["decode-0"] and "prefill-1" not in after
    down()


@pytest.mark.parametrize("remembered", [True, False])
def test_a_host_that_got_another_name_is_the_same_machine(
    home: Home, site: Site, remembered: bool
) -> None:
    port = free_port()
    up(site.topology(router={"host": "local", "port": port}))
    before = pids()
    if not remembered:
        state.forget("demo")
    result = up(
        site.topology(
            hosts={"here": {"python": str(site.python)}},
            router={"host": "here", "port": port},
            prefill=[PREFILL | {"host": "here"}],
            decode=[DECODE | {"host": "here"}],
        )
    )
    assert result.ready and sorted(result.started) == sorted(SERVICES)
    assert {s.host for s in ops.status("demo").services} == {"here"}
    assert all(gone(pid) for pid in before.values() if pid)
    down()


def test_detach_does_not_wait(home: Home, site: Site) -> None:
    slow = DECODE | {"env": {"STUB_DELAY": "30"}}
    result = up(site.topology(decode=[slow]), detach=True)
    assert not result.ready and list(result.started) == SERVICES
    status = ops.status("demo")
    assert not status.healthy
    down()


def test_a_failure_shows_the_log_and_undoes_only_this_run(home: Home, site: Site) -> None:
    port = free_port()
    router = {"host": "local", "port": port}
    up(site.topology(router=router))
    before = pids()
    events: list[ops.Event] = []
    bad = DECODE | {"env": {"STUB_EXIT": "3"}}
    with pytest.raises(ServiceFailed) as caught:
        path = site.topology(router=router, decode=[DECODE, bad])
        ops.up(path, ops.UpOptions(), events.append)
    failed = caught.value
    assert failed.service == "decode-1" and failed.exit_status == 3
    assert "exited with code 3" in str(failed)
    assert "no such device: the stub gives up" in failed.log_tail
    assert "no such device: the stub gives up" in [e.text for e in events if e.kind == "log"]
    assert pids() == before, "what ran before still runs"
    lines = list(ops.logs("demo", ops.LogQuery(("decode-1",), 5), follow=False))
    assert "no such device: the stub gives up" in [line.line for line in lines]
    down()


def test_keep_on_failure_keeps(home: Home, site: Site) -> None:
    bad = DECODE | {"env": {"STUB_EXIT": "3"}}
    with pytest.raises(ServiceFailed):
        up(site.topology(decode=[bad]), keep_on_failure=True)
    status = {s.name: s for s in ops.status("demo").services}
    assert status["router"].state == "running"
    assert status["decode-0"].health == "down"
    assert status["decode-0"].exit is not None and status["decode-0"].exit["code"] == 3
    down()


def test_not_ready_in_time_names_what_is_missing(home: Home, site: Site) -> None:
    no_path = DECODE | {"env": {"STUB_NO_PATH": "1"}}
    with pytest.raises(ServiceFailed, match=r"decode-0 .* not ready .* no path to prefill-0"):
        up(site.topology(decode=[no_path]), wait_timeout_s=1.5)
    assert home.processes() == []
    with pytest.raises(UsageError, match="there is no deployment demo"):
        ops.status("demo")


def test_a_stranger_on_the_port_is_named_and_nothing_starts(home: Home, site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(PdctlError) as caught:
            up(site.topology(router={"host": "local", "port": port}))
    assert f"router: port {port} on 127.0.0.1 is taken by pid {os.getpid()}" in str(caught.value)
    assert caught.value.hint == "nothing was started; free what is taken, or change the topology"
    assert_nothing_left(home, [])


def test_where_nothing_is_taken_the_hint_does_not_say_so(home: Home, site: Site) -> None:
    path = site.topology(router={"host": "local", "port": free_port(), "bind": "192.0.2.77"})
    with pytest.raises(PdctlError) as caught:
        up(path)
    assert "on 192.0.2.77: the host does not have this address" in str(caught.value)
    assert caught.value.hint == f"nothing was started; `pdctl doctor {path}` says more"
    assert_nothing_left(home, [])


def test_another_deployment_on_the_port_is_named(home: Home, site: Site) -> None:
    router = {"host": "local", "port": free_port()}
    up(site.topology("other", router=router), detach=True)
    with pytest.raises(PdctlError, match=r"is used by pdctl's other/router \(pid"):
        up(site.topology(router=router))
    with pytest.raises(UsageError, match="there is no deployment demo") as caught:
        ops.status("demo")
    assert caught.value.hint == "there are: other"
    assert ops.resolve_name(None) == "other"
    assert down("other").ok


def test_a_buffer_larger_than_shared_memory_is_both_numbers(home: Home, site: Site) -> None:
    huge = DECODE | {"cpu_buffer": "900TiB"}
    with pytest.raises(PdctlError, match=r"decode-0: cpu_buffer needs 900TiB .* /dev/shm has .*iB"):
        up(site.topology(decode=[huge]))
    assert_nothing_left(home, [])


def test_all_problems_of_a_host_come_at_once(home: Home, site: Site) -> None:
    site.python = home.root / "no-python"
    huge = DECODE | {"cpu_buffer": "900TiB"}
    with pytest.raises(PdctlError) as caught:
        up(site.topology(decode=[huge]))
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and f"{site.python} does not exist" in lines[0]
    assert_nothing_left(home, [])


def test_secrets_by_name(home: Home, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site.topology(
        router={"host": "local", "port": free_port(), "api_keys": "MY_KEYS"},
        decode=[DECODE | {"secrets": ["HUB_TOKEN"]}],
    )
    with pytest.raises(UsageError, match=r"not set: HUB_TOKEN \(for decode-0\); MY_KEYS") as caught:
        up(path)
    assert caught.value.exit_code == 2
    assert_nothing_left(home, [])
    monkeypatch.setenv("HUB_TOKEN", "hush-hush")
    monkeypatch.setenv("MY_KEYS", "sk-one\nsk-two")
    up(path)
    status = json.dumps(ops.status("demo").to_json())
    assert "hush-hush" not in status and "sk-one" not in status
    assert token(home, "router") not in status
    holders = [
        p.relative_to(home.base / "demo")
        for p in home.base.rglob("*")
        if p.is_file() and ("hush-hush" in (text := p.read_text()) or "sk-one" in text)
    ]
    assert sorted(map(str, holders)) == [
        "decode-0/api_keys",
        "decode-0/env",
        "prefill-0/api_keys",
        "router/api_keys",
    ]
    assert all(oct((home.base / "demo" / p).stat().st_mode & 0o777) == "0o600" for p in holders)
    down()


def test_a_rotated_secret_replaces_those_that_have_the_old_one(
    home: Home, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = site.topology(
        router={"host": "local", "port": free_port(), "api_keys": "MY_KEYS"},
        decode=[DECODE | {"secrets": ["HUB_TOKEN"]}],
    )

    def rotate(keys: str, hub: str) -> None:
        monkeypatch.setenv("MY_KEYS", keys)
        monkeypatch.setenv("HUB_TOKEN", hub)

    def planned() -> dict[str, str]:
        steps = ops.plan_up(path, ops.silent).steps
        return {s.service.name: s.reason for s in steps if s.kind != "keep"}

    rotate("sk-{dir}\r\nsk-é\n", "old-hub")
    up(path)
    assert planned() == {}
    rotate("sk-{dir}\r\nsk-é\n", "new-hub")
    assert planned() == {"decode-0": "changed: the secret HUB_TOKEN"}
    monkeypatch.delenv("HUB_TOKEN")
    assert planned() == {}, "what runs has its own"
    rotate("sk-new", "old-hub")
    everybody = dict.fromkeys(("router", "prefill-0", "decode-0"), "changed: the secret MY_KEYS")
    assert planned() == everybody
    assert {s.service.name for s in up(path).plan.of("replace")} == everybody.keys()
    assert planned() == {}
    for name in everybody:
        assert (home.dir("demo", name) / "api_keys").read_text() == "sk-new"
    audit = (home.base / ".audit" / "demo.log").read_text()
    assert "sk-new" not in audit and "HUB_TOKEN" not in audit
    down()


def test_down_without_file_cache_or_a_clean_house(home: Home, site: Site) -> None:
    rude = {"STUB_ESCAPE": "1", "STUB_IGNORE_TERM": "1"}
    path = site.topology(decode=[DECODE | {"env": rude}])
    up(path)
    ports = [p for s in ops.status("demo").services for p in s.ports.values()]
    escaped = int((home.dir("demo", "decode-0") / "escaped.pid").read_text())
    path.unlink()
    shutil.rmtree(home.root / "state")
    result = down(timeout=0.5)
    assert result.ok
    decode = next(s for s in result.services if s.name == "decode-0")
    assert escaped in decode.pids and gone(escaped)
    assert_nothing_left(home, ports)


def test_down_finds_what_lost_its_directory(home: Home, site: Site) -> None:
    """Somebody removed the records; the marks in the processes remain."""
    up(site.topology(), detach=True)
    left = home.processes()
    assert len(left) == 6
    shutil.rmtree(home.dir("demo", "decode-0"))
    assert down().ok
    assert all(gone(pid) for pid in left)
    for name in home.segments():
        Path("/dev/shm", name).unlink()  # its name was only in the record


def test_the_second_at_once_hears_who_holds_the_lock(
    home: Home, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("up", "down"):
        monkeypatch.setattr(f"pdctl.{module}.LOCK_WAIT_S", 0.1)
    path = site.topology()
    with Session(LocalHost(), "demo", purpose="up", wait_s=0):
        for change in (lambda: up(path), down):
            with pytest.raises(Locked) as caught:
                change()
            assert caught.value.exit_code == 4
            assert "`pdctl up` of" in str(caught.value)
            assert f"pid {os.getpid()}" in str(caught.value)


def test_status_tells_healthy_from_degraded(home: Home, site: Site) -> None:
    up(site.topology())
    status = ops.status("demo")
    document = status.to_json()
    assert status.healthy and document["schema"] == "pdctl.status/1"
    assert [s["name"] for s in document["services"]] == SERVICES
    assert document["endpoint"] == document["services"][0]["url"]
    decode = next(s for s in status.services if s.name == "decode-0")
    assert decode.peers == {"prefill-0": "shm"} and decode.kv_bytes == {"shm": 4096}
    assert decode.idle is True and status.kv_bytes == 4096

    prefill = pids()["prefill-0"]
    assert prefill
    os.kill(prefill, signal.SIGKILL)
    eventually(lambda: gone(prefill))
    eventually(lambda: ops.status("demo").services[1].state == "exited")
    status = ops.status("demo")
    assert not status.healthy
    assert status.services[1].health == "down"
    assert status.services[1].reason.startswith("killed by SIGKILL")
    down()


def test_a_killed_supervisor_is_said_and_down_still_works(home: Home, site: Site) -> None:
    up(site.topology())
    shim = home.record("demo", "prefill-0")["shim"]["pid"]
    os.kill(shim, signal.SIGKILL)
    eventually(lambda: gone(shim))
    prefill = ops.status("demo").services[1]
    assert (prefill.health, prefill.supervised) == ("healthy", False)
    assert "supervisor was killed" in prefill.reason
    assert down().ok
    assert_nothing_left(home, [])


def test_logs_and_following(home: Home, site: Site) -> None:
    up(site.topology())
    lines = list(ops.logs("demo", ops.LogQuery(("decode-0",), 10), follow=False))
    assert [(x.service, x.line) for x in lines] == [("decode-0", "stub decode-0 starts")]
    with pytest.raises(UsageError, match="demo has no service decode-7"):
        list(ops.logs("demo", ops.LogQuery(("decode-7",), 10), follow=False))
    with pytest.raises(UsageError, match="there are no logs of nobody"):
        list(ops.logs("nobody", ops.LogQuery((), 10), follow=False))

    follow = ops.logs("demo", ops.LogQuery((), 0), follow=True)
    log = home.dir("demo", "decode-0") / "out.log"
    got: list[str] = []
    with log.open("a") as f:
        deadline = time.monotonic() + 20
        thread = threading.Thread(target=lambda: got.append(next(follow).line))
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline:
            f.write("a new line\n")
            f.flush()
            time.sleep(0.1)
        thread.join(timeout=5)
    assert got == ["a new line"]
    follow.close()
    down()
    assert "stub decode-0 starts" in [
        x.line for x in ops.logs("demo", ops.LogQuery((), 10), follow=False)
    ]

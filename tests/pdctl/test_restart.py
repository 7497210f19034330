"""restart and drain: what is renewed, in which order, what is refused, what stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from changing import DECODE, PREFILL, Demo, Told, pids, routed, states, up
from supervision import Home, eventually, gone

from pdctl import ops
from pdctl.errors import PdctlError, ServiceFailed, UsageError
from pdctl.plan import Plan
from pdctl.routing import RouterClient


def restart(*services: str, report: ops.Report = ops.silent, **more: object) -> ops.RestartResult:
    options = ops.RestartOptions(services, wait_timeout_s=30, **more)  # type: ignore[arg-type]
    return ops.restart("demo", options, report)


def drain(service: str, report: ops.Report = ops.silent, **more: object) -> ops.DrainResult:
    return ops.drain("demo", service, ops.DrainOptions(**more), report)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def down_at_the_end(home: Home) -> object:
    yield
    ops.down("demo", 5.0, ops.silent)


def test_a_rolling_restart_takes_one_after_the_other_and_not_the_router(
    home: Home, demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hush")
    up(demo(decode=[DECODE | {"replicas": 2, "secrets": ["HUB_TOKEN"]}]))
    monkeypatch.delenv("HUB_TOKEN")
    before, token = pids(), (home.dir("demo", "decode-0") / "token").read_text()
    told, shown = Told(), list[Plan]()
    result = restart(rolling=True, report=told, approve=shown.append)
    assert sorted(result.restarted) == ["decode-0", "decode-1", "prefill-0"]
    assert [plan.notes for plan in shown] == [("nothing is served until prefill-0 is ready",)]
    renewed = [e for e in told.order("stop", "start", "ready") if "-" in e]
    assert renewed == [
        f"{what} {n}" for n in result.restarted for what in ("stop", "start", "ready")
    ]
    after = pids()
    assert after["router"] == before["router"]
    assert not {after[n] for n in result.restarted} & {before[n] for n in result.restarted}
    assert (home.dir("demo", "decode-0") / "token").read_text() == token
    assert "hush" in (home.dir("demo", "decode-0") / "env").read_text(), "its secrets are kept"
    assert ops.status("demo").healthy
    assert up(demo(decode=[DECODE | {"replicas": 2, "secrets": ["HUB_TOKEN"]}])).started == ()


def test_all_at_once_with_the_router(home: Home, demo: Demo) -> None:
    up(demo())
    before = pids()
    assert sorted(restart().restarted) == ["decode-0", "prefill-0", "router"]
    assert not set(before.values()) & set(pids().values())
    assert set(states(home).values()) == {"ready"}


def test_it_stops_at_the_first_that_does_not_come_back(home: Home, demo: Demo) -> None:
    up(demo(decode=[DECODE | {"replicas": 2}]))
    before = pids()
    config = home.dir("demo", "decode-0") / "config.json"
    config.write_text("{")
    told = Told()
    with pytest.raises(ServiceFailed, match="decode-0 on local: exited with code 1"):
        restart("decode-0", "decode-1", rolling=True, report=told)
    assert "stopped at decode-0: renewed before: none; not touched: decode-1" in told.notes()
    assert "JSONDecodeError" in "".join(e.text for e in told.events if e.kind == "log")
    assert pids()["decode-1"] == before["decode-1"] and states(home)["decode-1"] == "ready"


def test_what_does_not_run_is_started_first_and_the_last_one_is_kept(
    home: Home, demo: Demo
) -> None:
    up(demo(decode=[DECODE | {"replicas": 2}]))
    pid = pids()["decode-1"]
    assert pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gone(pid) and states(home)["decode-1"] == "dead", 20)
    with pytest.raises(PdctlError, match="decode-0 is the only decode instance that serves now"):
        restart("decode-0", rolling=True)
    told = Told()
    restart("decode-0", "decode-1", rolling=True, report=told)
    started = told.order("start")
    assert started == ["start decode-1", "start decode-0"]
    assert ops.status("demo").healthy


def test_who_is_about_to_serve_is_waited_for(home: Home, demo: Demo) -> None:
    up(demo(decode=[DECODE | {"replicas": 2}]))
    drain("decode-1")
    told = Told()
    token = (home.dir("demo", "router") / "token").read_text().strip()
    router = RouterClient(ops.status("demo").endpoint, token)

    def undo_when_waited_for(event: ops.Event) -> None:
        told(event)
        if event.text == "decode-1 to serve":
            router.drain("decode-1", False)  # as its link comes back: without asking for the lock

    assert restart("decode-0", rolling=True, report=undo_when_waited_for).restarted == ("decode-0",)
    assert "wait decode-0" in told.order("wait")


def test_what_leaves_nothing_to_serve_is_asked_for_and_nothing_else(demo: Demo) -> None:
    def refuse(plan: Plan) -> None:
        raise PdctlError(f"{', '.join(plan.ends)}: {', '.join(plan.notes)}")

    up(demo(decode=[DECODE | {"replicas": 2}]))
    before = pids()
    with pytest.raises(PdctlError, match="prefill-0: nothing is served until prefill-0 is ready"):
        restart("prefill-0", approve=refuse)
    assert pids() == before
    told = Told()
    drain("decode-0", told)
    assert told.notes() == "", "decode-1 serves"
    drain("decode-1", told)
    assert "nothing is served from now on" in told.notes()
    drain("decode-0", undo=True)
    assert restart("decode-1", approve=refuse).restarted == ("decode-1",)


def test_mistakes_are_named(demo: Demo) -> None:
    with pytest.raises(UsageError, match="there is no deployment demo"):
        restart()
    up(demo())
    with pytest.raises(UsageError, match="demo has no service decode-9") as caught:
        restart("decode-9")
    assert "prefill-0" in caught.value.hint
    with pytest.raises(UsageError, match="the router cannot be drained"):
        drain("router")
    with pytest.raises(UsageError, match="no running instance decode-9"):
        drain("decode-9")


def test_drain_waits_is_seen_and_taken_back(home: Home, demo: Demo) -> None:
    up(demo(prefill=[PREFILL], decode=[DECODE | {"replicas": 2}]))
    busy = home.dir("demo", "decode-1") / "busy"
    busy.touch()
    result = drain("decode-1", timeout_s=0.3)
    assert (result.draining, result.left) == (True, "1 request")
    status = {s.name: s for s in ops.status("demo").services}
    assert status["decode-1"].health == "draining" and status["decode-0"].health == "healthy"
    assert status["decode-1"].held == {"requests": 1}
    assert not ops.status("demo").healthy
    busy.unlink()
    told = Told()
    assert drain("decode-1", told).left == ""
    assert told.notes() == ""
    assert up(demo(decode=[DECODE | {"replicas": 2}])).started == (), "up does not end a drain"
    assert states(home)["decode-1"] == "draining"
    assert drain("decode-1", undo=True).draining is False
    assert states(home)["decode-1"] == "ready" and ops.status("demo").healthy
    drain("prefill-0", told)
    assert "nothing is served from now on" in told.notes()
    restart("prefill-0")
    assert states(home)["prefill-0"] == "ready", "a restart ends the drain"


def test_to_wait_for_what_is_drained_alone_is_refused_at_once(home: Home, demo: Demo) -> None:
    up(demo())
    drain("decode-0")
    for wait in (lambda: up(demo()), lambda: restart("prefill-0")):
        with pytest.raises(PdctlError, match="decode-0 is drained, and nothing can be") as caught:
            wait()
        assert "pdctl drain decode-0 --undo" in caught.value.hint
        assert len(home.processes()) == 6, "nothing of what ran is undone"
        assert list(Path.cwd().iterdir()) == [], "nothing happened that one could look into"
    drain("decode-0", undo=True)
    assert up(demo()).ready


def test_a_router_that_is_restarted_still_knows_who_is_drained(home: Home, demo: Demo) -> None:
    up(demo(decode=[DECODE | {"replicas": 2}]))
    drain("decode-1")
    eventually(lambda: routed(home)["decode-1"]["heard"], 20)  # it has said so back
    restart("router")
    eventually(lambda: states(home).get("decode-1") == "draining")


def test_without_a_router_there_is_nobody_to_drain(demo: Demo) -> None:
    up(demo())
    pid = pids()["router"]
    assert pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: gone(pid))
    with pytest.raises(PdctlError, match="the router of demo does not run"):
        drain("decode-0")
    restart("decode-0")

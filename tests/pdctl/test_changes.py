"""Changing what runs: what is touched and what is not, in which order, and what is asked before."""

from __future__ import annotations

import json
import threading

import pytest
from changing import DECODE, PORTS, PREFILL, Demo, Told, pids, states, up
from supervision import Home, eventually

from pdctl import ops
from pdctl.errors import PdctlError, ServiceFailed
from pdctl.plan import Plan


def test_more_prefill_leaves_decode_alone(home: Home, demo: Demo) -> None:
    up(demo())
    before = pids()
    result = up(demo(prefill=[PREFILL | {"replicas": 2}]))
    assert list(result.started) == ["prefill-1"]
    assert before.items() <= pids().items()
    assert ops.status("demo").healthy
    ops.down("demo", 5.0, ops.silent)


def test_instances_are_replaced_one_by_one_and_finish_first(home: Home, demo: Demo) -> None:
    pair = DECODE | {"replicas": 2}
    up(demo(decode=[pair]))
    before = pids()
    busy = home.dir("demo", "decode-0") / "busy"
    busy.touch()
    told = Told()
    path = demo(decode=[pair | {"env": {"SOME": "change"}}])
    change = threading.Thread(target=lambda: up(path, told))
    change.start()
    finishing = eventually(lambda: [e for e in told.events if "finishing" in e.text])
    assert (finishing[0].service, finishing[0].text) == ("decode-0", "finishing 1 request")
    assert states(home)["decode-0"] == "draining"
    assert "stop decode-0" not in told.order("stop")
    busy.unlink()
    change.join(60)
    assert [e for e in told.order("stop", "start", "ready") if "decode" in e] == [
        *("stop decode-0", "start decode-0", "ready decode-0"),
        *("stop decode-1", "start decode-1", "ready decode-1"),
    ]
    after = pids()
    assert (after["router"], after["prefill-0"]) == (before["router"], before["prefill-0"])
    assert after["decode-0"] != before["decode-0"] and after["decode-1"] != before["decode-1"]
    assert set(states(home).values()) == {"ready"}
    ops.down("demo", 5.0, ops.silent)


def test_what_does_not_finish_in_time_is_cut_off_and_named(home: Home, demo: Demo) -> None:
    up(demo(drain_timeout=0.3))
    (home.dir("demo", "decode-0") / "busy").touch()
    told = Told()
    path = demo(
        drain_timeout=0.3,
        decode=[DECODE | {"env": {"SOME": "change"}}],
    )
    up(path, told)
    assert "decode-0: 1 request did not finish within 0.3 s and will be cut off" in told.notes()
    ops.down("demo", 5.0, ops.silent)


def test_the_last_one_that_serves_is_kept(home: Home, demo: Demo) -> None:
    second = DECODE | {"port": PORTS[5], "env": {"STUB_NO_PATH": "1"}}
    with pytest.raises(ServiceFailed):
        up(demo(decode=[DECODE, second]), wait_timeout_s=1.0, keep_on_failure=True)
    before = pids()
    changed = DECODE | {"env": {"SOME": "change"}}
    told = Told()
    with pytest.raises(PdctlError, match="decode-0 is the only decode instance that serves now"):
        up(demo(decode=[changed, second]), told)
    assert pids() == before
    assert "stop" not in {e.kind for e in told.events}
    ops.down("demo", 5.0, ops.silent)


def test_a_router_that_changed_leaves_the_instances_running(home: Home, demo: Demo) -> None:
    up(demo())
    before = pids()
    result = up(demo(router={"policy": "round_robin"}))
    assert list(result.started) == ["router"]
    after = pids()
    assert after.pop("router") != before.pop("router") and after == before
    assert set(states(home)) == {"prefill-0", "decode-0"}, "they registered again"
    ops.down("demo", 5.0, ops.silent)


def test_a_change_stops_at_the_first_failure(home: Home, demo: Demo) -> None:
    pair = DECODE | {"replicas": 2}
    up(demo(decode=[pair]))
    before = pids()
    told = Told()
    with pytest.raises(ServiceFailed, match="exited with code 3"):
        up(
            demo(decode=[pair | {"env": {"STUB_EXIT": "3"}}]),
            told,
        )
    assert "stopped at decode-0: renewed before: none; not touched: decode-1" in told.notes()
    after = pids()
    assert after["decode-1"] == before["decode-1"] and "decode-0" not in after
    assert states(home)["decode-1"] == "ready"
    ops.down("demo", 5.0, ops.silent)


def test_what_was_replaced_and_serves_is_not_undone(home: Home, demo: Demo) -> None:
    second = DECODE | {"port": PORTS[5]}
    up(demo(decode=[DECODE, second]))
    told = Told()
    good, bad = {"env": {"SOME": "change"}}, {"env": {"STUB_EXIT": "3"}}
    with pytest.raises(ServiceFailed):
        path = demo(decode=[DECODE | good, second | bad])
        up(path, told)
    assert "stopped at decode-1: renewed before: decode-0; not touched: none" in told.notes()
    assert states(home)["decode-0"] == "ready" and "decode-1" not in pids()
    ops.down("demo", 5.0, ops.silent)


def test_an_interrupted_drain_is_given_back(home: Home, demo: Demo) -> None:
    up(demo())
    (home.dir("demo", "decode-0") / "busy").touch()

    def interrupt(event: ops.Event) -> None:
        if "finishing" in event.text:
            raise KeyboardInterrupt

    before = pids()
    with pytest.raises(KeyboardInterrupt):
        up(
            demo(decode=[DECODE | {"env": {"A": "b"}}]),
            interrupt,
        )
    assert states(home)["decode-0"] == "ready" and pids() == before
    ops.down("demo", 5.0, ops.silent)


def test_nothing_is_changed_without_consent(home: Home, demo: Demo) -> None:
    up(demo())
    before = pids()
    shown: list[Plan] = []

    def refuse(plan: Plan) -> None:
        shown.append(plan)
        raise PdctlError("nothing was changed")

    path = demo(decode=[DECODE | {"env": {"A": "b"}}])
    with pytest.raises(PdctlError, match="nothing was changed"):
        up(path, approve=refuse)
    assert shown[0].ends == ("decode-0",)
    assert shown[0].notes == ("nothing is served until decode-0 is ready",)
    assert pids() == before
    assert json.loads(json.dumps(ops.plan_up(path, ops.silent).notes))
    ops.down("demo", 5.0, ops.silent)

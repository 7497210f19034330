"""pdctl scale on a running (stub) deployment: what comes, what goes, what a later `up` does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from changing import DECODE, PREFILL, Demo, Told, pids, states, up
from supervision import Home

from pdctl import ops
from pdctl.errors import PdctlError, ServiceFailed, UsageError
from pdctl.plan import Plan


def scale(report: ops.Report = ops.silent, **numbers: int) -> ops.UpResult:
    return ops.scale("demo", numbers, ops.UpOptions(), report)


@pytest.fixture(autouse=True)
def down_at_the_end(home: Home) -> Iterator[None]:
    yield
    ops.down("demo", 5.0, ops.silent)


def test_up_and_down_without_the_file(home: Home, demo: Demo) -> None:
    path = demo(decode=[DECODE], prefill=[PREFILL])
    up(path)
    before = pids()
    path.unlink()
    shutil.rmtree(home.root / "state")
    assert sorted(scale(prefill=2, decode=3).started) == ["decode-1", "decode-2", "prefill-1"]
    assert before.items() <= pids().items()
    assert set(states(home)) == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    told = Told()
    result = scale(told, decode=1)
    assert sorted(result.removed) == ["decode-1", "decode-2"] and result.started == ()
    assert before | {"prefill-1": pids()["prefill-1"]} == pids(), "prefill stays as it was scaled"
    status = ops.status("demo")
    assert status.healthy and not any(s.orphan for s in status.services)


def test_a_later_up_goes_back_to_the_file_and_says_so(demo: Demo) -> None:
    path = demo()
    up(path)
    scale(decode=2)
    assert not any(s.orphan for s in ops.status("demo").services)
    shown: list[Plan] = [ops.plan_up(path, ops.silent)]
    for where in (ops.Where(), ops.Where(file=path)):
        assert not any(s.orphan for s in ops.status(None, where).services), "a look changes nothing"
    result = up(path, approve=shown.append)
    assert list(result.removed) == ["decode-1"]
    for plan in shown:
        assert plan.notes == ("`pdctl scale` had set decode=2; now it is 1",)
        assert plan.ends == ("decode-1",)
    assert up(path, approve=shown.append).removed == () and shown[-1].notes == ()


def test_what_scale_shows_and_refuses(home: Home, demo: Demo) -> None:
    with pytest.raises(UsageError, match="there is no deployment demo"):
        scale(decode=2)
    up(demo())
    before = pids()
    with pytest.raises(UsageError, match="decode has no prefill to receive from"):
        scale(prefill=0)

    def refuse(plan: Plan) -> None:
        raise PdctlError(" ".join(f"{s.kind} {s.service.name}" for s in plan.steps))

    with pytest.raises(PdctlError, match="keep decode-0 start decode-1"):
        ops.scale("demo", {"decode": 2}, ops.UpOptions(approve=refuse), ops.silent)
    assert pids() == before
    scale(decode=2)

    def look(plan: Plan) -> None:
        assert plan.notes == (), "one knows what one has asked for"
        raise PdctlError(" ".join(f"{s.service.name} {s.reason}" for s in plan.of("remove")))

    with pytest.raises(PdctlError, match="decode-1 scaled down"):
        ops.scale("demo", {"decode": 1}, ops.UpOptions(approve=look), ops.silent)


def test_a_scale_that_failed_is_not_remembered(home: Home, demo: Demo) -> None:
    up(demo(decode=[DECODE | {"env": {"STUB_EXIT_UNLESS": "decode-0"}}]))
    before = pids()
    with pytest.raises(ServiceFailed):
        scale(decode=2)
    assert pids() == before
    scale(prefill=2)
    assert set(pids()) == {"router", "prefill-0", "prefill-1", "decode-0"}


def test_a_change_in_between_is_noticed(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    path = demo()
    up(path)

    def meanwhile(*_: object) -> object:
        up(path)
        return scaled(*_)

    from pdctl.scaling import scaled

    monkeypatch.setattr("pdctl.scale.scaled", meanwhile)
    with pytest.raises(PdctlError, match="demo was changed meanwhile"):
        scale(decode=2)

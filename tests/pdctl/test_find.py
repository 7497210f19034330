"""Where a deployment is: cache, file or any host; and the services its topology lost."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from free_ports import free_port
from supervision import Home, Site

from pdctl import ops, state
from pdctl.down import _stop
from pdctl.errors import HostUnreachable, PdctlError, UsageError
from pdctl.find import Where, _only, further, located, this_machine, told
from pdctl.hold import locked
from pdctl.state import KnownDeployment

PREFILL = {"host": "local", "kv_cache": "1MiB"}
DECODE = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}


def up(path: Path) -> None:
    ops.up(path, ops.UpOptions(detach=True), ops.silent)


def down() -> None:
    assert ops.down("demo", 2.0, ops.silent).ok


def said(keys: set[str], hosts: dict[str, str | None], machine: str = "ada@lap:/h") -> Any:
    return KnownDeployment("demo", "", hosts, machine=machine), keys


ALL = {"a": "192.0.2.1", "b": "192.0.2.2", "me": None}


@pytest.mark.parametrize(
    ("asked", "answers", "more", "lost"),
    [
        ({"a": "192.0.2.1"}, [], {}, []),
        ({"a": "192.0.2.1"}, [said({"a"}, ALL)], {"b": "192.0.2.2"}, ["me"]),
        ({"seed": "gpu-a.lan"}, [said({"a"}, ALL)], {"b": "192.0.2.2"}, ["me"]),
        ({"a": "192.0.2.1"}, [said({"a"}, ALL, this_machine())], {"b": "192.0.2.2", "me": None}, 0),
        ({"a": "192.0.2.1", "me": None}, [said({"a"}, ALL, this_machine())], {"b": ALL["b"]}, 0),
        ({**ALL, "b": "192.0.2.9"}, [said({"a"}, ALL)], {"192.0.2.2": "192.0.2.2"}, ["me"]),
        ({"x": None}, [said({"me"}, ALL)], {"a": ALL["a"], "b": ALL["b"]}, []),
    ],
    ids=["no word", "by name", "by address", "own machine", "asked it", "moved", "at the machine"],
)
def test_one_host_leads_to_the_others(
    asked: dict[str, str | None], answers: list[Any], more: dict[str, str | None], lost: Any
) -> None:
    found, unreachable = further(asked, answers)
    assert found == more
    assert list(unreachable) == (lost or [])
    assert all("the machine of ada@lap," in str(e) for e in unreachable.values())


def test_a_host_says_nothing_of_other_names(home: Home) -> None:
    """The name becomes a file on this machine."""
    entry = {"name": "../evil", "topology": "", "keys": ["a"]}
    assert told([{"deployments": {"demo": entry}}], "demo") == []
    assert _only({"deployments": {"../evil": {}, "demo": {}}}) == "demo"


def test_every_host_knows_the_whole_deployment(home: Home, site: Site) -> None:
    up(site.topology())
    known = json.loads((home.base / "demo" / ".deployment.json").read_text())
    assert (known["hosts"], known["keys"]) == ({"local": None}, ["local"])
    assert ["local", "decode-0"] in known["services"] and known["machine"] == this_machine()
    assert (home.base / "demo" / ".deployment.json").stat().st_mode & 0o777 == 0o600
    down()
    assert not (home.base / "demo").exists()


def test_a_file_finds_it_without_the_cache_and_fills_it(home: Home, site: Site) -> None:
    path = site.topology()
    up(path)
    shutil.rmtree(home.root / "state")
    found = ops.status(None, Where(file=path))
    assert {s.name for s in found.services} == {"router", "prefill-0", "decode-0"}
    cached = state.recall("demo")
    assert cached is not None and cached.topology == str(path)
    with pytest.raises(UsageError, match="describes demo, not other"):
        ops.status("other", Where(file=path))
    assert ops.status(None, Where(hosts=("localhost",))).name == "demo"
    down()
    with pytest.raises(UsageError, match="there is no deployment on localhost"):
        ops.status(None, Where(hosts=("localhost",)))


def test_what_hosts_say_counts_whatever_the_clock_here(home: Home, site: Site) -> None:
    up(site.topology())
    cached = state.recall("demo")
    assert cached is not None
    state.remember(replace(cached, at=cached.at + 3600, replicas={"decode": 7}))
    with located("demo") as found:
        assert (found.known.at, found.known.replicas) == (cached.at, cached.replicas)
    assert state.recall("demo") == cached, "what was remembered is put right"
    down()


def test_orphans_are_shown_and_removed_on_request(home: Home, site: Site) -> None:
    router = {"host": "local", "port": free_port()}
    up(site.topology(router=router, prefill=[PREFILL | {"replicas": 2}]))
    assert not any(s.orphan for s in ops.status("demo").services)
    path = site.topology(router=router)
    orphans = [s for s in ops.status("demo").services if s.orphan]
    assert [s.name for s in orphans] == ["prefill-1"]
    assert orphans[0].reason.startswith("orphan: not in the topology any more")
    steps = {s.service.name: s for s in ops.plan_up(path, ops.silent).steps}
    assert (steps["prefill-1"].kind, steps["router"].kind) == ("remove", "keep")
    assert steps["prefill-1"].reason.startswith("orphan")

    result = ops.down_orphans("demo", 2.0, ops.silent)
    assert result.ok and [s.name for s in result.services] == ["prefill-1"]
    left = ops.status("demo").services
    assert {s.name: s.state for s in left} == dict.fromkeys(
        ("router", "prefill-0", "decode-0"), "running"
    )
    assert ops.down_orphans("demo", 2.0, ops.silent).services == ()
    path.write_text("broken")
    assert not any(s.orphan for s in ops.status("demo").services), "as the last `up` said"
    down()


def test_what_another_has_started_meanwhile_is_no_orphan(
    home: Home, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another operator's `up` ends while this one waits for the lock."""
    router = {"host": "local", "port": free_port()}
    two = [PREFILL | {"replicas": 2}]
    up(site.topology(router=router, prefill=two))
    site.topology(router=router)

    @contextlib.contextmanager
    def late(*args: Any, **more: Any) -> Iterator[Any]:
        up(site.topology(router=router, prefill=two))
        with locked(*args, **more) as fleet:
            yield fleet

    with monkeypatch.context() as patch, pytest.raises(PdctlError, match="changed meanwhile"):
        patch.setattr("pdctl.down.locked", late)
        ops.down_orphans("demo", 2.0, ops.silent)
    assert {s.name: s.state for s in ops.status("demo").services}["prefill-1"] == "running"
    down()


def test_a_stop_by_host_leaves_the_namesake_elsewhere(home: Home, site: Site) -> None:
    """decode-0 moved: the one on its old host goes, the one on the new host stays."""
    from pdctl.fleet import Fleet, opened

    up(site.topology())
    with (
        opened({"local": None, "old": None}) as hosts,
        Fleet("demo", hosts, purpose="test", wait_s=1.0) as fleet,
    ):
        assert fleet.stop({"elsewhere": ["decode-0"]}, 1.0) == []
        stopped = fleet.stop({"old": ["decode-0"]}, 1.0)
    assert [s["service"] for s in stopped] == ["decode-0"]
    down()


def test_what_was_stopped_is_told_by_its_own_host() -> None:
    """decode-0 moved, and its old host could not be reached then: now both have one."""

    report = {"service": "decode-0", "was": "running", "left": [], "ports": []}
    report |= {"pids": [7], "killed": [], "segments": []}
    fleet: Any = SimpleNamespace(
        deployment="demo",
        hosts={"old": SimpleNamespace(name="old"), "new": SimpleNamespace(name="machine")},
        stop=lambda *_, **__: [report | {"host": host} for host in ("old", "machine")],
    )
    records: Any = [
        SimpleNamespace(name="decode-0", host=h, state="running") for h in ("old", "new")
    ]
    events: list[ops.Event] = []
    stopped, _ = _stop(fleet, records, [None], 1.0, events.append)
    assert [(s.name, s.host) for s in stopped] == [("decode-0", "old"), ("decode-0", "new")]
    assert [e.host for e in events if e.kind == "stopped"] == ["old", "new"]


def test_a_host_that_is_not_used_any_more_is_forgotten(home: Home, site: Site) -> None:
    """Else `status` would ask it for ever. Here both keys mean this machine."""
    up(site.topology())
    known = state.recall("demo")
    assert known is not None and known.hosts == {"local": None}
    here = {"host": "here", "kv_cache": "1MiB"}
    path = site.topology(
        hosts={"here": {"python": str(site.python)}},
        router={"host": "here", "port": free_port()},
        prefill=[here],
        decode=[here | {"cpu_buffer": "1MiB"}],
    )
    up(path)
    known = state.recall("demo")
    assert known is not None and known.hosts == {"here": None}
    record = json.loads((home.base / "demo" / ".deployment.json").read_text())
    assert (record["hosts"], record["keys"]) == ({"here": None}, ["here"])
    down()
    assert not (home.base / "demo").exists()


def test_a_host_that_is_none_of_them_is_said(home: Home, site: Site) -> None:
    known = KnownDeployment("demo", "")
    with (
        locked(known, purpose="test", wait_s=0) as fleet,
        pytest.raises(HostUnreachable, match="gpu-x: it is none of the hosts of demo that answer"),
    ):
        fleet.session("gpu-x")

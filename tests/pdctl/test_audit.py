"""What the audit on a host keeps: every change, no secret, and not for ever."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace

import pytest
from free_ports import free_port
from supervision import Home, Lab, Site

from pdctl import __version__, ops, state
from pdctl.errors import HostCommandError
from pdctl.find import Where
from pdctl.shim import audit as kept

HERE = Where(hosts=("local",))
SLEEP = "import time; time.sleep(600)"


def entries(lines: int = 100) -> list[tuple[str, str, str]]:
    return [(e.do, e.service, e.result) for e in ops.audit("demo", lines, HERE).entries]


def test_a_line_for_every_change_and_they_outlive_down(home: Home, lab: Lab) -> None:
    spec = lab.spec(SLEEP)
    lab.start(spec)
    lab.start(spec)  # changes nothing
    pid = lab.status()["identity"]["service"]["pid"]
    with pytest.raises(HostCommandError):
        lab.start(replace(spec, env={"A": "b"}))
    lab.stop()
    lab.stop()
    lab.call("purge", {"deployment": "demo"})
    assert entries() == [
        ("start", "a", f"started, pid {pid}"),
        ("start", "a", "failed: a runs with another configuration"),
        ("stop", "a", "stopped, was running"),
        ("purge", "a", "records removed"),
    ]
    assert entries(1) == [("purge", "a", "records removed")]
    entry = ops.audit("demo", 1, HERE).entries[0]
    assert (entry.pid, entry.version, entry.host) == (os.getpid(), __version__, "local")
    file = home.base / ".audit" / "demo.log"
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert not (home.base / "demo").exists()


def test_who_and_which_command_and_no_secret(
    home: Home, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEYS", "sk-hush-hush")
    decode = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}
    path = site.topology(
        router={"host": "local", "port": free_port(), "api_keys": "MY_KEYS"},
        decode=[decode | {"secrets": ["MY_KEYS"]}],
    )
    ops.up(path, ops.UpOptions(detach=True), ops.silent)
    token = (home.base / "demo" / "router" / "token").read_text().strip()
    ops.down("demo", 2.0, ops.silent)
    found = ops.audit("demo", 100, HERE)
    assert ops.audit(None, 100) == found, "the last one there was"
    shutil.rmtree(state.state_dir())
    assert ops.audit(None, 100) == found, "also where another machine took it down"
    assert ops.down("demo", 2.0, ops.silent).notes == (), "it is known to be gone"
    assert ops.down("dmeo", 2.0, ops.silent).notes == ("no deployment dmeo has ever run here",)
    assert {(e.command, e.do) for e in found.entries} == {
        ("up", "start"),
        ("down", "stop"),
        ("down", "purge"),
    }
    text = (home.base / ".audit" / "demo.log").read_text()
    assert "sk-hush-hush" not in text and token not in text


def test_it_is_bounded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "CAP_BYTES", 1000)
    base = str(lab.home.base)
    request = {"do": "stop", "deployment": "demo", "by": {}}
    for number in range(100):
        kept.record(base, request, [("a", f"change {number}")])
    folder = lab.home.base / ".audit"
    assert sum(f.stat().st_size for f in folder.iterdir()) < 2500
    with (folder / "demo.log").open("a") as f:
        f.write('{"cut sho')
    left = [e["result"] for e in kept.entries(base, {**request, "lines": 1000})["audit"]]
    assert left[-1] == "change 99" and len(left) >= 5
    assert left == [f"change {n}" for n in range(100 - len(left), 100)]


def test_what_cannot_be_written_stops_no_change(lab: Lab) -> None:
    (lab.home.base / ".audit").write_text("in the way")
    lab.start(lab.spec(SLEEP))
    assert lab.stop()["a"]["left"] == []
    with contextlib.suppress(FileNotFoundError):
        assert (lab.home.base / ".audit").read_text() == "in the way"


def test_as_a_document(home: Home, lab: Lab) -> None:
    lab.start(lab.spec(SLEEP))
    lab.stop()
    document = json.loads(json.dumps(ops.audit("demo", 5, HERE).to_json()))
    assert document["schema"] == "pdctl.audit/1" and len(document["entries"]) == 2

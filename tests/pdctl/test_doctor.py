"""What doctor makes of facts: limits, devices, clocks, addresses; its server; who asks whom."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from supervision import Home

from pdctl import command
from pdctl import doctor_checks as checks
from pdctl.agent import open_shim
from pdctl.doctor import Diagnosis, PairReport, expected_path
from pdctl.doctor_checks import Clock, View
from pdctl.doctor_network import HERE, Edge, Heard, Reached, edges, rounds
from pdctl.doctor_report import doctor_document, doctor_text
from pdctl.errors import HostCommandError, HostUnreachable, PdctlError
from pdctl.hosts import LocalHost
from pdctl.output import Screen
from pdctl.preflight import NOT_HERE
from pdctl.shim import facts, measure
from pdctl.topology import Host, Topology

TAKEN = {
    "port": 8100, "bind": "10.0.0.2", "free": False, "error": "Address already in use",
    "pid": 7, "command": "nginx", "user": "www",
}  # fmt: skip
FREE = {"free": 1 << 40, "total": 1 << 40}
PROBE = {
    "ports": [], "shm": FREE, "missing": [], "unreadable": [], "unwritable": "",
    "versions": {"/p": {"code": "aa", "python": "3.11", "torch": "2", "ibverbs": "", "native": ""}},
    "model": "/m", "code": None, "busy": [], "systemd": "",
}  # fmt: skip
FACTS = {
    "python": "3.11.7", "path": "/bin", "memlock": -1, "may_lock": False, "nofile": 4096,
    "disk_free": 1 << 40, "memory_free": 1 << 40, "gpus": [], "gpu_error": "", "rdma": [],
    "addresses": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "docker0": ["172.17.0.1"]},
    "resolved": {"10.0.0.2": ["10.0.0.2"]}, "sources": {"10.0.0.1": "10.0.0.2"},
}  # fmt: skip
SYNC = "pdctl sync my.yaml --model"
PORT = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link": "Ethernet", "gids": [{}]}


def topology(**decode: Any) -> Topology:
    group = {"host": "b", "cpu_buffer": 1 << 30, "kv_cache": 1 << 30, **decode}
    document = {
        "name": "demo",
        "model": "m",
        "hosts": {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}},
        "router": {"host": "a"},
        "prefill": ({"host": "a"},),
        "decode": (group,),
    }
    return Topology.model_validate(document)


def view(t: Topology, key: str = "b", **changed: Any) -> View:
    known = {k: command.HostFacts("/p", "/h", "/m", "m") for k in t.hosts}
    ports = {i.name: dict.fromkeys(i.wanted_ports(), 8100) for i in t.instances()}
    services = command.services(t, {"router": {"http": 8000}, **ports}, known)
    return View(
        key=key,
        entry=t.hosts[key],
        probe=PROBE | {k: v for k, v in changed.items() if k in PROBE},
        facts=FACTS | {k: v for k, v in changed.items() if k in FACTS},
        clock=Clock(0.0, 0.1),
        services=tuple(s for s in services if s.host == key),
        instances=tuple(i for i in t.instances() if i.host == key),
        records=(),
    )


@pytest.mark.parametrize(
    ("decode", "changed", "words", "severe"),
    [
        ({}, {}, [], False),
        ({}, {"memlock": 8 << 20}, ["8MiB may be locked", "memlock"], False),
        ({}, {"memlock": 8 << 20, "may_lock": True}, [], False),
        ({}, {"nofile": 256}, ["256 files", "nofile"], False),
        ({}, {"disk_free": 5 << 20}, ["5MiB of disk"], False),
        ({}, {"memory_free": 1 << 20}, ["decode-0: kv_cache takes 1GiB", "1MiB are free"], True),
        ({"devices": 0}, {"memory_free": 1, "gpus": [{"index": 0, "free": 1 << 40}]}, [], True),
        ({}, {"shm": {"free": 1 << 20, "total": 1 << 20}}, ["cpu_buffer needs 1GiB"], True),
        ({}, {"unwritable": "/h: Permission denied"}, ["/h: Permission denied"], True),
        ({}, {"model": ""}, ["model m is not there", f"run `{SYNC}`"], True),
        ({}, {"ports": [TAKEN]}, ["port 8100 on 10.0.0.2 is taken by pid 7", "free what"], True),
        ({}, {"ports": [TAKEN | {"error": NOT_HERE}]}, [], True),
        ({}, {"versions": {"/p": {"error": "does not exist"}}}, ["/p does", f"`{SYNC}`"], True),
        ({"devices": 1}, {}, ["wants GPU 1; there are: none"], True),
        ({"devices": 0}, {"gpus": [{"index": 0, "free": 1}]}, ["GPU 0 has 1B free"], True),
        ({"devices": 0}, {"gpus": [{"index": 0, "free": 1 << 40}]}, [], True),
        ({"devices": 0}, {"gpu_error": "nvidia-smi: no driver"}, ["no driver"], True),
        ({}, {"gpu_error": "nvidia-smi: no driver"}, ["no driver"], False),
    ],
)
def test_what_a_host_lacks(
    decode: dict[str, Any], changed: dict[str, Any], words: list[str], severe: bool
) -> None:
    t = topology(**decode)
    found = list(checks.host_troubles(view(t, **changed), "aa", t, SYNC))
    assert len(found) == (1 if words else 0)
    assert all(w in f"{found[0].what}; {found[0].do}" for w in words)
    assert all(f.severe is severe and f.where == "b" for f in found)


def test_a_clock_is_wrong_only_beyond_its_own_error() -> None:
    t = topology()
    for clock, wrong in ((Clock(0.9, 0.5), 0), (Clock(-0.9, 0.1), 1), (Clock(60.0, 0.5), 1)):
        found = list(checks.host_troubles(replace(view(t), clock=clock), "aa", t, SYNC))
        assert len(found) == wrong and not any(f.severe for f in found)
        assert all(str(clock) in f.what for f in found)


@pytest.mark.parametrize(
    ("advertise", "resolved", "bind", "words"),
    [
        ("10.0.0.2", ["10.0.0.2"], None, ""),
        ("gpu-b", ["10.0.0.2"], None, ""),
        ("gpu-b", ["127.0.1.1"], None, "gpu-b is 127.0.1.1 to itself"),
        ("gpu-b", [], None, "means nothing"),
        ("172.17.0.1", ["172.17.0.1"], None, "is on docker0"),
        ("192.0.2.9", ["192.0.2.9"], None, "is no address of it"),
        ("192.0.2.9", ["192.0.2.9"], "0.0.0.0", ""),
    ],
)
def test_an_address_that_leads_nowhere_and_the_right_one(
    advertise: str, resolved: list[str], bind: str | None, words: str
) -> None:
    entry = Host(address="b", advertise=advertise, bind=bind)
    seen = replace(view(topology(), resolved={advertise: resolved}), entry=entry)
    found = checks.address_trouble(seen)
    assert (found is None) == (not words)
    if found is not None:
        assert words in found.what and "advertise: 10.0.0.2" in found.do


def test_which_path_is_to_be_expected() -> None:
    t = topology()
    prefill, decode = t.instances()
    a, b = view(t, "a", rdma=[PORT]), view(t, "b", rdma=[PORT])
    assert expected_path(decode, prefill, {"a": a, "b": b}) == "tcp", "no verbs installed"
    verbs = {"/p": {"code": "aa", "ibverbs": "1"}}
    a, b = (view(t, k, rdma=[PORT], versions=verbs) for k in "ab")
    assert expected_path(decode, prefill, {"a": a, "b": b}) == "rdma"
    assert expected_path(decode, prefill, {"a": a}) == "tcp"
    assert expected_path(decode, replace(prefill, host="b"), {}) == "shm"
    on_gpus = [
        replace(i, host="a", group=i.group.model_copy(update={"devices": (n,)}))
        for n, i in enumerate((decode, prefill))
    ]
    assert expected_path(on_gpus[0], on_gpus[1], {}) == "cuda_ipc"
    (explicit,) = (i for i in topology(transfer="tcp").instances() if i.role == "decode")
    assert expected_path(explicit, replace(prefill, host="b"), {}) == "tcp"


def test_every_connection_of_a_pair_is_tried() -> None:
    t = topology()
    services = [s for k in "ab" for s in view(t, k).services]
    found = {(e.source, e.target, e.service) for e in edges(t, services)}
    assert found == {
        (HERE, "a", "router"), (HERE, "a", "prefill-0"), (HERE, "b", "decode-0"),
        ("a", "a", "router"), ("a", "a", "prefill-0"), ("a", "b", "decode-0"),
        ("b", "a", "router"), ("b", "a", "prefill-0"),
    }  # fmt: skip


def test_who_answers_instead_and_what_follows_from_known_faults() -> None:
    edge = Edge("b", "a", "10.0.0.1", 9100, "prefill-0", "why")
    other, closed = Reached("", "b"), Reached("connection refused")
    heard = {"a": Heard(1, {})}
    (wrong,) = checks.edge_troubles({edge: other}, heard, ())
    assert wrong.severe and "b answers there" in wrong.what
    (shut,) = checks.edge_troubles({edge: closed}, heard, ())
    assert shut.where == "b -> a" and "connection refused" in shut.what and "9100" in shut.do
    assert not list(checks.edge_troubles({edge: closed}, heard, ["a"]))
    assert not list(checks.edge_troubles({edge: closed}, {"a": Heard(1, {"9100": "in use"})}, ()))
    assert shut.edge == edge, "the report names the others"
    (here,) = checks.edge_troubles({replace(edge, source=HERE): closed}, heard, ())
    assert not here.severe, "only the router has to be reached from here"


def test_the_report_has_a_line_for_each_host_pair_and_trouble() -> None:
    t = topology()
    prefill, decode = t.instances()
    lost: dict[str, PdctlError] = {
        "a": HostUnreachable("a: nobody answers", host="a"),
        "c": HostCommandError("c: no python3", host="c"),
    }
    pair = PairReport(prefill, decode, 9100, "tcp", None, {"tcp": 1.5e9})
    trouble = checks.Trouble("a", "nobody answers", "switch it on")
    edge = Edge("b", "a", "10.0.0.1", 9100, "prefill-0", "why")
    found = Diagnosis("demo", (view(t),), lost, (pair,), {edge: Reached("no answer")}, (trouble,))
    screen = Screen(live=False, color=False, unicode=False, width=None)
    text = doctor_text(found, screen)
    rows = [line.split() for line in text.splitlines() if line]
    assert [row[:4] for row in rows[1:4]] == [
        ["b", "+", "yes", "3.11"],
        ["a", "x", "no", "-"],
        ["c", "+", "yes", "-"],
    ]
    assert rows[5] == ["prefill-0", "(a)", "decode-0", "(b)", "tcp", "9100", "?", "-", "1.50"]
    assert "demo: 0 of 1 connections work (" in text
    not_named = "    failed: b -> a port 9100 (prefill-0): no answer"
    assert not_named in text.splitlines()
    told = replace(trouble, edge=edge)
    assert not_named not in doctor_text(replace(found, troubles=(told,)), screen)
    assert "no connection could be tried" in doctor_text(replace(found, reached={}), screen)
    assert "x a: nobody answers\n    do: switch it on" in text and "in the way" not in text
    assert found.exit_code == 5 and replace(found, lost={}).exit_code == 1
    assert replace(found, lost={}, troubles=(replace(trouble, severe=False),)).exit_code == 0
    document = json.loads(json.dumps(doctor_document(found)))
    assert document["pairs"][0]["reached"] is None and not document["ok"]
    assert document["connections"][0]["error"] == "no answer"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"))))
def test_rounds_disturb_nobody(pairs: list[tuple[str, str]]) -> None:
    found = rounds(pairs)
    assert sorted(p for r in found for p in r) == sorted(set(pairs))
    for r in found:
        assert len({p for p, _ in r}) == len({d for _, d in r}) == len(r) > 0


def test_the_listener_answers_to_its_token_only_and_ends_with_its_stdin(home: Home) -> None:
    host = LocalHost()
    channel = open_shim(host, "listen")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        request = {"base": host.base, "binds": [[busy, "127.0.0.1"]], "any": "127.0.0.1",
                   "token": "secret", "name": "b", "seconds": 60}  # fmt: skip
        channel.send(json.dumps(request))
        answer = json.loads(channel.receive(20) or "")
    assert list(answer["failed"]) == [str(busy)]
    target = {"address": "127.0.0.1", "port": answer["any"], "seconds": 0.05, "plain": False}

    def ask(token: str, **changed: Any) -> dict[str, Any]:
        reply: dict[str, Any] = measure.reach("", {"targets": [target | changed], "token": token})
        return dict(reply["answers"][0])

    good = ask("secret")
    assert (good["error"], good["name"]) == ("", "b") and good["rate"] > 0
    assert ask("wrong")["error"] == "another program answers there"
    assert ask("secret", address="127.0.0.2")["error"] == "connection refused"
    channel.close()
    assert ask("secret")["error"] == "connection refused"


def test_facts_of_this_machine(tmp_path: Path) -> None:
    found = facts.facts(str(tmp_path), {"names": ["localhost"], "towards": ["127.0.0.1"]})
    assert "127.0.0.1" in found["addresses"]["lo"]
    assert found["sources"] == {"127.0.0.1": "127.0.0.1"}
    assert set(found["resolved"]["localhost"]) & {"127.0.0.1", "::1"}
    assert found["disk_free"] > 0 and found["nofile"] != 0
    assert measure.copy("", {})["rate"] > 0
    assert found["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")


def test_gpus_as_nvidia_smi_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock stands in for the tool of a GPU's driver."""
    tool = tmp_path / "nvidia-smi"
    rows = ("WARNING: infoROM, corrupted", "0, NVIDIA H100, 81000, 81559", "", "1, Odd, [N/A], 1")
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = facts.facts(str(tmp_path), {})["gpus"]
    assert [(g["index"], g["name"], g["free"] >> 20) for g in gpus] == [
        (0, "NVIDIA H100", 81000),
        (1, "Odd", 0),
    ]
    for said, code in (("cannot talk to the driver", 9), ("No devices were found", 0)):
        tool.write_text(f"#!/bin/sh\necho '{said}'; exit {code}\n")
        broken = facts.facts(str(tmp_path), {})
        assert (broken["gpus"], broken["gpu_error"]) == ([], f"nvidia-smi: {said}")

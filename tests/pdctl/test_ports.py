"""Deployments that are planned at once, also in other homes: each port is given to one of them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from supervision import Home, Lab, Site, eventually

import pdctl.wanted
from pdctl import ops
from pdctl.agent import Session, shim_call
from pdctl.hosts import LocalHost
from pdctl.plan import Plan

SILENT = "import time; time.sleep(600)"


@pytest.fixture
def stranger(home: Home, tmp_path: Path, shim_store: Path) -> Iterator[Session]:
    """At work for a deployment in a home of its own."""
    host = LocalHost()
    host.base = str(tmp_path / "stranger")
    Path(host.base).mkdir(mode=0o700)
    Path(host.base, ".shim").symlink_to(shim_store)
    with Session(host, "demo", purpose="up", wait_s=0) as session:
        yield session


def refused(session: Session, *ports: int) -> list[int]:
    found: list[int] = session.call("claim", {"ports": ports})["refused"]
    return found


def busy(host: LocalHost) -> list[int]:
    found: list[int] = shim_call(host, "probe", {"busy": True})["busy"]
    return found


def test_a_claim_holds_until_its_session_ends(host: LocalHost, stranger: Session) -> None:
    port, other = free_port(), free_port()
    with Session(host, "demo", purpose="up", wait_s=0) as ours:
        assert refused(ours, port) == refused(ours, port) == [], "ours already"
        assert refused(stranger, port, other) == [port]
        assert port in busy(host) and other in busy(host)
    assert refused(stranger, port) == []


def test_what_somebody_listens_on_cannot_be_claimed(stranger: Session) -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        assert refused(stranger, port := s.getsockname()[1]) == [port]


def test_a_service_that_does_not_listen_yet_has_its_ports(lab: Lab, stranger: Session) -> None:
    port = free_port()
    lab.start(lab.spec(SILENT, ports={"http": port}))
    assert port in busy(lab.host) and refused(stranger, port) == [port]
    assert lab.call("again", {"deployment": "demo", "service": "a"})["started"] is False
    lab.stop()
    lab.call("again", {"deployment": "demo", "service": "a"})
    assert refused(stranger, port) == [port], "again when it is started again"
    lab.stop()
    assert port not in busy(lab.host) and refused(stranger, port) == []


def test_a_claim_is_the_supervisors_alone(lab: Lab) -> None:
    port = free_port()
    lab.start(lab.spec(SILENT, ports={"http": port}))
    os.kill(lab.status()["identity"]["shim"]["pid"], signal.SIGKILL)
    eventually(lambda: port not in busy(lab.host))
    lab.stop()


def ports_of(plan: Plan) -> dict[str, dict[str, int]]:
    return {step.service.name: step.service.ports for step in plan.steps}


def test_a_port_that_goes_to_another_after_the_plan(
    site: Site, stranger: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    gone_to_another: list[int] = []
    make = pdctl.wanted._plan

    def overtaken(*args: Any) -> Plan:
        plans.append(make(*args))
        if len(plans) == 1:
            gone_to_another.append(ports_of(plans[0])["decode-0"]["http"])
            assert refused(stranger, *gone_to_another) == []
        return plans[-1]

    monkeypatch.setattr(pdctl.wanted, "_plan", overtaken)
    # The site names the ports of one or two itself.
    path = site.topology(decode=[{"host": "local", "kv_cache": "1MiB", "replicas": 3}])
    options = ops.UpOptions(detach=True)
    first = ops.up(path, options, ops.silent)
    used = ports_of(first.plan)
    assert not any(port in gone_to_another for ports in used.values() for port in ports.values())
    assert len(plans) == 2 and plans[1] == first.plan
    assert ports_of(ops.up(path, options, ops.silent).plan) == used, "a second one keeps them"
    ops.down("demo", 5.0, ops.silent)


def test_a_port_that_the_file_asks_for_is_not_given_up(site: Site, stranger: Session) -> None:
    wanted = {"http": free_port()}
    assert refused(stranger, *wanted.values()) == []
    path = site.topology(decode=[{"host": "local", "kv_cache": "1MiB", "port": wanted["http"]}])
    assert ports_of(ops.up(path, ops.UpOptions(), ops.silent).plan)["decode-0"] == wanted
    ops.down("demo", 5.0, ops.silent)

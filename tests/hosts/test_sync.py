"""`pdctl sync` to machines that have sshd and python3, and no package index."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import wheelhouse
from cluster import Cluster, Completed, Machine
from supervision import eventually

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    wheelhouse.fill(folder)
    return folder


def topology(cluster: Cluster, **sections: Any) -> str:
    """Router on the first machine, one instance on the last; no `python:` of their own."""
    keys = list(cluster.machines)
    hosts = {k: cluster.host_section(k) for k in keys}
    for entry in hosts.values():
        del entry["python"]
    last = [{"host": keys[-1], "kv_cache": "1MiB"}]
    model = cluster.laptop / "model.gguf"
    model.write_bytes(b"GGUF\x03" + bytes(59))
    for machine in cluster.machines.values():  # they share our disk, but not this folder
        machine.sh(f"mount -t tmpfs none {cluster.laptop}")
    defaults = {"model": str(model), "hosts": hosts, "prefill": [], "decode": [], "mixed": last}
    return str(cluster.topology(**(defaults | sections)))


def result(done: Completed) -> dict[str, Any]:
    hosts = json.loads(done.out)["hosts"]
    return {h["host"]: h for h in hosts}


def code(machine: Machine) -> Path:
    return machine.base / ".code"


def installed(machine: Machine, *names: str) -> list[bool]:
    packages = code(machine) / "env"
    return [bool(list(packages.glob(f"*/venv/lib/python*/site-packages/{n}"))) for n in names]


def test_two_hosts_from_nothing_and_what_up_says_before_and_after(
    cluster: Cluster, wheels: Path
) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    path = topology(cluster)
    before = cluster.pdctl("up", path)
    assert before.rc == 1
    lines = [line for line in before.err.splitlines() if line.startswith("error:")]
    assert [line.split()[1] for line in lines if "no runtime yet" in line] == ["gpu-a:", "gpu-b:"]
    assert all("run `pdctl sync " in line for line in lines if "no runtime yet" in line)
    assert any("gpu-b: model" in line and "pdctl sync" in line for line in lines)
    assert a.clean() and b.clean()

    options = ("--wheelhouse", str(wheels), "--model", "--json")
    dry = cluster.pdctl("sync", path, *options, "--dry-run")
    assert dry.rc == 0, dry.err
    assert {h["state"] for h in result(dry).values()} == {"planned"}
    assert not code(a).exists() and not code(b).exists()

    done = cluster.pdctl("sync", path, *options)
    assert done.rc == 0, done.err
    found = result(done)
    assert {h["state"] for h in found.values()} == {"synced"}
    assert installed(a, "aiohttp", "torch") == [True, False], "a router needs no torch"
    assert installed(b, "aiohttp", "torch") == [True, True]
    for machine in (a, b):
        name = os.readlink(code(machine) / "current")
        assert name == found[machine.name]["code"]
        record = json.loads((code(machine) / name / "complete.json").read_text())
        has_native = machine is b
        assert (record["versions"]["native"] == "") is has_native and record["versions"]["code"]
        assert not (code(machine) / "wheels").exists()
    model = b.home / found["gpu-b"]["model"].removeprefix(str(b.home)).lstrip("/")
    assert model.read_bytes()[:4] == b"GGUF"
    assert not a.home.joinpath(".cache").exists(), "a router needs no model"

    again = cluster.pdctl("sync", path, *options)
    assert again.rc == 0, again.err
    assert {(h["state"], h["bytes_sent"]) for h in result(again).values()} == {("unchanged", 0)}
    (cluster.laptop / "model.gguf").unlink()  # from now on only the host has it
    plan = json.loads(cluster.pdctl("plan", path, "--json").out)
    argv = {s["host"]: s["argv"][0] for s in plan["steps"]}
    assert argv["gpu-b"] == f"{code(b)}/{found['gpu-b']['code']}/venv/bin/python"
    assert str(model) in json.dumps(plan)

    runtime = next(code(b).glob("*/venv/lib/python*/site-packages/runtime/errors.py"))
    runtime.write_text(runtime.read_text() + "# another version\n")
    other = cluster.pdctl("up", path)
    assert other.rc == 1 and "gpu-a" not in other.err, other.err
    assert "gpu-b: its runtime is 0.1.0+" in other.err and "run `pdctl sync " in other.err
    assert "torch" not in other.err


def test_what_was_cut_off_is_continued_and_what_is_damaged_is_not_kept(
    cluster: Cluster, wheels: Path
) -> None:
    (a,) = cluster.add("gpu-a")
    path = topology(cluster)
    model = cluster.laptop / "model.gguf"
    size = 48 << 20
    model.write_bytes(b"GGUF\x03" + bytes(size - 5))
    options = ("--wheelhouse", str(wheels), "--model", "--json")
    # Killed, it cannot remove its scratch folder: let it be one that goes with the test.
    killed = cluster.start_pdctl("sync", path, *options, TMPDIR=str(cluster.root))
    parts = lambda: list(a.home.glob(".cache/pdctl/models/local/*/model.gguf.part"))  # noqa: E731
    eventually(lambda: parts() and parts()[0].stat().st_size > 0, 60)
    killed.send_signal(signal.SIGSTOP)
    second = cluster.pdctl("sync", path, *options)
    assert second.rc == 4 and "locked by `pdctl sync`" in second.err, second.err
    killed.kill()
    killed.communicate()
    eventually(lambda: not a.processes(), 30)
    begun = parts()[0].stat().st_size
    assert 0 < begun < size
    done = cluster.pdctl("sync", path, *options)
    assert done.rc == 0, done.err
    assert result(done)["gpu-a"]["bytes_sent"] == size - begun
    assert result(done)["gpu-a"]["state"] == "unchanged", "the code was there before the model"

    place = Path(result(done)["gpu-a"]["model"])
    for file in place.parent.iterdir():
        file.unlink()
    Path(f"{place}.part").write_bytes(b"something else")
    bad = cluster.pdctl("sync", path, *options)
    assert bad.rc == 1 and "its sha256 is" in bad.err and "nothing was kept" in bad.err
    assert list(place.parent.iterdir()) == []

    current = code(a) / os.readlink(code(a) / "current")
    (current / "complete.json").unlink()  # as an install leaves it that was killed
    shutil.rmtree(current / "venv" / "bin")
    plan = cluster.pdctl("up", path)
    assert plan.rc == 1 and "has no runtime yet" in plan.err
    assert cluster.pdctl("sync", path, "--wheelhouse", str(wheels)).rc == 0
    assert (current / "complete.json").exists() and (current / "venv/bin/python").exists()


def test_a_full_disk_is_named_and_the_other_hosts_are_served(
    cluster: Cluster, wheels: Path
) -> None:
    a, b, c = cluster.add("gpu-a", "gpu-b", "gpu-c")
    for machine, room in ((a, "1m"), (b, "6m")):
        machine.base.mkdir(mode=0o700)
        machine.sh(f"mount -t tmpfs -o mode=700,size={room} none {machine.base}")
    last = [{"host": k, "kv_cache": "1MiB"} for k in ("gpu-b", "gpu-c")]
    path = topology(cluster, mixed=last)
    done = cluster.pdctl("sync", path, "--wheelhouse", str(wheels), "--json")
    assert done.rc == 1
    found = result(done)
    assert "there is room for" in found["gpu-a"]["error"], found["gpu-a"]
    assert "No space left on device" in found["gpu-b"]["error"], found["gpu-b"]
    assert found["gpu-c"]["state"] == "synced"
    left = b.sh(f"cd {code(b)}; ls; ls env").split()
    assert "current" not in left and not any(len(name) == 16 for name in left)
    assert (code(c) / "current").exists()


def test_a_wheelhouse_without_a_package_and_a_host_that_is_off(
    cluster: Cluster, wheels: Path, tmp_path: Path
) -> None:
    a, b = cluster.add("gpu-a", "gpu-b")
    poor = tmp_path / "poor"
    shutil.copytree(wheels, poor)
    next(poor.glob("torch-*.whl")).unlink()
    path = topology(cluster)
    done = cluster.pdctl("sync", path, "--wheelhouse", str(poor), "--json")
    assert done.rc == 1 and result(done)["gpu-a"]["state"] == "synced", done.err
    error = result(done)["gpu-b"]["error"]
    assert "does not have all packages" in error and "torch" in error
    b.stop_sshd()
    done = cluster.pdctl("sync", path, "--wheelhouse", str(wheels), "--json")
    assert done.rc == 5 and result(done)["gpu-a"]["state"] == "unchanged", done.err
    assert result(done)["gpu-b"]["state"] == "failed"
    assert a.processes() == {}

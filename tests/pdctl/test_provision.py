"""What becomes of synced code on a host, what decides which wheels fit, and versions compared."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervision import Home, Lab, eventually, gone

from pdctl import models, preflight, wheels
from pdctl.errors import (
    HostCommandError,
    HostsFailed,
    HostUnreachable,
    Locked,
    PdctlError,
    UsageError,
)
from pdctl.services import ServiceSpec
from pdctl.shim import provision, store, synced, versions
from pdctl.wheels import Target


def make(base: Path, number: int, environment: int) -> str:
    name = f"{number:016x}"
    for path, record in (
        (base / ".code" / name, {"environment": f"{environment:016x}"}),
        (base / ".code" / "env" / f"{environment:016x}", {}),
    ):
        path.mkdir(parents=True, exist_ok=True)
        (path / "complete.json").write_text(json.dumps(record))
    return name


def test_prune_keeps_current_previous_and_what_a_service_runs_from(lab: Lab) -> None:
    base = lab.home.base
    names = [make(base, n, 100 + n // 2) for n in range(6)]
    root = str(base / ".code")
    provision._switch(root, names[4])
    provision._switch(root, names[5])
    python = base / ".code" / names[1] / "python"
    python.symlink_to("/bin/sleep")
    lab.start(replace(lab.spec("x"), argv=(str(python), "600")))
    assert sorted(provision.prune(str(base))) == [names[0], names[2], names[3]]
    environments = sorted(p.name for p in (base / ".code" / "env").iterdir())
    assert environments == [f"{n:016x}" for n in (100, 102)]
    lab.stop()
    lab.call("purge", {"deployment": "demo"})
    assert provision.prune(str(base)) == [names[1]]
    assert os.readlink(base / ".code" / "previous") == names[4]


def test_current_is_only_what_is_complete(home: Home) -> None:
    assert synced.current(str(home.base)) is None
    name = make(home.base, 7, 8)
    provision._switch(str(home.base / ".code"), name)
    known = synced.current(str(home.base))
    assert known == {"id": name, "python": f"{home.base}/.code/{name}/venv/bin/python"}
    (home.base / ".code" / name / "complete.json").unlink()
    assert synced.current(str(home.base)) is None


def test_an_install_ends_with_the_pdctl_that_asked(tmp_path: Path) -> None:
    script = (
        "import sys; from pdctl.shim.venvs import Work\n"
        "with Work(sys.argv[1], {'index': True, 'python': '/bin/true'})._making(sys.argv[2], {}):\n"
        "    Work(sys.argv[1], {'index': True})._run(['sh', '-c', sys.argv[3]])\n"
    )
    target, pids = tmp_path / "env", tmp_path / "pids"
    pip = f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    argv = [sys.executable, "-c", script, str(tmp_path), str(target), pip]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as shim:
        eventually(pids.exists)
        assert target.exists()
        _, said = shim.communicate(timeout=20)
    assert b"whoever asked for it is gone" in said
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert not target.exists()


def test_a_file_is_named_only_with_the_right_hash(lab: Lab, tmp_path: Path) -> None:
    target = tmp_path / "model"
    wanted = {"path": str(target), "sha256": store.sha256_of(__file__), "size": 10}
    Path(f"{target}.part").write_bytes(b"0123456789")
    offer = lab.call("offer", {"deployment": "code.sync", "files": [wanted]})["files"][0]
    assert (offer["have"], offer["begun"]) == (False, 10)
    with pytest.raises(HostCommandError, match="its sha256 is"):
        lab.call("accept", {"deployment": "code.sync", **wanted})
    assert list(tmp_path.glob("model*")) == []


def test_places_of_a_model_on_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    from pdctl.shim import probe

    alias = models.host_places("smollm2-135m", tmp_path)
    assert probe.model(list(alias)) == ""
    place = cache / "pdctl" / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    place.parent.mkdir(parents=True)
    place.touch()
    assert probe.model(list(alias)) == str(place)
    (tmp_path / "Qwen").mkdir()
    for name in ("config.json", "a.safetensors", "notes.md"):
        (tmp_path / "Qwen" / name).write_bytes(b"\x20" + bytes(7) + b"{}".ljust(32))
    files = models.host_files("./Qwen", tmp_path)
    assert [f.source.name for f in files] == ["a.safetensors", "config.json"]
    folder = models.host_places("./Qwen", tmp_path)[1]
    assert [f.place for f in files] == [f"{folder}/a.safetensors", f"{folder}/config.json"]
    hub = probe.model([folder])
    assert hub == ""


def test_our_wheel_is_the_same_each_time_and_reads_as_ours(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first = wheels.runtime_wheel(tmp_path, native=True)
    second = wheels.runtime_wheel(tmp_path / "again", native=True)
    assert first.name == second.name and first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as z:
        z.extractall(tmp_path / "site")
    assert versions.fingerprint(str(tmp_path / "site" / "runtime")) == wheels.runtime_code()
    assert wheels.runtime_wheel(tmp_path, native=False).name.endswith("-py3-none-any.whl")


def test_what_a_host_builds_from_is_all_of_it_and_always_the_same(tmp_path: Path) -> None:
    assert wheels.has_source() and any("nanobind" in r for r in wheels.build_requirements())
    (tmp_path / "again").mkdir()
    first, second = (wheels.source_archive(tmp_path / f) for f in (".", "again"))
    assert first.name == second.name and first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        names = set(archive.getnames())
    assert {"pyproject.toml", "README.md", "native/CMakeLists.txt", "runtime/link.py"} <= names
    assert not [n for n in names if n.endswith((".so", ".pyc")) or n.startswith("tests")]


def test_where_our_extension_fits() -> None:
    here = wheels.here()
    assert wheels.native_fits(here)
    assert wheels.native_fits(replace(here, libc=(here.libc[0], here.libc[1] + 1)))
    assert not wheels.native_fits(replace(here, libc=(here.libc[0], here.libc[1] - 1)))
    assert not wheels.native_fits(replace(here, machine="riscv64"))
    assert not wheels.native_fits(replace(here, version=(3, 99)))


def test_requirements_of_extras() -> None:
    router, runtime = wheels.requirements(["router"]), wheels.requirements(["runtime"])
    assert set(router) < set(runtime) and not any("torch" in r for r in router)
    assert any(r.startswith("torch") for r in runtime)
    assert not any(r.startswith("pdctl") for r in runtime)
    target = Target("/p", (3, 12), "aarch64", (2, 34))
    assert target.platforms[0] == "manylinux_2_34_aarch64"
    assert "manylinux_2_35_aarch64" not in target.platforms
    assert target.platforms[-1] == "linux_aarch64"
    assert replace(target, libc=(0, 0)).platforms == ("linux_aarch64",)


WITH_AIOHTTP = {"multidict", "yarl"}


@pytest.mark.parametrize(("extra", "parts"), [("router", ["router"]), ("runtime", [""])])
def test_an_extra_has_all_that_its_part_of_the_runtime_imports(
    extra: str, parts: list[str]
) -> None:
    """Hosts get the extra alone, not what the command line needs."""
    names = (re.split(r"[^\w-]", r)[0] for r in wheels.requirements([extra]))
    known = {name.lower().replace("-", "_") for name in names} | WITH_AIOHTTP
    root = wheels.runtime_folder()
    files = [f for part in parts for f in (root / part).rglob("*.py")] + list(root.glob("*.py"))
    used = {name.split(".")[0] for f in files for name in imported(f)}
    optional = {"cupy", "ibverbs", "pyverbs"}
    assert used - set(sys.stdlib_module_names) - {"runtime"} - optional <= known


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
    return found


SYNCED = "/home/u/.pdctl/.code/0123456789abcdef/venv/bin/python"
SYNC = "`pdctl sync t.yaml`"
GOOD = {"python": "3.11.7", "runtime": "0.1.0", "code": "aa", "torch": "2.6", "native": ""}


@pytest.mark.parametrize(
    ("python", "found", "words"),
    [
        (SYNCED, GOOD, []),
        (
            SYNCED,
            {"error": "does not exist"},
            ["no runtime yet", "(code aa)", "run `pdctl sync t.yaml`"],
        ),
        (
            SYNCED,
            GOOD | {"code": "bb"},
            ["0.1.0 (code bb)", "0.1.0 (code aa)", "`pdctl sync t.yaml`"],
        ),
        ("/opt/p", GOOD | {"code": ""}, ["/opt/p has no runtime", "install pdctl 0.1.0"]),
        ("/opt/p", {"error": "Permission denied"}, ["/opt/p Permission denied"]),
        (SYNCED, GOOD | {"native": "no GLIBC_9"}, ["runtime._native", "no GLIBC_9"]),
    ],
)
def test_versions_are_named(python: str, found: dict[str, Any], words: list[str]) -> None:
    service = ServiceSpec("demo", "decode-0", "decode", "gpu-a", argv=(python, "-m", "runtime"))
    problems = preflight.check_versions(
        "gpu-a", {"versions": {python: found}}, [service], "aa", "pdctl sync t.yaml"
    )
    assert len(problems) == (1 if words else 0)
    assert all(w in str(problems[0]) and problems[0].host == "gpu-a" for w in words)


def test_what_differs_between_hosts_is_named() -> None:
    other = GOOD | {"torch": "2.7"}
    notes = preflight.differing_versions({"a": GOOD, "b": other, "c": GOOD, "r": {"torch": ""}})
    assert notes == ["torch differs between hosts: 2.6 on a and c, 2.7 on b"]
    assert preflight.differing_versions({"a": GOOD, "c": GOOD}) == []


def test_the_exit_code_of_hosts_that_failed_for_different_reasons() -> None:
    def code(*errors: PdctlError) -> int:
        return HostsFailed(errors, 1).exit_code

    down = HostUnreachable("b: off", host="b")
    assert code(Locked("a: locked")) == 4 and code(down) == 5
    assert code(Locked("a: locked"), down) == 5 and code(PdctlError("a: full"), down) == 5
    assert code(Locked("a: locked"), UsageError("b: what?")) == 1

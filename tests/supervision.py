"""For tests of supervision: a private pdctl home, single services, whole stub deployments."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port, free_run

from pdctl.agent import shim_call
from pdctl.errors import StateError
from pdctl.hosts import Host, LocalHost, Result
from pdctl.services import ServiceSpec
from pdctl.shim import procs

STUB = Path(__file__).parent / "pdctl" / "stub_runtime.py"


def gone(pid: int) -> bool:
    """Dead or a zombie."""
    return procs.proc(pid) is None


def eventually(check: Callable[[], Any], within_s: float = 10.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


def ran(host: Host, argv: list[str], stdin: str = "") -> Result:
    """A program on a host, from its start to its end."""
    return host.feed(argv, io.BytesIO(stdin.encode()), lambda _: None)


def check_program(host: Host, base: Path) -> None:
    """A program is put on a host once, private and whole, and is the one that runs."""
    folder = base / "a" / "b"
    main = "import sys\nprint(sys.argv[1:], __name__, sys.stdin.readline(), flush=True)\n"
    files = {"__main__.py": main, "c/one": "1", "two": "zwei €"}
    for more in ({}, {"three": ""}):
        with contextlib.closing(host.program("a/b", {**files, **more}, ["x y", "$z"])) as channel:
            channel.send("line")
            assert channel.receive(20) == "['x y', '$z'] __main__ line"
    assert (folder / "two").read_text() == "zwei €" and (folder / "c/one").exists()
    assert {p.name for p in (base / "a").iterdir()} == {"b"} and not (folder / "three").exists()
    assert oct((folder / "c/one").stat().st_mode & 0o777) == "0o600"
    for made in (folder, folder.parent):
        assert oct(made.stat().st_mode & 0o777) == "0o700"
    with pytest.raises(StateError, match=f"{folder}/two"):
        host.program("a/b/two/below", {"x": ""}, [])


@dataclass
class Home:
    """PDCTL_HOME of one test."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "home"

    def dir(self, deployment: str, service: str) -> Path:
        return self.base / deployment / service

    def record(self, deployment: str, service: str, file: str = "identity.json") -> Any:
        return json.loads((self.dir(deployment, service) / file).read_text())

    def segments(self) -> list[str]:
        """Shared memory of services of this home: their names carry a hash of the directory."""
        found = []
        for path in Path("/dev/shm").glob("pdctl.*.*.*.*"):
            _, deployment, service, digest = path.name.split(".")[:4]
            directory = str(self.dir(deployment, service))
            if hashlib.sha256(directory.encode()).hexdigest()[:8] == digest:
                found.append(path.name)
        return found

    def processes(self) -> list[int]:
        """Everything that carries a mark of this home."""
        return [p.pid for found in procs.marked(str(self.base)).values() for p in found]


@dataclass
class Lab:
    """Starts single services through the shim, without plan or topology."""

    home: Home
    host: LocalHost

    def spec(self, code: str, name: str = "a", **more: Any) -> ServiceSpec:
        """A service that runs this Python text."""
        argv = (sys.executable, "-c", code)
        return ServiceSpec("demo", name, "mixed", "local", argv=argv, **more)

    def start(self, spec: ServiceSpec, **more: Any) -> dict[str, Any]:
        return self.call("start", {"spec": asdict(spec), "hash": spec.hash, **more})

    def stop(self, grace_s: float = 5.0) -> dict[str, Any]:
        answer = self.call("stop", {"deployment": "demo", "timeout": grace_s})
        return {s["service"]: s for s in answer["services"]}

    def status(self, name: str = "a") -> dict[str, Any]:
        found = self.call("status", {"deployment": "demo"})["services"]
        return next((s for s in found if s["service"] == name), {})

    def call(self, do: str, payload: dict[str, Any]) -> dict[str, Any]:
        return shim_call(self.host, do, payload)


@dataclass
class Site:
    """Whole deployments of the stub, from topology files."""

    home: Home
    python: Path
    model: Path
    taken: dict[tuple[str, str, int, str], int] = field(default_factory=dict)

    def _ports(
        self, name: str, role: str, number: int, purposes: tuple[str, ...]
    ) -> dict[str, int]:
        """Ports that were free once, and stay a service's. The next is free too: for a replica."""
        keys = [(name, role, number, purpose) for purpose in purposes]
        return {key[3]: self.taken.setdefault(key, free_run(2)[0]) for key in keys}

    def topology(self, name: str = "demo", **sections: Any) -> Path:
        document: dict[str, Any] = {
            "name": name,
            "model": str(self.model),
            "hosts": {"local": {"python": str(self.python)}},
            "router": {"host": "local", "port": free_port()},
            "prefill": [{"host": "local", "kv_cache": "1MiB"}],
            "decode": [{"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}],
        } | sections
        for role, purposes in (("prefill", ("port", "peer_port")), ("decode", ("port",))):
            for number, group in enumerate(document[role]):
                if group.get("replicas", 1) <= 2:
                    document[role][number] = self._ports(name, role, number, purposes) | group
        path = self.home.root / f"{name}.yaml"
        path.write_text(json.dumps(document))
        return path

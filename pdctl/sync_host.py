"""One host of a `sync`: what it is to have, what it lacks, and how it gets it.

Packs and locks are made once for all hosts of a run. Knows no topology.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pdctl import lockfile, models, wheels
from pdctl.agent import Session, shim_call
from pdctl.errors import HostCommandError, PdctlError
from pdctl.events import Event, Report
from pdctl.hosts import Host
from pdctl.lockfile import Lock
from pdctl.sending import Parcel, Say, parcel, send
from pdctl.wheels import Target

LOCK_NAME = "code.sync"
"""No deployment can be called so: its names have no dots."""
LOCK_WAIT_S = 3.0
INSTALL_TIMEOUT_S = 3700.0
OLDEST_PYTHON = (3, 11)
ROUTER = ("router",)
"""The extras of a host without instances: neither torch nor a model."""

NOTHING = Lock(())

State = Literal["unchanged", "synced", "planned", "own python", "failed"]


@dataclass(frozen=True, slots=True)
class SyncOptions:
    wheelhouse: Path | None = None
    """A folder of wheels that replaces the package index, for us and the hosts."""
    model: bool = False
    upgrade: bool = False
    """Resolve the packages anew."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class HostSync:
    """What came of one host."""

    host: str
    state: State
    code: str = ""
    """Id of the directory below `<base>/.code`."""
    about: str = ""
    nbytes: int = 0
    model: str = ""
    """Path of the model there, when it was asked for."""
    error: PdctlError | None = None
    seconds: float = 0.0


# ---- what is sent --------------------------------------------------------------------------------


@dataclass(slots=True)
class Packs:
    """Wheels and locks of this run; each is made once, whoever asks first."""

    options: SyncOptions
    folder: Path
    turn: threading.Lock
    locks: dict[tuple[tuple[str, ...], Target], Lock]
    made: dict[str, Path]

    def lock(self, wanted: tuple[str, ...], target: Target) -> Lock:
        key = (wanted, replace(target, python=""))
        with self.turn:
            if key not in self.locks:
                house, upgrade = self.options.wheelhouse, self.options.upgrade
                self.locks[key] = lockfile.resolve(wanted, target, house, upgrade=upgrade)
            return self.locks[key]

    def pip(self) -> Path:
        return self._make("pip", lambda: wheels.pip_wheel(self.folder))

    def runtime(self, *, native: bool) -> Path:
        return self._make(
            f"runtime {native}", lambda: wheels.runtime_wheel(self.folder, native=native)
        )

    def source(self) -> Path:
        return self._make("source", lambda: wheels.source_archive(self.folder))

    def _make(self, what: str, pack: Callable[[], Path]) -> Path:
        with self.turn:
            if what not in self.made:
                self.made[what] = pack()
            return self.made[what]


@contextmanager
def packed(options: SyncOptions) -> Iterator[Packs]:
    with tempfile.TemporaryDirectory(prefix="pdctl-sync-") as folder:
        yield Packs(options, Path(folder), threading.Lock(), {}, {})


# ---- one host ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Content:
    """All that a host is to have."""

    target: Target
    lock: Lock
    runtime: Path
    """A wheel; with `build` an archive of sources."""
    native: bool
    build: Lock = NOTHING
    """What builds the runtime there; empty when ours fits."""

    @property
    def environment(self) -> str:
        return _id(self.target.python, *map(str, self.target.version), self.lock.text)

    @property
    def id(self) -> str:
        return _id(self.environment, self.runtime.name)


def _id(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Job:
    host: Host
    extras: tuple[str, ...]
    own_python: str
    packs: Packs
    model_files: Sequence[models.HostFile]
    report: Report

    def run(self) -> HostSync:
        begun = time.monotonic()
        try:
            done = self._plan() if self.packs.options.dry_run else self._sync()
        except PdctlError as e:
            done = HostSync(self.host.name, "failed", error=e)
        done = replace(done, seconds=time.monotonic() - begun)
        kind: Literal["fail", "ready", "keep"] = "fail" if done.error else "ready"
        text = str(done.error) if done.error else f"{done.state}: {done.about}".rstrip(": ")
        self.report(Event(kind, text, done.host, "", done.seconds))
        return done

    def _say(self, text: str) -> None:
        self.report(Event("wait", text, self.host.name))

    def _plan(self) -> HostSync:
        if self.own_python:
            return self._own()
        facts = shim_call(self.host, "code", {})
        content = self._content(facts)
        about = _about(content)
        if facts["current"] == content.id:
            return HostSync(self.host.name, "unchanged", content.id, about)
        if content.environment in facts["environments"]:
            about += "; its packages are there"
        return HostSync(self.host.name, "planned", content.id, about)

    def _sync(self) -> HostSync:
        with Session(self.host, LOCK_NAME, purpose="sync", wait_s=LOCK_WAIT_S) as session:
            if self.own_python:
                done = self._own()
            else:
                facts = session.call("code", {})
                content = self._content(facts)
                done = self._install(session, facts, content)
            if not self.model_files or self.extras == ROUTER:
                return done
            parcels = [parcel(f.source, f.place, f.sha256) for f in self.model_files]
            sent = send(session, parcels, self._say)
            nbytes = done.nbytes + sent.nbytes
            return replace(done, nbytes=nbytes, model=sent.paths[-1])

    def _own(self) -> HostSync:
        about = f"python: {self.own_python} is looked after by its owner"
        return HostSync(self.host.name, "own python", about=about)

    def _content(self, facts: Mapping[str, Any]) -> _Content:
        target = self._target(facts["pythons"])
        self._say("choosing packages")
        lock = self.packs.lock(wheels.requirements(self.extras), target)
        if self.extras == ROUTER:
            return _Content(target, lock, self.packs.runtime(native=False), native=False)
        if wheels.native_fits(target):
            return _Content(target, lock, self.packs.runtime(native=True), native=True)
        if not wheels.has_source():
            raise HostCommandError(
                f"{self.host.name}: runtime._native of this machine ({wheels.here()}) does not fit "
                f"{target} there, and there are no sources here to build it from",
                host=self.host.name,
                hint="run this from a checkout of pdctl, or install the same Python there",
            )
        build = self.packs.lock(wheels.build_requirements(), target)
        return _Content(target, lock, self.packs.source(), native=True, build=build)

    def _target(self, pythons: Sequence[Mapping[str, Any]]) -> Target:
        """The interpreter there that is most like ours, else the first that is new enough."""
        fit = [
            Target(p["path"], tuple(p["version"][:2]), p["machine"], _pair(p["libc"]))
            for p in pythons
            if p["implementation"] == "cpython" and tuple(p["version"][:2]) >= OLDEST_PYTHON
        ]
        if not fit:
            found = ", ".join(".".join(map(str, p["version"])) for p in pythons) or "none"
            oldest = ".".join(map(str, OLDEST_PYTHON))
            raise HostCommandError(
                f"{self.host.name}: no Python {oldest} or newer there (found: {found})",
                host=self.host.name,
                hint=f"install python{oldest} or newer there; venv and pip are not needed",
            )
        return min(fit, key=lambda t: not wheels.native_fits(t))

    def _install(self, session: Session, facts: Mapping[str, Any], content: _Content) -> HostSync:
        name, about = self.host.name, _about(content)
        if facts["current"] == content.id:
            return HostSync(name, "unchanged", content.id, about)
        nbytes = 0
        if content.id not in facts["complete"]:
            fresh = content.environment not in facts["environments"]
            nbytes = send(session, self._parcels(content, fresh), self._say).nbytes
        request = {
            "id": content.id,
            "environment": content.environment,
            "python": content.target.python,
            "lock": content.lock.text,
            "runtime": content.runtime.name,
            "pip": self.packs.pip().name,
            "index": self.packs.options.wheelhouse is None,
            "build": content.build.text,
            "code": wheels.runtime_code(),
            "native": content.native,
        }
        with _watched(self.host, self._say):
            session.call("install", request, timeout=INSTALL_TIMEOUT_S)
        return HostSync(name, "synced", content.id, about, nbytes)

    def _parcels(self, content: _Content, fresh: bool) -> list[Parcel]:
        """Our own wheels, and with a wheelhouse the packages that the environment lacks."""
        files = [content.runtime, self.packs.pip()]
        parcels = [parcel(f, f"{{code}}/wheels/{f.name}") for f in files]
        if self.packs.options.wheelhouse is not None:
            packages = {*content.build.packages, *(content.lock.packages if fresh else ())}
            parcels += [
                parcel(Path(p.path), f"{{code}}/wheels/{p.file}", p.sha256)
                for p in sorted(packages, key=lambda p: p.file)
            ]
        return parcels


def _about(content: _Content) -> str:
    versions = {p.name.lower(): p.version for p in content.lock.packages}
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    packages = f"{len(versions)} packages"
    packages += ", its extension built there" if content.build.packages else ""
    return f"code {wheels.runtime_code()}, {content.target}{torch}, {packages}"


def _pair(version: str) -> tuple[int, int]:
    numbers = [int(n) for n in version.split(".")[:2] if n.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def _short(line: str) -> str:
    """A line of pip's without folders and remarks."""
    text = re.sub(r"\S*/|\(.*\)", "", line)
    return text if len(text) <= 60 else f"{text[:59]}…"


@contextmanager
def _watched(host: Host, say: Say) -> Iterator[None]:
    """While an install runs: what it is doing, once a second."""
    ended = threading.Event()

    def watch() -> None:
        last = ""
        while not ended.wait(1.0):
            try:
                line = _short(shim_call(host, "code", {"log": True})["line"])
            except PdctlError:
                continue  # the install itself will tell
            if line and line != last:
                say(f"installing: {line}")
                last = line

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

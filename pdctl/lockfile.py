"""Exact packages for a kind of host: resolved here by pip, pinned by version and hash, remembered.

A lock is made once for each set of requirements, target and source, so that hosts that are synced
later get the same versions. Nothing is installed here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pdctl.errors import PdctlError
from pdctl.wheels import Target

TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    sha256: str
    file: str
    """Name of its wheel."""
    path: str = ""
    """Where the wheel lies here; empty: only in the index."""


@dataclass(frozen=True, slots=True)
class Lock:
    packages: tuple[Package, ...]

    @property
    def text(self) -> str:
        """A requirements file with hashes."""
        return "".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in self.packages)


def resolve(
    wanted: Sequence[str], target: Target, wheelhouse: Path | None, *, upgrade: bool
) -> Lock:
    """The lock for these requirements. From the index without a wheelhouse; `upgrade` asks anew.

    Raises PdctlError that names what cannot be had. May take a minute when it asks an index.
    """
    if not wanted:
        return Lock(())
    place = _place(wanted, target, wheelhouse)
    if not upgrade and (known := _remembered(place)) is not None:
        return known
    lock = _ask_pip(wanted, target, wheelhouse)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = place.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([asdict(p) for p in lock.packages], indent=1))
    temporary.replace(place)
    return lock


def _place(wanted: Sequence[str], target: Target, wheelhouse: Path | None) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    listed: list[object] = []
    if wheelhouse is not None:
        stats = sorted((p.name, p.stat()) for p in wheelhouse.glob("*.whl"))
        listed = [str(wheelhouse.resolve()), [(n, s.st_size, s.st_mtime_ns) for n, s in stats]]
    key = json.dumps([list(wanted), target.version, target.machine, target.libc, listed])
    return state / "pdctl" / "locks" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _remembered(place: Path) -> Lock | None:
    try:
        return Lock(tuple(Package(**entry) for entry in json.loads(place.read_text())))
    except (OSError, ValueError, TypeError):
        return None


def _ask_pip(wanted: Sequence[str], target: Target, wheelhouse: Path | None) -> Lock:
    env = dict(os.environ)
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    argv += ["--disable-pip-version-check", "--no-input", "--no-color", "--progress-bar=off"]
    argv += ["--only-binary=:all:", "--python-version", ".".join(map(str, target.version))]
    for platform in target.platforms:
        argv += ["--platform", platform]
    if wheelhouse is not None:
        argv += ["--no-index", "--find-links", str(wheelhouse)]
        env = {k: v for k, v in env.items() if not k.startswith("PIP_")}
        env["PIP_CONFIG_FILE"] = os.devnull
    with tempfile.TemporaryDirectory(prefix="pdctl-lock-") as scratch:
        report = Path(scratch, "report.json")
        argv += ["--report", str(report), "--target", str(Path(scratch, "none")), *wanted]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as e:
            raise PdctlError(f"pip has not found the packages in {TIMEOUT_S:.0f} s") from e
        if done.returncode:
            raise _failure(done.stderr, target, wheelhouse)
        entries = json.loads(report.read_text())["install"]
    packages = [_package(e, wheelhouse is not None) for e in entries]
    return Lock(tuple(sorted(packages, key=lambda p: p.name.lower())))


def _package(entry: dict[str, dict[str, str]], local: bool) -> Package:
    url = urlsplit(entry["download_info"]["url"])
    path = unquote(url.path)
    info: dict[str, str] = entry["download_info"]["archive_info"]  # type: ignore[assignment]
    return Package(
        name=entry["metadata"]["name"],
        version=entry["metadata"]["version"],
        sha256=info["hash"].removeprefix("sha256="),
        file=path.rpartition("/")[2],
        path=path if local else "",
    )


def _failure(text: str, target: Target, wheelhouse: Path | None) -> PdctlError:
    errors = [line[6:].strip() for line in text.splitlines() if line.startswith("ERROR:")]
    reason = (errors or text.strip().splitlines() or ["no output"])[0]
    where = f"wheelhouse {wheelhouse}" if wheelhouse is not None else "package index"
    if wheelhouse is not None:
        hint = f"pip download --dest {wheelhouse} there what is missing, for {target}"
    else:
        hint = "pip's own settings apply (PIP_INDEX_URL, a proxy); or give --wheelhouse"
    return PdctlError(f"the {where} does not have all packages for {target}: {reason}", hint=hint)

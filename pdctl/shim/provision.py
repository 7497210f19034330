"""Code and its Python environment on this host, installed by `pdctl sync`.

<base>/.code/env/<id>/     a venv with the locked packages; `complete.json` is written last
<base>/.code/<id>/         a venv with the runtime alone, on top of one of those
<base>/.code/current       link to the one that new services use; previous: the one before
<base>/.code/wheels/       what was sent; empty after an install

A directory without `complete.json` is a remnant of an interrupted install and is built anew.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import Any

from . import versions
from .files import Refused, private_dir, read_json, write_json
from .service import Service, deployment_names, service_names
from .store import CODE, free_bytes

ID = re.compile(r"[0-9a-f]{16}\Z")
COMPLETE = "complete.json"
LOG = "install.log"
LOCK = "requirements.txt"
INSTALL_TIMEOUT_S = 3600.0
NEWEST, OLDEST = 15, 11
"""Minor versions of Python 3 that are looked for."""
_DESCRIBE = (
    "import json,platform,sys;"
    "print(json.dumps([list(sys.version_info[:3]),platform.machine(),platform.libc_ver()[1],"
    "sys.implementation.name]))"
)


# ---- what there is -------------------------------------------------------------------------------


def current(base: str) -> dict[str, str] | None:
    """What new services use: its id and interpreter; None when nothing was synced."""
    root = os.path.join(base, CODE)
    name = _link(root, "current")
    if not name or not _complete(os.path.join(root, name)):
        return None
    return {"id": name, "python": os.path.join(root, name, "venv", "bin", "python")}


def look(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """What an install has to know. With `log`: only the last line of the one that runs."""
    root = os.path.join(base, CODE)
    if request.get("log"):
        return {"line": _last_line(os.path.join(root, LOG))}
    known = current(base)
    return {
        "pythons": _pythons(),
        "current": known["id"] if known else "",
        "complete": [n for n in _names(root) if _complete(os.path.join(root, n))],
        "environments": [n for n in _names(root, "env") if _complete(os.path.join(root, "env", n))],
        "free": free_bytes(base),
    }


def _pythons() -> list[dict[str, Any]]:
    """Interpreters that could carry a runtime, the shim's own first."""
    found: dict[str, dict[str, Any]] = {}
    names = [f"python3.{minor}" for minor in range(NEWEST, OLDEST - 1, -1)]
    for path in [sys.executable, *filter(None, map(shutil.which, ["python3", *names]))]:
        real = os.path.realpath(path)
        if real in found:
            continue
        try:
            done = subprocess.run(
                [path, "-I", "-S", "-c", _DESCRIBE], capture_output=True, text=True, timeout=20
            )
            version, machine, libc, implementation = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue
        found[real] = {
            "path": path,
            "version": version,
            "machine": machine,
            "libc": libc,
            "implementation": implementation,
        }
    return list(found.values())


def _names(*parts: str) -> list[str]:
    try:
        return [n for n in os.listdir(os.path.join(*parts)) if ID.match(n)]
    except OSError:
        return []


def _complete(path: str) -> bool:
    return os.path.exists(os.path.join(path, COMPLETE))


def _link(root: str, name: str) -> str:
    try:
        return os.readlink(os.path.join(root, name))
    except OSError:
        return ""


def _last_line(path: str) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.path.getsize(path) - 4096))
            lines = f.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# ---- install -------------------------------------------------------------------------------------


def install(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Make `id` of the wheels that were sent, and the current one. At once when it is there.

    `lock`: a requirements file with hashes. `index`: packages come from the host's own index.
    """
    os.makedirs(base, 0o700, exist_ok=True)
    root = os.path.join(base, CODE)
    private_dir(root)
    private_dir(os.path.join(root, "env"))
    environment = os.path.join(root, "env", request["environment"])
    target = os.path.join(root, request["id"])
    work = Work(root, request)
    if not _complete(target):
        if not _complete(environment):
            work.environment(environment)
        work.code(target, environment)
    _switch(root, request["id"])
    shutil.rmtree(os.path.join(root, "wheels"), ignore_errors=True)
    return {"id": request["id"], "pruned": prune(base)}


class Work:
    """One install: how its venvs are made, and where pip tells what it does."""

    def __init__(self, root: str, request: dict[str, Any]) -> None:
        self.root = root
        self.request = request
        self.log = os.path.join(root, LOG)
        self.wheels = os.path.join(root, "wheels")

    def environment(self, target: str) -> None:
        """A venv with the locked packages."""
        with self._making(target, {}) as python:
            if self.request["lock"].strip():
                self._pip(python)

    def code(self, target: str, environment: str) -> None:
        """A venv with the runtime, on top of an environment."""
        record: dict[str, Any] = {"environment": os.path.basename(environment)}
        with self._making(target, record) as python:
            packages = _site_packages(os.path.join(target, "venv"))
            below = _site_packages(os.path.join(environment, "venv"))
            with open(os.path.join(packages, "pdctl_environment.pth"), "w") as f:
                f.write(f"import site; site.addsitedir({below!r})\n")
            # Our own wheel holds nothing but a package: to unpack it is to install it.
            with zipfile.ZipFile(os.path.join(self.wheels, self.request["runtime"])) as z:
                z.extractall(packages)
            record["versions"] = self._verify(python)

    @contextlib.contextmanager
    def _making(self, target: str, record: dict[str, Any]) -> Iterator[str]:
        """An empty venv to fill; its interpreter. Failed, it leaves nothing but the log."""
        shutil.rmtree(target, ignore_errors=True)
        try:
            private_dir(target)
            venv = os.path.join(target, "venv")
            self._run([self.request["python"], "-I", "-m", "venv", "--without-pip", venv])
            yield os.path.join(venv, "bin", "python")
            write_json(os.path.join(target, COMPLETE), record)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    def _pip(self, python: str) -> None:
        lock = os.path.join(self.wheels, LOCK)
        with open(lock, "w") as f:
            f.write(self.request["lock"])
        # Run from its wheel, pip would be compiled anew each time.
        pip = os.path.join(self.wheels, "unpacked")
        with zipfile.ZipFile(os.path.join(self.wheels, self.request["pip"])) as z:
            z.extractall(pip)
        argv = [python, "-I", os.path.join(pip, "pip"), "install", "--no-deps", "--require-hashes"]
        argv += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--no-color"]
        argv += ["--no-warn-script-location", "--root-user-action=ignore"]
        if not self.request["index"]:
            argv += ["--no-index", "--find-links", self.wheels]
        self._run([*argv, "-r", lock])

    def _verify(self, python: str) -> dict[str, Any]:
        """What was installed is what was sent."""
        found = versions.ask(python)
        if found.get("error") or found.get("code") != self.request["code"]:
            why = found.get("error") or f"it has code {found.get('code') or 'none'}"
            raise Refused("install", f"the installed runtime is not the sent one: {why}")
        if self.request["native"] and found["native"]:
            raise Refused(
                "install",
                f"runtime._native cannot be loaded here: {found['native']}",
                f"see {self.log}",
            )
        return found

    def _run(self, argv: list[str]) -> None:
        env = dict(os.environ)
        if not self.request["index"]:
            env = {k: v for k, v in env.items() if not k.startswith("PIP_")}
            env["PIP_CONFIG_FILE"] = os.devnull
        with open(self.log, "w") as log:
            try:
                done = subprocess.run(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd="/",
                    timeout=INSTALL_TIMEOUT_S,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise Refused(
                    "install", f"{argv[0]} did not end in {INSTALL_TIMEOUT_S:.0f} s"
                ) from None
        if done.returncode:
            raise Refused("install", self._why(), f"all of it is in {self.log} on that host")

    def _why(self) -> str:
        with open(self.log, errors="replace") as f:
            lines = [line.strip() for line in f if line.strip()]
        full = [line for line in lines if "No space left on device" in line]
        errors = [line for line in lines if line.startswith(("ERROR:", "Error:"))]
        return (full or errors or lines or ["it ended without a word"])[-1]


def _site_packages(venv: str) -> str:
    return glob.glob(os.path.join(glob.escape(venv), "lib", "python3*", "site-packages"))[0]


def _switch(root: str, name: str) -> None:
    """Atomically; the one that was current stays as `previous`."""
    before = _link(root, "current")
    if before == name:
        return
    if before:
        _point(root, "previous", before)
    _point(root, "current", name)


def _point(root: str, link: str, name: str) -> None:
    temporary = os.path.join(root, f".{link}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(name, temporary)
    os.replace(temporary, os.path.join(root, link))


# ---- prune ---------------------------------------------------------------------------------------


def prune(base: str) -> list[str]:
    """Remove all but the current one, the previous one, and what a recorded service runs from."""
    root = os.path.join(base, CODE)
    keep = {_link(root, "current"), _link(root, "previous"), *_in_use(base, root)}
    gone = [name for name in _names(root) if name not in keep]
    for name in gone:
        _remove(os.path.join(root, name))
    below = {read_json(os.path.join(root, n, COMPLETE)).get("environment") for n in _names(root)}
    for name in _names(root, "env"):
        if name not in below:
            _remove(os.path.join(root, "env", name))
    return gone


def _in_use(base: str, root: str) -> set[str]:
    used = set()
    for deployment in deployment_names(base):
        for name in service_names(base, deployment):
            for word in Service(base, deployment, name).spec.get("argv", ()):
                if word.startswith(root + "/"):
                    used.add(os.path.relpath(word, root).split("/")[0])
    return used


def _remove(path: str) -> None:
    """First its marker: what is half removed must not look whole."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, COMPLETE))
    shutil.rmtree(path, ignore_errors=True)

"""Python environments made of what was sent: venvs, filled by pip, the runtime on top.

Half made ones are removed at once, also when the pdctl that asked is gone. Does not know which
one is in use.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from typing import Any

from . import asker, interpreters
from .files import Refused, private_dir, write_json
from .synced import COMPLETE

LOG = "install.log"
LOCK = "requirements.txt"
INSTALL_TIMEOUT_S = 3600.0
POLL_S = 0.5


class Work:
    """One install: how its venvs are made, and where pip tells what it does.

    Of the request: `python` to start from; `pip`, `runtime`: files that were sent; `lock`: a
    requirements file with hashes; `index`: packages come from the host's own; `build`: a lock of
    what builds the runtime, which then is an archive of sources; `code`, `native`: what has to be
    there at the end.
    """

    def __init__(self, root: str, request: dict[str, Any]) -> None:
        self.root = root
        self.request = request
        self.log = os.path.join(root, LOG)
        self.wheels = os.path.join(root, "wheels")

    def environment(self, target: str) -> None:
        """A venv with the locked packages."""
        with self._making(target, {}) as python:
            if self.request["lock"].strip():
                self._pip(python, self.request["lock"])

    def code(self, target: str, environment: str) -> None:
        """A venv with the runtime, on top of an environment."""
        record: dict[str, Any] = {"environment": os.path.basename(environment)}
        with self._making(target, record) as python:
            packages = _site_packages(os.path.join(target, "venv"))
            below = _site_packages(os.path.join(environment, "venv"))
            with open(os.path.join(packages, "pdctl_environment.pth"), "w") as f:
                f.write(f"import site; site.addsitedir({below!r})\n")
            # Our own wheel holds nothing but packages: to unpack it is to install it.
            with zipfile.ZipFile(self._runtime()) as z:
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

    def _runtime(self) -> str:
        """The runtime's wheel: as it was sent, or built here of the sources that were."""
        sent = os.path.join(self.wheels, self.request["runtime"])
        if not self.request["build"]:
            return sent
        source, built = (os.path.join(self.wheels, name) for name in ("source", "built"))
        for folder in (source, built):
            shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(sent) as archive:
            archive.extractall(source)
        with self._making(os.path.join(self.wheels, "build"), {}) as python:
            self._pip(python, self.request["build"])
            tools = {"PATH": f"{os.path.dirname(python)}:{os.environ.get('PATH', os.defpath)}"}
            argv = [*self._pip_argv(python, "wheel"), "--no-index", "--no-build-isolation", "-v"]
            self._run([*argv, "--wheel-dir", built, source], tools)
        return glob.glob(os.path.join(glob.escape(built), "*.whl"))[0]

    def _pip(self, python: str, lock: str) -> None:
        path = os.path.join(self.wheels, LOCK)
        with open(path, "w") as f:
            f.write(lock)
        argv = [*self._pip_argv(python, "install"), "--require-hashes", "--no-warn-script-location"]
        argv += ["--root-user-action=ignore", "--progress-bar=off"]
        if not self.request["index"]:
            argv += ["--no-index", "--find-links", self.wheels]
        self._run([*argv, "-r", path])

    def _pip_argv(self, python: str, command: str) -> list[str]:
        pip = os.path.join(self.wheels, "unpacked")
        # Run from its wheel, pip would be compiled anew each time.
        with zipfile.ZipFile(os.path.join(self.wheels, self.request["pip"])) as z:
            z.extractall(pip)
        argv = [python, "-I", os.path.join(pip, "pip"), command, "--no-deps", "--no-input"]
        return [*argv, "--disable-pip-version-check", "--no-color"]

    def _verify(self, python: str) -> dict[str, Any]:
        """What was installed is what was sent."""
        found = interpreters.ask(python)
        if found.get("error") or found.get("code") != self.request["code"]:
            why = found.get("error") or f"it has code {found.get('code') or 'none'}"
            raise Refused("install", f"the installed runtime is not the sent one: {why}")
        if self.request["native"] and found["native"]:
            raise Refused(
                "install",
                f"runtime._native cannot be loaded here: {found['native']}",
                f"a compiler (g++) has to be there to build it; see {self.log}"
                if self.request["build"]
                else "",
            )
        return found

    def _run(self, argv: list[str], more: dict[str, str] | None = None) -> None:
        env = {**os.environ, **(more or {})}
        if not self.request["index"]:
            env = {k: v for k, v in env.items() if not k.startswith("PIP_")}
            env["PIP_CONFIG_FILE"] = os.devnull
        with open(self.log, "w") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        try:
            code = _wait(process, argv[0])
        finally:
            if process.returncode is None:  # its pid, which is its group's too, means no other
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            raise Refused("install", self._why(), f"all of it is in {self.log} on that host")

    def _why(self) -> str:
        with open(self.log, errors="replace") as f:
            lines = [line.strip() for line in f if line.strip()]
        full = [line for line in lines if "No space left on device" in line]
        errors = [line for line in lines if line.startswith(("ERROR:", "Error:"))]
        return (full or errors or lines or ["it ended without a word"])[-1]


def _wait(process: subprocess.Popen[bytes], name: str) -> int:
    """Until it ends, for as long as whoever asked is there; its exit code."""
    deadline = time.monotonic() + INSTALL_TIMEOUT_S
    while True:
        try:
            return process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if asker.gone():
                raise Refused("install", "whoever asked for it is gone") from None
            if time.monotonic() >= deadline:
                why = f"{name} did not end in {INSTALL_TIMEOUT_S:.0f} s"
                raise Refused("install", why) from None


def _site_packages(venv: str) -> str:
    return glob.glob(os.path.join(glob.escape(venv), "lib", "python3*", "site-packages"))[0]

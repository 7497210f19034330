"""A host as pdctl sees it: talk to a program line by line, put one there, feed one with a file.

`Host` is the contract; `LocalHost` is this machine. Knows nothing of services or the shim.
Every wait has a timeout, and OS errors become PdctlError here.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from pdctl.errors import HostCommandError, StateError
from pdctl.shim.procs import MARKER
from pdctl.shim.unpack import MAIN, unpack

PIECE_BYTES = 1 << 18
"""Of a file on its way to a host."""
STALL_S = 60.0
"""How long a program may take to accept the next piece."""


@dataclass(frozen=True, slots=True)
class Result:
    rc: int
    out: str
    err: str


class Channel(Protocol):
    """A running program's stdin and stdout, by lines. It sees end-of-file when we close or die."""

    def send(self, line: str) -> None: ...

    def receive(self, timeout: float | None) -> str | None:
        """The next line; None at the end. Raises HostCommandError after `timeout` seconds."""

    def error_text(self) -> str:
        """Close, and return what the program wrote to stderr."""

    def close(self) -> None: ...


class Host(Protocol):
    @property
    def name(self) -> str:
        """The topology's key."""

    @property
    def is_local(self) -> bool: ...

    @property
    def python(self) -> str:
        """The interpreter that runs what pdctl sends."""

    @property
    def base(self) -> str:
        """Absolute path of the state directory (PDCTL_HOME or ~/.pdctl) there."""

    def program(self, folder: str, files: Mapping[str, str], arguments: Sequence[str]) -> Channel:
        """Run the Python program that these text files are, `__main__.py` first, from `folder`.

        `folder` is below `base`. When it is not there it is made first, private, whole or not at
        all; its parents too. Raises StateError when it cannot be made.
        """

    def feed(self, argv: Sequence[str], source: BinaryIO, sent: Callable[[int], None]) -> Result:
        """Run to the end with the rest of `source` as stdin; `sent` hears of its bytes.

        A non-zero exit is a Result; failing to run it is a HostCommandError.
        """

    def channel(self, argv: Sequence[str]) -> Channel: ...

    def close(self) -> None: ...


class LocalHost:
    """This machine, without SSH."""

    is_local = True

    def __init__(self, name: str = "local", *, python: str = sys.executable) -> None:
        self.name = name
        self.python = python
        base = os.environ.get("PDCTL_HOME") or "~/.pdctl"
        self.base = os.path.abspath(os.path.expanduser(base))
        self._refuse_foreign_base()

    def _refuse_foreign_base(self) -> None:
        """We run code from there, and trust its records with signals: it has to be ours alone."""
        try:
            found = os.stat(self.base)
        except OSError:
            return  # not there yet, or out of reach: what needs it will say so
        if found.st_uid != os.getuid():
            raise StateError(
                f"{self.base} belongs to another user (uid {found.st_uid})",
                hint="set PDCTL_HOME to a directory of yours",
            )
        if found.st_mode & 0o022:
            raise StateError(
                f"{self.base} can be written by others", hint=f"chmod go-w {self.base}"
            )

    def program(
        self, folder: str, files: Mapping[str, str], arguments: Sequence[str]
    ) -> LocalChannel:
        where = os.path.join(self.base, folder)
        main = os.path.join(where, MAIN)
        if not os.path.exists(main):
            try:
                unpack(where, dict(files))
            except OSError as e:
                raise StateError(
                    f"{self.name}: {e.filename or where}: {e.strerror}",
                    hint="make room or make it writable, or set PDCTL_HOME to another directory",
                ) from e
        return self.channel([self.python, "-I", "-S", main, *arguments])

    def feed(self, argv: Sequence[str], source: BinaryIO, sent: Callable[[int], None]) -> Result:
        with self._spawn(argv) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended early; its exit tells why
                while piece := source.read(PIECE_BYTES):
                    process.stdin.write(piece)
                    sent(len(piece))
                process.stdin.flush()
            out, err = process.communicate()
        return Result(
            process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def channel(self, argv: Sequence[str]) -> LocalChannel:
        return LocalChannel(self.name, self._spawn(argv))

    def _spawn(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if k != MARKER}
        try:
            # A session of its own: Ctrl-C at the terminal is for pdctl, which then decides.
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
            )
        except OSError as e:
            raise HostCommandError(
                f"{self.name}: cannot run {argv[0]}: {e.strerror}", host=self.name
            ) from e

    def close(self) -> None:
        """Nothing is held."""


class LocalChannel:
    def __init__(self, host: str, process: subprocess.Popen[bytes]) -> None:
        self._host = host
        self._process = process
        self._buffer = b""

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as e:  # ValueError: this end was closed before
            raise self._ended() from e

    def receive(self, timeout: float | None) -> str | None:
        assert self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([stdout], [], [], left)[0]:
                raise HostCommandError(
                    f"{self._host}: no answer within {timeout:.0f} s", host=self._host
                )
            data = os.read(stdout, 65536)
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode(errors="replace")

    def error_text(self) -> str:
        self.close()
        assert self._process.stderr is not None
        return self._process.stderr.read().decode(errors="replace").strip()

    def _ended(self) -> HostCommandError:
        return HostCommandError(f"{self._host}: the program there has ended", host=self._host)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # it ended first, with a line of ours unread
            self._process.stdin.close()
        # While it waits for us to read on, it does not see that its input has ended. Replaced, not
        # closed: another thread may be about to read from this number.
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), self._process.stdout.fileno(), inheritable=False)
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

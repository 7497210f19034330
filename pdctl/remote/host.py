"""`Host` over SSH: programs, files and line-by-line talk on one connection, made on first use.

Commands run in the login's shell, without a terminal, each argument quoted. What SSH raises
becomes HostUnreachable here: host, step, cause, and what to try.
"""

from __future__ import annotations

import contextlib
import io
import json
import select
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pdctl.errors import HostCommandError, HostUnreachable, StateError
from pdctl.hosts import PIECE_BYTES, STALL_S, Channel, Result
from pdctl.remote.config import CONNECT_TIMEOUT_S, StepFailed
from pdctl.remote.connect import Routes
from pdctl.shim import unpack as shim_unpack

_STEP_MS = 200
_UNPACK_S = 30.0
_SIGN_S = 5.0
"""How long a host that may have fallen silent has to answer anything at all."""
_HOME = "pdctl's home: "
"""Before the answer, for what the login's start-up files print comes first."""
_UNPACK = (
    "import json, sys; source, files = json.loads(sys.stdin.readline()); exec(source); "
    "put_and_become(sys.argv[1], files, sys.argv[2:])"
)
# One session for all of it: where home is, whether the program is there, and its start. In one line
# each, for a login's shell may be a csh.
_START = "; ".join(
    [
        'base="${PDCTL_HOME:-$HOME/.pdctl}"; folder="$base/$1"; python="$2"; unpack="$3"',
        f'main="$folder/{shim_unpack.MAIN}"; shift 3',
        f'if [ -e "$main" ]; then printf "%s%s\\n" {shlex.quote(_HOME)} "has $base"',
        'exec "$python" -I -S "$main" "$@"; fi',
        f'printf "%s%s\\n" {shlex.quote(_HOME)} "lacks $base"',
        'exec "$python" -I -S -c "$unpack" "$folder" "$@"',
    ]
)


class SshHost:
    """A machine under its key in the topology. Connects on first use; one connection for all."""

    is_local = False

    def __init__(
        self, name: str, address: str, *, python: str = "python3", routes: Routes | None = None
    ) -> None:
        """`routes`: shared with the other hosts of a run, and closed by its owner."""
        self.name = name
        self.address = address
        self.python = python
        self._own_routes = Routes() if routes is None else None
        self._routes = routes or self._own_routes or Routes()
        self._turn = threading.Lock()
        self._connection: Any = None
        self._failed: StepFailed | None = None
        """Why there is none: it is not tried again until `close`."""
        self._base = ""

    @property
    def base(self) -> str:
        """Known from the first program on."""
        assert self._base, f"{self.name}: nothing was run there yet"
        return self._base

    def program(self, folder: str, files: Mapping[str, str], arguments: Sequence[str]) -> Channel:
        """Where it is missing, the process that puts it there becomes the program."""
        argv = ["sh", "-c", _START, "sh", folder, self.python, _UNPACK, *arguments]
        channel = self.channel(argv)
        try:
            state, _, base = channel.awaited(_HOME, CONNECT_TIMEOUT_S).partition(" ")
            if not base.startswith("/"):
                raise HostCommandError(f"{self.name}: it names no home directory", host=self.name)
            self._base = base
            if state == "lacks":
                source = Path(shim_unpack.__file__).read_text()
                self._put(channel, json.dumps([source, dict(files)]))
        except BaseException:
            channel.close()
            raise
        return channel

    def _put(self, channel: SshChannel, text: str) -> None:
        with contextlib.suppress(HostCommandError):  # it ended already; its exit tells why
            channel.send(text)
        if channel.receive(_UNPACK_S) == shim_unpack.MADE:
            return
        rc, said = channel.end()
        reason = (said.splitlines() or ["it failed without a word"])[-1]
        if rc in (126, 127):
            raise HostCommandError(
                f"{self.name}: {self.python} cannot be run: {reason}",
                host=self.name,
                hint="pdctl needs python3 (3.8 or newer) there, on the PATH of `ssh HOST COMMAND`",
            )
        raise StateError(
            f"{self.name}: {reason}",
            hint="make room or make it writable, or set PDCTL_HOME there",
        )

    @staticmethod
    def _send(channel: Any, pieces: Iterable[bytes]) -> None:
        """A program that ends before it has read all is no lost connection: its exit tells why."""
        try:
            for piece in pieces:
                channel.sendall(piece)
        except OSError:
            if not channel.closed or not channel.transport.is_active():
                raise

    def _rest(self, channel: Any, what: str, timeout: float) -> Result:
        """What the program says, now that it gets no more, and how it ends."""
        deadline = time.monotonic() + timeout
        out, err = io.BytesIO(), io.BytesIO()
        channel.shutdown_write()
        arrival = select.poll()  # not select(), which knows no descriptors above 1023
        arrival.register(channel.fileno(), select.POLLIN)
        while not channel.eof_received or channel.recv_ready() or channel.recv_stderr_ready():
            arrival.poll(_STEP_MS)
            self._drain(channel, out, err)
            if time.monotonic() > deadline:
                raise self._late(what, timeout)
        if not channel.status_event.wait(max(0.0, deadline - time.monotonic())):
            raise self._late(what, timeout)
        self._drain(channel, out, err)
        text = [b.getvalue().decode(errors="replace") for b in (out, err)]
        return Result(channel.recv_exit_status(), text[0], text[1])

    def _late(self, what: str, timeout: float) -> HostCommandError:
        return HostCommandError(
            f"{self.name}: {what} did not end within {timeout:.0f} s", host=self.name
        )

    @staticmethod
    def _drain(channel: Any, out: io.BytesIO, err: io.BytesIO) -> None:
        while channel.recv_ready():
            out.write(channel.recv(65536))
        while channel.recv_stderr_ready():
            err.write(channel.recv_stderr(65536))

    def feed(self, argv: Sequence[str], source: BinaryIO, sent: Callable[[int], None]) -> Result:
        def pieces() -> Iterator[bytes]:
            while piece := source.read(PIECE_BYTES):
                yield piece
                sent(len(piece))

        channel = self._open(argv)
        with contextlib.closing(channel), self._translated():
            channel.settimeout(STALL_S)
            self._send(channel, pieces())
            return self._rest(channel, argv[0], STALL_S)

    def channel(self, argv: Sequence[str]) -> SshChannel:
        return SshChannel(self.name, self._open(argv), self._unreachable)

    def close(self) -> None:
        self._failed = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._own_routes is not None:
            self._own_routes.close()

    def _open(self, argv: Sequence[str]) -> Any:
        """A channel on which the program runs."""
        with self._translated():
            channel = self._session(self._connect().transport)
            channel.exec_command(shlex.join(argv))
            return channel

    @staticmethod
    def _session(transport: Any) -> Any:
        """Where MaxSessions is 1, sshd needs a moment to see that the last one has ended."""
        import paramiko

        for pause in (0.02, 0.1, 0.5):
            with contextlib.suppress(paramiko.ChannelException):
                return transport.open_session(timeout=CONNECT_TIMEOUT_S)
            time.sleep(pause)
        return transport.open_session(timeout=CONNECT_TIMEOUT_S)

    def _connect(self) -> Any:
        with self._turn:
            if self._failed is not None:
                raise self._failed
            if self._connection is None or not self._connection.is_connected:
                try:
                    self._connection = self._routes.connect(self.address)
                except StepFailed as e:
                    self._failed = e
                    raise
            return self._connection

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where SSH's exceptions become ours."""
        import paramiko

        try:
            yield
        except StepFailed as e:
            raise self._unreachable(str(e), e.hint) from e
        except paramiko.ChannelException as e:
            raise self._unreachable(
                f"command: sshd refuses one more session: {e.text}",
                "see MaxSessions and ForceCommand in its sshd_config",
            ) from e
        except (paramiko.SSHException, EOFError, OSError) as e:
            reason = str(e).strip() or "the connection was lost"
            raise self._unreachable(f"command: {reason}", f"try `ssh {self.address} true`") from e

    def _unreachable(self, reason: str, hint: str) -> HostUnreachable:
        who = self.name if self.name == self.address else f"{self.name} ({self.address})"
        return HostUnreachable(f"{who}: {reason}", host=self.name, hint=hint)


class SshChannel:
    def __init__(
        self, host: str, channel: Any, unreachable: Callable[[str, str], HostUnreachable]
    ) -> None:
        self._host = host
        self._channel = channel
        self._unreachable = unreachable
        self._buffer = b""

    def send(self, line: str) -> None:
        try:
            self._channel.sendall(line.encode() + b"\n")
        except OSError as e:
            self._check_connection()
            raise HostCommandError(f"{self._host}: the program has ended", host=self._host) from e

    def receive(self, timeout: float | None) -> str | None:
        self._channel.settimeout(timeout)
        while b"\n" not in self._buffer:
            try:
                data = self._channel.recv(65536)
            except TimeoutError as e:
                if self._is_silent():
                    raise self._unreachable(
                        f"command: no answer within {timeout:.0f} s, nor to anything else",
                        "it was reached before: is it still on, and the network whole?",
                    ) from e
                raise HostCommandError(
                    f"{self._host}: no answer within {timeout:.0f} s", host=self._host
                ) from e
            if not data:
                self._check_connection()
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode(errors="replace")

    def _check_connection(self) -> None:
        """The end of a program is one thing, that of the connection to its host another."""
        if not self._channel.transport.is_active():
            raise self._unreachable(
                "command: the connection was lost", "is it still on, and the network whole?"
            )

    def _is_silent(self) -> bool:
        """Whether the host says nothing at all: a refusal of one more session is an answer too."""
        import paramiko

        try:
            self._channel.transport.open_session(timeout=_SIGN_S).close()
        except paramiko.ChannelException:
            return False
        except (paramiko.SSHException, EOFError, OSError):
            return True
        return False

    def awaited(self, start: str, timeout: float) -> str:
        """The rest of the line in which this comes; empty when the program ends without it."""
        line = self.receive(timeout)
        while line is not None and start not in line:
            line = self.receive(timeout)
        return (line or "").rpartition(start)[2]

    def end(self) -> tuple[int, str]:
        """Exit code and stderr of a program that has ended; -1: it does not say."""
        text = self.error_text()
        return self._channel.exit_status, text

    def error_text(self) -> str:
        text = b""
        self._channel.settimeout(CONNECT_TIMEOUT_S)
        with contextlib.suppress(OSError):
            while data := self._channel.recv_stderr(65536):
                text += data
        self.close()
        return text.decode(errors="replace").strip()

    def close(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # with its connection gone it cannot say so
            self._channel.close()

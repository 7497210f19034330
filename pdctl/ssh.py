"""A host reached by SSH: "if `ssh host` works, pdctl works".

Settings come from `ssh -G`, so that Include, jumps, keys and ports are the user's own. Host keys
are checked against the user's known_hosts. Fabric opens the connections; commands run on its
channels, each argument quoted. It is imported here only, and only when a host needs it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pdctl.errors import HostCommandError, HostUnreachable, StateError
from pdctl.hosts import Channel, Result

CONNECT_TIMEOUT_S = 15.0
KEEPALIVE_S = 15
_STEP_S = 0.2


@dataclass(frozen=True, slots=True)
class SshSettings:
    """What OpenSSH would use for a destination."""

    destination: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    known_hosts: tuple[str, ...]
    strict: str
    """StrictHostKeyChecking: `yes`, `ask`, `accept-new` or `no`."""
    jumps: tuple[str, ...]
    proxy_command: str


def resolve(destination: str) -> SshSettings:
    """Ask `ssh -G`. PDCTL_SSH_CONFIG names another configuration file than the user's."""
    config = os.environ.get("PDCTL_SSH_CONFIG")
    argv = ["ssh", *(["-F", config] if config else []), "-G", "--", destination]
    try:
        found = subprocess.run(argv, capture_output=True, text=True, timeout=CONNECT_TIMEOUT_S)
    except FileNotFoundError as e:
        raise HostUnreachable(
            f"{destination}: there is no `ssh` here",
            host=destination,
            hint="install openssh-client",
        ) from e
    except subprocess.TimeoutExpired as e:
        raise HostUnreachable(f"{destination}: `ssh -G` hangs", host=destination) from e
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["it failed"])[-1]
        raise HostUnreachable(f"{destination}: `ssh -G`: {reason}", host=destination)
    return parse_settings(destination, found.stdout)


def parse_settings(destination: str, text: str) -> SshSettings:
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)

    def one(key: str, default: str = "") -> str:
        value = values.get(key, [default])[0]
        return "" if value == "none" else value

    files = f"{one('userknownhostsfile')} {one('globalknownhostsfile')}".split()
    strict = one("stricthostkeychecking", "ask")
    return SshSettings(
        destination=destination,
        hostname=one("hostname", destination),
        port=int(one("port", "22")),
        user=one("user"),
        identity_files=tuple(_expanded(values.get("identityfile", []))),
        known_hosts=tuple(_expanded(files)),
        strict={"true": "yes", "false": "no", "off": "no"}.get(strict, strict),
        jumps=tuple(j for j in one("proxyjump").split(",") if j),
        proxy_command=one("proxycommand"),
    )


def _expanded(names: Sequence[str]) -> Iterator[str]:
    return (str(Path(name).expanduser()) for name in names)


class SshHost:
    """A machine under its key in the topology. Connects on first use; one connection for all."""

    is_local = False

    def __init__(self, name: str, address: str, *, python: str = "python3") -> None:
        self.name = name
        self.address = address
        self.python = python
        self._connection: Any = None
        self._base = ""

    @property
    def base(self) -> str:
        if not self._base:
            text = 'printf %s "${PDCTL_HOME:-$HOME/.pdctl}"'
            result = self.run(["sh", "-c", text], timeout=CONNECT_TIMEOUT_S)
            if result.rc or not result.out.startswith("/"):
                raise HostCommandError(f"{self.name}: it names no home directory", host=self.name)
            self._base = result.out
        return self._base

    def run(self, argv: Sequence[str], *, stdin: str = "", timeout: float) -> Result:
        channel = self._open(argv)
        with contextlib.closing(channel), self._translated():
            return self._communicate(channel, stdin.encode(), argv[0], timeout)

    def _communicate(self, channel: Any, data: bytes, what: str, timeout: float) -> Result:
        deadline = time.monotonic() + timeout
        out, err = io.BytesIO(), io.BytesIO()
        channel.settimeout(timeout)
        channel.sendall(data)
        channel.shutdown_write()
        while not (channel.exit_status_ready() and channel.eof_received):
            self._drain(channel, out, err)
            if time.monotonic() > deadline:
                raise HostCommandError(
                    f"{self.name}: {what} did not end within {timeout:.0f} s", host=self.name
                )
            select.select([channel], [], [], _STEP_S)
        self._drain(channel, out, err)
        text = [b.getvalue().decode(errors="replace") for b in (out, err)]
        return Result(channel.recv_exit_status(), text[0], text[1])

    @staticmethod
    def _drain(channel: Any, out: io.BytesIO, err: io.BytesIO) -> None:
        while channel.recv_ready():
            out.write(channel.recv(65536))
        while channel.recv_stderr_ready():
            err.write(channel.recv_stderr(65536))

    def exists(self, path: str) -> bool:
        with self._translated():
            try:
                self._connect().sftp().stat(path)
            except FileNotFoundError:
                return False
        return True

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        temporary = f"{path}.{os.getpid()}.put"
        with self._translated():
            sftp = self._connect().sftp()
            try:
                for parent in [*reversed(PurePosixPath(path).parents)][1:]:
                    try:
                        sftp.stat(str(parent))
                    except FileNotFoundError:
                        sftp.mkdir(str(parent), 0o700)
                with sftp.open(temporary, "wx") as f:
                    sftp.chmod(temporary, mode)
                    f.write(data)
                sftp.posix_rename(temporary, path)
            except OSError as e:
                raise StateError(
                    f"{self.name}: {path}: {e.strerror or e or 'cannot be written'}",
                    hint="make room or make it writable, or set PDCTL_HOME there",
                ) from e

    def channel(self, argv: Sequence[str]) -> Channel:
        return SshChannel(self.name, self._open(argv))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self, argv: Sequence[str]) -> Any:
        """A channel on which the program runs, without a terminal, in the login's shell."""
        with self._translated():
            transport = self._connect().client.get_transport()
            channel = transport.open_session(timeout=CONNECT_TIMEOUT_S)
            channel.exec_command(shlex.join(argv))
            return channel

    def _connect(self) -> Any:
        if self._connection is None or not self._connection.is_connected:
            connection = _connection(resolve(self.address))
            connection.open()
            connection.client.get_transport().set_keepalive(KEEPALIVE_S)
            self._connection = connection
        return self._connection

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where SSH's exceptions become ours."""
        import paramiko

        try:
            yield
        except paramiko.BadHostKeyException as e:
            raise self._unreachable(
                f"its host key is not the known one ({e.key.get_name()})",
                "somebody may be in between; if the host was reinstalled: ssh-keygen -R HOST",
            ) from e
        except _UnknownHostKey as e:
            raise self._unreachable(
                f"its host key is not known ({e})", f"connect once with `ssh {self.address}`"
            ) from e
        except paramiko.AuthenticationException as e:
            raise self._unreachable(
                "it does not let us log in", f"try `ssh {self.address} true`; is the key loaded?"
            ) from e
        except socket.gaierror as e:
            raise self._unreachable(f"its name cannot be resolved: {e.strerror}", "") from e
        except (paramiko.SSHException, EOFError, OSError) as e:
            reason = str(e).strip() or type(e).__name__
            raise self._unreachable(reason, f"try `ssh {self.address} true`") from e

    def _unreachable(self, reason: str, hint: str) -> HostUnreachable:
        return HostUnreachable(f"{self.name} ({self.address}): {reason}", host=self.name, hint=hint)


class _UnknownHostKey(Exception):
    """No known_hosts file has a key of this host."""


def _connection(settings: SshSettings) -> Any:
    import fabric
    import paramiko

    gateway: Any = None
    for jump in settings.jumps:
        inner = _connection(resolve(jump))
        inner.gateway = gateway
        gateway = inner
    if settings.proxy_command and not settings.jumps:
        gateway = settings.proxy_command
    connection = fabric.Connection(
        settings.hostname,
        user=settings.user or None,
        port=settings.port,
        gateway=gateway,
        connect_timeout=CONNECT_TIMEOUT_S,
        # Already resolved: Fabric's own reading of the file would apply parts of it twice.
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
        connect_kwargs={
            "key_filename": [f for f in settings.identity_files if os.path.exists(f)],
            "banner_timeout": CONNECT_TIMEOUT_S,
            "auth_timeout": CONNECT_TIMEOUT_S,
            "channel_timeout": CONNECT_TIMEOUT_S,
        },
    )
    for file in filter(os.path.exists, settings.known_hosts):
        connection.client.load_system_host_keys(file)
    connection.client.set_missing_host_key_policy(_policy(settings))
    return connection


def _policy(settings: SshSettings) -> Any:
    import paramiko

    class Policy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
        """As StrictHostKeyChecking says; a new key is appended, the file never rewritten."""

        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            if settings.strict == "no":
                return
            if settings.strict != "accept-new" or not settings.known_hosts:
                raise _UnknownHostKey(f"{key.get_name()} {key.fingerprint}")
            with open(settings.known_hosts[0], "a") as f:
                f.write(f"{hostname} {key.get_name()} {key.get_base64()}\n")

    return Policy()


class SshChannel:
    def __init__(self, host: str, channel: Any) -> None:
        self._host = host
        self._channel = channel
        self._buffer = b""

    def send(self, line: str) -> None:
        try:
            self._channel.sendall(line.encode() + b"\n")
        except OSError as e:
            raise HostCommandError(f"{self._host}: the program has ended", host=self._host) from e

    def receive(self, timeout: float | None) -> str | None:
        self._channel.settimeout(timeout)
        while b"\n" not in self._buffer:
            try:
                data = self._channel.recv(65536)
            except TimeoutError as e:
                raise HostCommandError(
                    f"{self._host}: no answer within {timeout:.0f} s", host=self._host
                ) from e
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode(errors="replace")

    def error_text(self) -> str:
        text = b""
        self._channel.settimeout(CONNECT_TIMEOUT_S)
        with contextlib.suppress(OSError):
            while data := self._channel.recv_stderr(65536):
                text += data
        self.close()
        return text.decode(errors="replace").strip()

    def close(self) -> None:
        self._channel.close()

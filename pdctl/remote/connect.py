"""From a destination to a connection, step by step: resolve, connect, host key, authenticate.

`Routes` belongs to one run of pdctl: connections to jump hosts are shared by all hosts behind
them, and no sshd is asked to admit more at once than its default MaxStartups lets in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pdctl.remote import known_hosts
from pdctl.remote.config import SSH_PORT, SshSettings, StepFailed, resolve
from pdctl.remote.known_hosts import HostKey

PER_SERVER = 8
"""Logins at once to one sshd: by default it starts to drop them beyond 10."""
HANDSHAKES = 16
"""At once in all: they cost CPU, and each has a deadline."""
TRIES = 6
RETRY_S = 0.3
_DEAD_S = 60
"""After so long without a sign of the other side an open connection is given up."""
_LOG = logging.getLogger(__name__)
_NOWHERE = logging.NullHandler()


class Dropped(Exception):
    """The server hung up before it greeted: it is too busy, and may be asked again."""


@dataclass(slots=True)
class _Jump:
    """The connection to a jump host, or why there is none. Made by the first who needs it."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    connection: Any = None
    error: StepFailed | None = None


class Routes:
    def __init__(self) -> None:
        paramiko_log = logging.getLogger("paramiko")  # it logs tracebacks of what it raises
        paramiko_log.addHandler(_NOWHERE)
        paramiko_log.propagate = False
        self._lock = threading.Lock()
        self._jumps: defaultdict[tuple[str, ...], _Jump] = defaultdict(_Jump)
        self._doors: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(PER_SERVER)
        )
        self._handshakes = threading.Semaphore(HANDSHAKES)
        self._commands: list[_Command] = []

    def connect(self, destination: str) -> Any:
        """A connected and authenticated fabric.Connection. Raises StepFailed."""
        return self._connect(resolve(destination), ())

    def close(self) -> None:
        for jump in self._jumps.values():
            if jump.connection is not None:
                jump.connection.close()
        for command in self._commands:  # also of connections that are being made
            command.hang_up()

    def _connect(self, settings: SshSettings, through: tuple[str, ...]) -> Any:
        """`through`: jump hosts on the way here, so that a circle ends."""
        gate = self._jump(settings.jumps, through) if settings.jumps else None
        with self._lock:
            door = self._doors[settings.where]
        for attempt in range(TRIES):
            try:
                with door, contextlib.ExitStack() as undo:
                    sock = self._socket(settings, gate)
                    undo.callback(sock.close)
                    with self._handshakes:
                        connection = _handshake(settings, sock)
                    undo.pop_all()
                    return connection
            except Dropped as e:
                reason = str(e)
            time.sleep(random.uniform(0.5, 1.0) * RETRY_S * 2**attempt)
        raise StepFailed(
            "connect",
            f"{settings.where} hangs up before it greets, {TRIES} times: {reason}",
            "its sshd may be too busy (MaxStartups) or keep us out",
        )

    def _jump(self, hops: tuple[str, ...], through: tuple[str, ...]) -> Any:
        """The connection to the last of `hops`, by way of those before it."""
        name = hops[-1]
        if name in through:
            raise StepFailed("resolve", f"the jump hosts {' and '.join(through)} form a circle")
        with self._lock:
            jump = self._jumps[hops]
        with jump.turn:
            if jump.error is not None:
                raise jump.error
            if jump.connection is None or not jump.connection.is_connected:
                try:
                    settings = resolve(name)
                    if len(hops) > 1:
                        settings = replace(settings, jumps=hops[:-1])
                    jump.connection = self._connect(settings, (*through, name))
                except StepFailed as e:
                    jump.error = StepFailed(f"jump host {name}", str(e), e.hint)
                    raise jump.error from e
            return jump.connection

    def _socket(self, settings: SshSettings, gate: Any) -> Any:
        """Connected, and greeted where that can be seen. Raises StepFailed or Dropped."""
        deadline = time.monotonic() + settings.connect_timeout_s
        if gate is not None:
            return _through(gate, settings)
        sock: socket.socket
        if settings.proxy_command:
            sock = _Command.start(settings.proxy_command)
            self._commands.append(sock)
        else:
            sock = _tcp(settings, deadline)
        try:
            _await_greeting(sock, settings, deadline)
        except BaseException:
            sock.close()
            raise
        return sock


# ---- connect -------------------------------------------------------------------------------------


def _tcp(settings: SshSettings, deadline: float) -> socket.socket:
    family = {4: socket.AF_INET, 6: socket.AF_INET6}.get(settings.ip_version, socket.AF_UNSPEC)
    try:
        found = socket.getaddrinfo(
            settings.hostname, settings.port, family=family, type=socket.SOCK_STREAM
        )
    except socket.gaierror as e:
        raise StepFailed(
            "resolve", f"{settings.hostname}: {e.strerror}", "is the name right? see `ssh -G`"
        ) from e
    reason = ""
    for left, (kind, _, _, _, address) in zip(range(len(found), 0, -1), found, strict=True):
        sock = socket.socket(kind, socket.SOCK_STREAM)
        # Every address of the name gets its share of the time.
        sock.settimeout(max(0.1, (deadline - time.monotonic()) / left))
        try:
            sock.connect(address)
        except TimeoutError:
            reason = f"no answer within {settings.connect_timeout_s:.0f} s"
        except OSError as e:
            reason = e.strerror or str(e)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_S * 1000)
            return sock
        sock.close()
    hint = "is it on, and is that port open to this machine?"
    if reason == os.strerror(errno.ECONNREFUSED):
        hint = "the machine is on; is sshd running there, on that port?"
    raise StepFailed("connect", f"{settings.where}: {reason}", hint)


class _Command(socket.socket):
    """Our end of the line to a ProxyCommand, which ends with it."""

    _running: list[subprocess.Popen[bytes]]

    @staticmethod
    def start(command: str) -> _Command:
        """As ssh does it: by the user's shell, its stdin and stdout are the line."""
        ours, theirs = socket.socketpair()
        line = _Command(fileno=ours.detach())
        with theirs:
            shell = os.environ.get("SHELL") or "/bin/sh"
            process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        line._running = [process]
        return line

    def hang_up(self) -> None:
        """End its process group: it may not heed that the line is closed."""
        with contextlib.suppress(IndexError):  # it was done before
            process = self._running.pop()
            # Not reaped until now, so the number is still that of its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGHUP)
            threading.Thread(target=process.wait, daemon=True).start()

    def close(self) -> None:
        super().close()
        self.hang_up()


def _through(gate: Any, settings: SshSettings) -> Any:
    import paramiko

    try:
        return gate.transport.open_channel(
            "direct-tcpip",
            (settings.hostname, settings.port),
            ("", 0),
            timeout=settings.connect_timeout_s,
        )
    except (paramiko.SSHException, EOFError) as e:
        reason = getattr(e, "text", "") or str(e) or "the connection to it was lost"
        raise StepFailed(
            "connect",
            f"the jump host {gate.host} does not get to {settings.where}: {reason}",
            f"try `ssh {settings.destination}`; is it on, and may the jump host forward?",
        ) from e


def _await_greeting(sock: socket.socket, settings: SshSettings, deadline: float) -> None:
    """Wait for the server's first bytes, and leave them there. No CPU is spent on who is silent."""
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        first = sock.recv(64, socket.MSG_PEEK)
    except TimeoutError as e:
        raise StepFailed(
            "connect",
            f"{settings.where} is open, but no SSH server greets "
            f"within {settings.connect_timeout_s:.0f} s",
            "the machine may hang, or something else than sshd have that port",
        ) from e
    except ConnectionError as e:
        raise Dropped(e.strerror) from e
    if not first.startswith(b"SSH-"):
        raise Dropped(first.decode(errors="replace").strip() or "end of file")


# ---- host key, authenticate ----------------------------------------------------------------------


def _handshake(settings: SshSettings, sock: Any) -> Any:
    import fabric
    import paramiko

    from pdctl.remote.login import Login

    timeout = settings.connect_timeout_s
    known = known_hosts.look_up(settings.known_hosts, settings.known_as)
    connection = fabric.Connection(
        settings.hostname,
        user=settings.user,
        port=settings.port,
        # Already resolved: Fabric's own reading of the file would apply parts of it twice.
        config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
        connect_timeout=timeout,
        connect_kwargs={
            "sock": sock,
            "auth_strategy": Login(settings),
            "banner_timeout": timeout,
            "auth_timeout": timeout,
            "channel_timeout": timeout,
            "transport_factory": _preferring({key.kind for key in known.trusted}),
        },
    )
    connection.client.set_missing_host_key_policy(_Policy(settings, known))
    with _closed_on_failure(connection):
        connection.open()
    connection.transport.set_keepalive(settings.keepalive_s)
    return connection


@contextlib.contextmanager
def _closed_on_failure(connection: Any) -> Iterator[None]:
    import paramiko

    try:
        yield
    except BaseException as e:
        connection.client.close()
        if isinstance(e, EOFError | ConnectionError) or "banner" in str(e):
            raise Dropped(str(e) or "end of file") from e
        if isinstance(e, paramiko.SSHException | OSError):
            raise StepFailed("connect", str(e) or type(e).__name__, "") from e
        raise


def _preferring(kinds: set[str]) -> Any:
    """A transport that asks for a host key of a kind we know, as OpenSSH does, and for a cipher
    that needs no MAC beside it: paramiko compares one in python, byte by byte.
    """
    import paramiko

    names = {k for kind in kinds for k in (kind, *_SIGNATURES.get(kind, ()))}

    def make(sock: Any, **more: Any) -> Any:
        transport = paramiko.Transport(sock, **more)
        options = transport.get_security_options()
        options.key_types = sorted(options.key_types, key=lambda kind: kind not in names)
        options.ciphers = sorted(options.ciphers, key=lambda cipher: "-gcm@" not in cipher)
        return transport

    return make


_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


@dataclass(frozen=True, slots=True)
class _Policy:
    """Paramiko asks it about every host key, for its own list of known ones is left empty."""

    settings: SshSettings
    known: known_hosts.Known

    def missing_host_key(self, client: Any, hostname: str, found: Any) -> None:
        key = HostKey(found.get_name(), found.get_base64())
        settings, name = self.settings, self.settings.known_as
        what = f"{key.kind} {key.fingerprint}"
        if key in self.known.revoked:
            raise StepFailed("host key", f"{what} of {name} is revoked in known_hosts")
        if key in self.known.trusted or key in self._without_port():
            return
        if self.known.trusted:
            raise StepFailed(
                "host key",
                f"{name} shows {what}, which is not the known one",
                "somebody may be in between; if the machine was set up anew: "
                f"ssh-keygen -R {shlex.quote(name)}",
            )
        if settings.strict not in ("accept-new", "no"):
            raise StepFailed(
                "host key",
                f"{name} is not known; it shows {what}",
                f"connect once with `ssh {settings.destination}`, or set "
                "`StrictHostKeyChecking accept-new` in the ssh configuration",
            )
        self._accept(name, key, what)

    def _without_port(self) -> tuple[HostKey, ...]:
        """As OpenSSH: a key known of the host on port 22 is good for its other ports."""
        if self.settings.port == SSH_PORT or not self.settings.known_as.startswith("["):
            return ()
        plain = self.settings.hostname.lower()
        return known_hosts.look_up(self.settings.known_hosts, plain).trusted

    def _accept(self, name: str, key: HostKey, what: str) -> None:
        file = next(iter(self.settings.known_hosts), "")
        if file:
            try:
                known_hosts.append(file, name, key, hashed=self.settings.hash_known_hosts)
            except OSError as e:
                raise StepFailed("host key", f"{file}: {e.strerror}") from e
        where = f"added to {file}" if file else "accepted"
        _LOG.warning("%s: its host key was not known and is %s: %s", name, where, what)

"""The keys we show to a server, in OpenSSH's order: the agent's, then those in files.

Nothing is ever asked for: a key with a passphrase has to be in the agent.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko

from pdctl.remote.config import SshSettings, StepFailed


class Login:
    """Paramiko's `auth_strategy`: one attempt to log in over a connection."""

    def __init__(self, settings: SshSettings) -> None:
        self._settings = settings
        self._locked: list[str] = []
        """Files whose passphrase we do not have."""

    def authenticate(self, transport: Any) -> list[str]:
        settings = self._settings
        refused: list[str] = []
        with contextlib.closing(_Agent(settings.agent)) as agent:
            for name, key in self._keys(agent):
                try:
                    further = transport.auth_publickey(settings.user, key)
                except paramiko.BadAuthenticationType as e:
                    raise self._failed(
                        f"it takes no keys, but {', '.join(e.allowed_types) or 'nothing'}",
                        "pdctl logs in with keys only",
                    ) from e
                except paramiko.SSHException as e:
                    refused.append(name)
                    if not transport.is_active():
                        raise self._failed(
                            f"it closed the connection after {len(refused)} keys: {e}",
                            "name the right one with IdentityFile and IdentitiesOnly yes",
                        ) from e
                else:
                    if further:
                        raise self._failed(
                            f"it wants more than a key: {', '.join(further)}",
                            "pdctl logs in with keys only",
                        )
                    return []
        raise self._failed(*self._why(refused))

    def _failed(self, cause: str, hint: str) -> StepFailed:
        return StepFailed("authenticate", cause, hint)

    def _why(self, refused: list[str]) -> tuple[str, str]:
        who = f"{self._settings.user}@{self._settings.hostname}"
        cause = (
            f"{who} refuses {', '.join(refused)}"
            if refused
            else f"there is no key to show to {who}"
        )
        if self._locked:
            files = " ".join(self._locked)
            return f"{cause}; {files} has a passphrase", f"put it into the agent: ssh-add {files}"
        return cause, f"is the key in its authorized_keys? try `ssh {self._settings.destination}`"

    def _keys(self, agent: _Agent) -> Iterator[tuple[str, Any]]:
        held = {key.asbytes(): key for key in agent.keys}
        named = {file: _public(file) for file in self._settings.identity_files}
        ours = [blob for blob in named.values() if blob in held]
        others = [] if self._settings.identities_only else [b for b in held if b not in ours]
        for blob in (*ours, *others):
            yield f"{held[blob].comment or held[blob].get_name()} (agent)", held[blob]
        for file, public in named.items():
            if public not in held and os.path.exists(file):
                with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
                    if key := self._load(file):
                        yield file, key

    def _load(self, file: str) -> Any:
        try:
            return paramiko.PKey.from_path(file)
        except (TypeError, paramiko.PasswordRequiredException):  # cryptography's and paramiko's
            self._locked.append(file)
            return None


class _Agent:
    """The keys of an ssh-agent; none when there is no agent."""

    def __init__(self, path: str) -> None:
        self._agent = paramiko.agent.AgentSSH()
        self._socket = socket.socket(socket.AF_UNIX)
        if path:
            with contextlib.suppress(OSError, paramiko.SSHException):
                self._socket.connect(path)
                self._agent._connect(self._socket)  # Agent() reads the environment only
        self.keys = self._agent.get_keys()

    def close(self) -> None:
        self._socket.close()


def _public(file: str) -> bytes:
    """The public key beside a private one, as the agent names it; empty without one."""
    try:
        return base64.b64decode(Path(f"{file}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return b""

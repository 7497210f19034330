"""What OpenSSH would use for a destination: asked of `ssh -G`, so that every `Include`, `Match`
and jump of the user's configuration counts. PDCTL_SSH_CONFIG names another file than the user's.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONNECT_TIMEOUT_S = 10.0
"""From the first packet to the server's greeting, unless ConnectTimeout says otherwise."""
KEEPALIVE_S = 15
SSH_PORT = 22
_ASK_S = 15.0
_NO_DESTINATION = ("usage: ssh", "hostname contains invalid characters", "Bad port")
_FAMILIES = {"inet": 4, "inet6": 6}


@dataclass(frozen=True, slots=True)
class SshSettings:
    destination: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    identities_only: bool
    """Of the agent's keys only those that the files name."""
    agent: str
    """Socket of the agent; empty: there is none."""
    known_hosts: tuple[str, ...]
    """The first one takes new keys."""
    known_as: str
    """The name in known_hosts, as OpenSSH looks it up."""
    hash_known_hosts: bool
    strict: str
    """StrictHostKeyChecking: `yes`, `ask`, `accept-new` or `no`."""
    jumps: tuple[str, ...]
    proxy_command: str
    connect_timeout_s: float
    keepalive_s: int
    ip_version: int
    """4 or 6; 0: either."""

    @property
    def where(self) -> str:
        return f"{self.hostname} port {self.port}"


class StepFailed(Exception):
    """A connection failed at a step: resolve, connect, host key, authenticate, command."""

    def __init__(self, step: str, cause: str, hint: str = "") -> None:
        super().__init__(f"{step}: {cause}")
        self.hint = hint


def resolve(destination: str) -> SshSettings:
    config = os.environ.get("PDCTL_SSH_CONFIG")
    argv = ["ssh", *(["-F", config] if config else []), "-G", *_target(destination)]
    try:
        found = subprocess.run(
            argv, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as e:
        raise StepFailed("resolve", "there is no `ssh` here", "install openssh-client") from e
    except subprocess.TimeoutExpired as e:
        raise StepFailed("resolve", "`ssh -G` hangs", f"try `ssh -G {destination}`") from e
    if any(said in found.stderr for said in _NO_DESTINATION):
        raise StepFailed(
            "resolve",
            f"{destination!r} is nothing that ssh could connect to",
            "write HOST, USER@HOST or USER@HOST:PORT; with a port, IPv6 as [ADDRESS]:PORT",
        )
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["it failed"])[-1]
        raise StepFailed("resolve", f"`ssh -G`: {reason}", "mend the ssh configuration")
    return parse_settings(destination, found.stdout)


def _target(destination: str) -> list[str]:
    """As arguments of ssh, which takes a port in a URI only, and there no IPv6 address."""
    # Jump hosts are written like this by `ssh -G`, also those with an IPv4 address.
    if in_brackets := re.fullmatch(r"(.*@)?\[(.*)\](?::(.*))?", destination):
        user, host, port = in_brackets.groups()
        return [*(["-p", port] if port is not None else []), "--", (user or "") + host]
    has_port = destination.rpartition("@")[2].count(":") == 1  # more: an IPv6 address
    return ["--", f"ssh://{destination}" if has_port else destination]


def parse_settings(destination: str, text: str) -> SshSettings:
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)

    def one(key: str, default: str = "") -> str:
        value = values.get(key, [default])[0]
        return "" if value == "none" else value

    hostname, port = one("hostname", destination), int(one("port", str(SSH_PORT)))
    user = one("user") or getpass.getuser()
    tokens = _tokens(destination, hostname, port, user)
    named = f"{hostname}" if port == SSH_PORT else f"[{hostname}]:{port}"
    files = f"{one('userknownhostsfile')} {one('globalknownhostsfile')}".split()
    strict = one("stricthostkeychecking", "ask")
    return SshSettings(
        destination=destination,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=_paths(values.get("identityfile", []), tokens),
        identities_only=one("identitiesonly") == "yes",
        agent=_agent(values.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        known_hosts=_paths(files, tokens),
        known_as=(one("hostkeyalias") or named).lower(),
        hash_known_hosts=one("hashknownhosts") == "yes",
        strict={"true": "yes", "false": "no", "off": "no"}.get(strict, strict),
        jumps=tuple(j for j in one("proxyjump").split(",") if j),
        proxy_command=_expand(one("proxycommand"), tokens),
        connect_timeout_s=float(one("connecttimeout") or CONNECT_TIMEOUT_S),
        keepalive_s=int(one("serveraliveinterval") or 0) or KEEPALIVE_S,
        ip_version=_FAMILIES.get(one("addressfamily"), 0),
    )


def _tokens(destination: str, hostname: str, port: int, user: str) -> dict[str, str]:
    """Those of ssh_config(5) that make sense in paths and commands; `ssh -G` leaves them there."""
    return {
        "%": "%",
        "d": str(Path.home()),
        "h": hostname,
        "n": destination,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
    }


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), text)


def _paths(names: Sequence[str], tokens: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(os.path.expanduser(os.path.expandvars(_expand(n, tokens))) for n in names)


def _agent(text: str, tokens: Mapping[str, str]) -> str:
    if text == "none":
        return ""
    if text in ("", "SSH_AUTH_SOCK"):
        return os.environ.get("SSH_AUTH_SOCK", "")
    if text.startswith("$") and "/" not in text:
        return os.environ.get(text.strip("${}"), "")
    return _paths([text], tokens)[0]

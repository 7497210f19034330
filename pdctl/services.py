"""One process to run on one host, fully resolved: what a plan starts and a shim supervises.

Built by `command` (pure), consumed by `ops` and `records`. Knows nothing of topology files or SSH.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

Role = Literal["router", "prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """`argv` and file texts may contain `{dir}`: the service's own directory on its host, filled in
    there."""

    deployment: str
    name: str
    """Unique in the deployment: `router`, `prefill-0`, `decode-1`, `mixed-0`."""
    role: Role
    host: str
    """The topology's key of the host."""
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Name in the service's directory -> text; written 0600 before the start. Holds no secrets."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables whose values are taken when `up` runs and stored only in the
    host's 0600 env file."""
    secret_files: dict[str, str] = field(default_factory=dict)
    """Name in the service's directory -> environment variable whose value `up` writes there, 0600
    (`api_keys`)."""
    ports: dict[str, int] = field(default_factory=dict)
    """Purpose (`http`, `peer`) -> TCP port it will listen on."""
    bind: str = "127.0.0.1"
    url: str = ""
    """Base URL under which pdctl and other services reach it."""
    shm_prefix: str = ""
    """Shared memory segments whose names start with `<shm_prefix>.` are this service's and go with
    it."""
    cpu_buffer_bytes: int = 0
    supervisor: Literal["shim", "systemd"] = "shim"
    """systemd: the shim's supervisor runs in a scope of the user's systemd."""

    @property
    def hash(self) -> str:
        """Identity of the wanted state: equal hash and a live process means nothing to do.

        But for the values of its secrets, which are not in it: its host compares those.
        """
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

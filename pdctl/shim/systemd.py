"""`supervisor: systemd`: a service's supervisor in a scope of its own of the user's systemd.

The shim still starts, records and stops; the scope adds a cgroup, from which no descendant escapes,
and a life outside of the SSH session that began it. Written for systemd 244 and later.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence

from .service import Service

CALL_TIMEOUT_S = 20.0
STOP_S = 3
LINGER = "/var/lib/systemd/linger"


def unit(service: Service) -> str:
    """Of this directory: the same deployment in another home is another unit."""
    digest = hashlib.sha256(service.dir.encode()).hexdigest()[:8]
    return f"pdctl-{service.deployment}-{service.name}-{digest}.scope"


def scope_argv(service: Service, argv: Sequence[str]) -> list[str]:
    """systemd-run makes the scope, moves itself into it and becomes `argv`: pid and files stay."""
    return [
        *("systemd-run", "--user", "--scope", "--quiet", "--collect"),
        f"--unit={unit(service)}",
        f"--description=pdctl {service.deployment}/{service.name}",
        f"--property=TimeoutStopSec={STOP_S}",
        "--",
        *argv,
    ]


def environment() -> dict[str, str]:
    """What reaches the user's manager. A login without PAM lacks it."""
    return {"XDG_RUNTIME_DIR": runtime_dir()}


def runtime_dir() -> str:
    return os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"


def why_not() -> str:
    """What keeps services of this user out of systemd's hands; empty when nothing does."""
    missing = [p for p in ("systemd-run", "systemctl") if shutil.which(p) is None]
    if missing:
        return f"there is no {missing[0]}; use `supervisor: shim`"
    user = _user()
    advice = f"`loginctl enable-linger {user}` (as root) gives {user} one that stays"
    if not os.path.exists(os.path.join(runtime_dir(), "systemd", "private")):
        return f"no systemd of user {user} runs ({runtime_dir()}); {advice}"
    if not os.path.exists(os.path.join(LINGER, user)):
        return (
            f"the systemd of user {user} ends with the last login, and services with it; {advice}"
        )
    return ""


def end(service: Service) -> None:
    """Stop what is left in the scope, if there is one: TERM, a moment, KILL, by systemd."""
    argv = ["systemctl", "--user", "stop", unit(service)]
    quiet = subprocess.DEVNULL
    env = {**os.environ, **environment()}
    # The sweep that follows finds what it can without systemd.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            argv, env=env, stdin=quiet, stdout=quiet, stderr=quiet, timeout=CALL_TIMEOUT_S
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())

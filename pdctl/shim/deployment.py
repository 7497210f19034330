"""What this host knows of a whole deployment: all its hosts, so that any one leads to the others.

Kept in `<base>/<deployment>/.deployment.json`, written before anything starts and gone with the
last service. Holds the topology of the last `up`, `env:` values of every host included, from which
`scale` works without the file; no values of `secrets:`.
"""

from __future__ import annotations

import contextlib
import os

from .files import checked, private_dir, read_json, write_json
from .service import names_in, service_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FILE = ".deployment.json"


def register(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Write what `up` says of the deployment: hosts, the keys that mean this one, services."""
    os.makedirs(base, 0o700, exist_ok=True)
    private_dir(os.path.join(base, checked(request["deployment"])))
    write_json(_path(base, request["deployment"]), request["known"])
    return {}


def known(base: str, deployment: str) -> dict[str, Any]:
    """{} where no `up` has been."""
    return read_json(_path(base, deployment))


def forget_when_empty(base: str, deployment: str) -> None:
    """Remove the deployment's directory when no service is in it any more."""
    if service_names(base, deployment):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(base, deployment))
    folder = os.path.join(base, deployment)
    # Empty folders too: of starts that were killed at once. Somebody's own files stay, with theirs.
    for path in (*(os.path.join(folder, name) for name in names_in(folder)), folder):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _path(base: str, deployment: str) -> str:
    return os.path.join(base, checked(deployment), FILE)

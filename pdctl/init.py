"""`pdctl init`: a commented topology to start from.

The templates are the examples in topologies/, word for word; a test compares them.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from pdctl.errors import PdctlError, UsageError

DEFAULT_TEMPLATE = "quickstart"
DEFAULT_PATH = Path("topology.yaml")


def templates() -> tuple[str, ...]:
    folder = resources.files("pdctl") / "templates"
    return tuple(
        sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    )


def write_template(path: Path, template: str) -> Path:
    """Write the template to `path`, or into it when it is a folder; returns the file.

    Its deployment is named after the file. Never overwrites.
    """
    if template not in templates():
        known = ", ".join(templates())
        raise UsageError(f"there is no template {template!r}", hint=f"known: {known}")
    target = path / f"{template}.yaml" if path.is_dir() else path
    text = (resources.files("pdctl") / "templates" / f"{template}.yaml").read_text("utf-8")
    try:
        with target.open("x", encoding="utf-8") as f:
            f.write(_named(text, target.stem))
    except FileExistsError as e:
        raise UsageError(
            f"{target} exists already and is left as it is", hint="give another path"
        ) from e
    except OSError as e:
        raise PdctlError(f"{target} cannot be written: {e.strerror}") from e
    return target


def _named(text: str, stem: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return re.sub(r"^name: \S+", f"name: {name}", text, count=1, flags=re.M) if name else text

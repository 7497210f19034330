"""A topology file to a frozen, checked `Topology`, or to every mistake in it at once.

Owns reading and the wording of mistakes. Called by `ops` and `cli`; contacts no host.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from pdctl import models, weights
from pdctl.errors import ModelNotFound, Problem, TopologyError
from pdctl.topology_checks import (
    Broken,
    Finding,
    contact_address,
    findings,
    listen_address,
    model_findings,
)
from pdctl.topology_checks import warnings as _warnings
from pdctl.topology_schema import (
    ROLES,
    DecodeGroup,
    Group,
    Host,
    Instance,
    MixedGroup,
    PrefillGroup,
    Router,
    Section,
    Topology,
    is_wildcard,
)
from pdctl.yaml_marks import Document, dotted, parse
from pdctl.yaml_marks import Path as KeyPath

__all__ = [
    "DecodeGroup",
    "Group",
    "Host",
    "Instance",
    "LoadedTopology",
    "ROLES",
    "MixedGroup",
    "PrefillGroup",
    "Router",
    "Topology",
    "contact_address",
    "is_wildcard",
    "listen_address",
    "load",
]

_MAX_BYTES = 1 << 20
_PRIVATE = ("env", "secrets", "api_keys")
"""Values under these keys are never repeated in a message."""

_EXAMPLES = {
    "name": "add `name: my-deployment`",
    "model": "add `model: smollm2-135m`, a path, or a Hugging Face id",
    "hosts": "add `hosts: {local: {}}` for this machine",
}
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number of seconds",
    "finite_number": "a number of seconds",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list, each item starting with `- `",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True, slots=True)
class LoadedTopology:
    """A topology, where it came from, and what in it is probably not meant."""

    topology: Topology
    path: Path
    warnings: tuple[str, ...]


def load(path: Path, *, model: bool = False) -> LoadedTopology:
    """Read and check a topology file. Raises TopologyError with every problem. `model`: also those
    of the model, when an instance is to run on this machine.
    """
    document = parse(_read(path))
    problems = [Problem(str(path), line, dotted(p), *text) for line, p, *text in document.problems]
    if document.data is None and not problems:
        raise _whole(path, "is empty", "write a topology; `pdctl init` gives one to start from")
    if document.data is None:
        raise TopologyError(problems)
    if not isinstance(document.data, dict):
        raise _whole(path, "is not a mapping of keys to values", "start with `name: ...`")
    topology, found = _validate(document.data)
    if topology is not None:
        found = found + _missing_model(topology, path.parent)
    to_do: list[str] = []
    if topology is not None and model and not any(f.path[:1] in _ABOUT_MODEL for f in found):
        more, to_do = _model_here(topology, path.resolve().parent)
        found = found + more
    unread = {p for _, p, *_ in document.problems if p}
    problems += [_problem(path, document, f) for f in found if f.path not in unread]
    if problems or topology is None:
        raise TopologyError(problems)
    noted = tuple(str(_problem(path, document, f)) for f in _warnings(topology))
    return LoadedTopology(topology, path, (*noted, *to_do))


def _read(path: Path) -> str:
    try:
        with path.open("rb") as f:
            raw = f.read(_MAX_BYTES + 1)
    except IsADirectoryError as e:
        raise _whole(path, "is a directory", "give the path of a YAML file") from e
    except FileNotFoundError as e:
        raise _whole(path, "does not exist", "`pdctl init` writes one to start from") from e
    except OSError as e:
        raise _whole(path, f"cannot be read: {e.strerror}") from e
    if len(raw) > _MAX_BYTES:
        raise _whole(path, "is larger than 1 MiB", "give a topology file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        problem = Problem(str(path), line, "", "is not UTF-8 text", "save the file as UTF-8")
        raise TopologyError([problem]) from e


def _whole(path: Path, what: str, right: str = "") -> TopologyError:
    return TopologyError([Problem(str(path), 0, "", what, right)])


def _problem(path: Path, document: Document, finding: Finding) -> Problem:
    return Problem(
        str(path), document.line(finding.path), dotted(finding.path), finding.what, finding.right
    )


def _missing_model(topology: Topology, folder: Path) -> list[Finding]:
    """A path that is not there. On other hosts only they can tell."""
    model = topology.model
    is_path = model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf")
    if not is_path or not all(topology.hosts[key].local for key in topology.used_hosts()):
        return []
    target = folder / Path(model).expanduser()
    if target.exists():
        return []
    right = "give a .gguf file or a model folder; relative paths count from the topology file"
    return [Finding(("model",), f"{target} does not exist", right)]


_ABOUT_MODEL = (("model",), ("hosts",))
"""Without these it is not known which model, and where."""


def _model_here(topology: Topology, folder: Path) -> tuple[list[Finding], list[str]]:
    """What is wrong with the model on this machine, and what is still to be done about it."""
    groups = (group for some in topology.groups().values() for group in some)
    keys = {topology.host_of(group) for group in groups}
    if not any(topology.hosts[key].local for key in keys if key in topology.hosts):
        return [], []
    try:
        to_do = models.look(topology.model, folder)
    except ModelNotFound as e:
        return [Finding(("model",), str(e).removeprefix("model "), e.hint)], []
    place = models.place(topology.model, folder)
    shape = weights.shape(place) if place is not None else None
    return (list(model_findings(topology, shape)) if shape is not None else []), to_do


# ---- schema --------------------------------------------------------------------------------------


def _validate(data: dict[str, Any]) -> tuple[Topology | None, list[Finding]]:
    """The topology, and what is wrong with it.

    Broken values are replaced by defaults so that the rest is checked too; None when that fails.
    """
    try:
        topology = Topology.model_validate(data)
        return topology, findings(topology)
    except pydantic.ValidationError as e:
        errors = e.errors(include_url=False)
    unknown = {_path(e) for e in errors if e["type"] == "extra_forbidden"}
    meant = {(*path[:-1], _close(path)) for path in unknown}
    found = [_finding(e) for e in errors if not (e["type"] == "missing" and _path(e) in meant)]
    paths = [_path(e) for e in errors]
    broken = Broken(
        values=frozenset(path for path in paths if path not in unknown),
        sections=frozenset(path[:-1] for path in unknown),
    )
    for path in paths:
        data = _without(data, path[:3])  # role, index, key: a list with a bad item goes whole
    try:
        topology = Topology.model_validate(_STAND_INS | data)
    except pydantic.ValidationError:
        return None, found
    return topology, found + findings(topology, broken)


_STAND_INS: dict[str, Any] = {"name": "broken", "model": "broken", "hosts": {"local": None}}


def _path(error: Any) -> KeyPath:
    return tuple(part for part in error["loc"] if part != "[key]")


def _without(value: Any, path: KeyPath) -> Any:
    """A copy of `value` that lacks what is at `path`; a broken group becomes an empty one."""
    head, rest = path[0], path[1:]
    if isinstance(value, tuple) and isinstance(head, int):
        inner = _without(value[head], rest) if rest else {}
        return (*value[:head], inner, *value[head + 1 :])
    if not isinstance(value, dict) or head not in value:
        return value  # taken out already, with something around it
    if rest:
        return {**value, head: _without(value[head], rest)}
    return {key: item for key, item in value.items() if key != head}


# ---- wording -------------------------------------------------------------------------------------


def _finding(error: Any) -> Finding:
    """A pydantic error in our words: what is wrong, what would be right."""
    path, kind, context = _path(error), error["type"], error.get("ctx", {})
    shown = "this" if any(part in _PRIVATE for part in path) else _shown(error["input"])
    if kind == "missing":
        return Finding(path, "is missing", _EXAMPLES.get(str(path[-1]), ""))
    if kind == "extra_forbidden":
        return Finding(path, "unknown key", _key_help(path))
    if kind == "value_error":
        what, _, right = str(context["error"]).partition("; ")
        return Finding(path, what, right)
    if kind == "literal_error":
        expected = context["expected"].replace("'", "")
        close = difflib.get_close_matches(str(error["input"]), re.split(", | or ", expected), n=1)
        right = f"did you mean {close[0]}?" if close else ""
        return Finding(path, f"must be {expected}, not {shown}", right)
    if kind in _KINDS:
        return Finding(
            path, f"must be {_KINDS[kind]}, not {shown}", _type_help(kind, error["input"])
        )
    if kind in _LIMITS:
        word, bound = _LIMITS[kind]
        return Finding(path, f"must be {word} {context[bound]:g}, not {shown}", "")
    if kind in ("too_short", "string_too_short"):
        return Finding(path, "is empty", _EXAMPLES.get(str(path[-1]), ""))
    return Finding(path, f"{error['msg']}, not {shown}", "")


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _type_help(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "put it in quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "remove the quotes" if value.replace(".", "", 1).isdigit() else "write digits only"
    if kind == "tuple_type" and isinstance(value, dict):
        return "put `- ` before its first key"
    return ""


def _key_help(path: KeyPath) -> str:
    key, known = str(path[-1]), _section(path[:-1]).model_fields
    others = [r for r in ROLES if path[0] in ROLES and key in _section((r, 0)).model_fields]
    if others:
        return f"only {' and '.join(others)} takes it"
    close = _close(path)
    return f"did you mean {close!r}?" if close else f"known keys: {', '.join(known)}"


def _close(path: KeyPath) -> str | None:
    """The key of the same section that was probably meant."""
    known = _section(path[:-1]).model_fields
    match = difflib.get_close_matches(str(path[-1]).replace("-", "_"), known, n=1, cutoff=0.6)
    return match[0] if match else None


def _section(path: KeyPath) -> type[Section]:
    """The class of the section at `path`."""
    sections: dict[str | int, type[Section]] = {
        "hosts": Host,
        "router": Router,
        "prefill": PrefillGroup,
        "decode": DecodeGroup,
        "mixed": MixedGroup,
    }
    return sections[path[0]] if path else Topology

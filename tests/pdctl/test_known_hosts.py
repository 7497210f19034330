"""Lines of known_hosts as OpenSSH reads them, and what is appended."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from pdctl.remote.known_hosts import HostKey, append, look_up

KEY = HostKey("ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIBuzgPi8pVAHOdQ0eBeZ4ylvKEQ58MtY8uAMDHxPoXNR")
OTHER = HostKey(
    "ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIEfEYhJHt8y7cHc5qEJw3l6mWbpAvmJqKjGqSb1cs9cB"
)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("gpu-a", "gpu-a", True),
        ("gpu-a", "gpu-ab", False),
        ("GPU-A", "gpu-a", True),
        ("gpu-b,gpu-a,10.0.0.1", "gpu-a", True),
        ("*.lab", "gpu-a.lab", True),
        ("gpu-?", "gpu-a", True),
        ("*.lab,!gpu-a.lab", "gpu-a.lab", False),
        ("[gpu-a]:2222", "[gpu-a]:2222", True),
        ("[gpu-a]:2222", "gpu-a", False),
        ("gpu-a", "[gpu-a]:2222", False),
        ("[*.lab]:22?2", "[gpu-a.lab]:2222", True),
        ("fd77::2", "fd77::2", True),
    ],
)
def test_which_lines_are_a_hosts(tmp_path: Path, pattern: str, name: str, matches: bool) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"# a comment\n\nnonsense\n{pattern} {KEY.kind} {KEY.text} ada@lap\n")
    assert look_up([str(file), str(tmp_path / "absent")], name).trusted == ((KEY,) * matches)


def test_marked_lines_are_no_trust(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(
        f"@revoked * {KEY.kind} {KEY.text}\n@cert-authority * {OTHER.kind} {OTHER.text}\n"
    )
    known = look_up([str(file)], "gpu-a")
    assert (known.trusted, known.revoked) == ((), (KEY,))


@pytest.mark.parametrize("hashed", [False, True])
def test_what_is_appended_openssh_finds(tmp_path: Path, hashed: bool) -> None:
    file = tmp_path / "ssh" / "known_hosts"
    append(str(file), "[gpu-a]:2222", KEY, hashed=hashed)
    assert ("gpu-a" in file.read_text()) is not hashed
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert look_up([str(file)], "[gpu-a]:2222").trusted == (KEY,)
    if shutil.which("ssh-keygen"):
        found = subprocess.run(
            ["ssh-keygen", "-F", "[gpu-a]:2222", "-f", str(file)], capture_output=True, text=True
        )
        assert found.returncode == 0 and KEY.text in found.stdout


def test_what_ssh_keygen_hashed_is_found(tmp_path: Path) -> None:
    if not shutil.which("ssh-keygen"):
        pytest.skip("needs openssh-client")
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu-a,10.0.0.1 {KEY.kind} {KEY.text}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", str(file)], check=True, capture_output=True)
    assert "gpu-a" not in file.read_text()
    for name in ("gpu-a", "10.0.0.1"):
        assert look_up([str(file)], name).trusted == (KEY,)
    assert look_up([str(file)], "gpu-b").trusted == ()


def test_appending_keeps_what_is_there_and_adds_nothing_twice(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text("# no newline at the end")
    names = [f"gpu-{i}" for i in range(16)]
    threads = [
        threading.Thread(target=append, args=(str(file), name, KEY), kwargs={"hashed": False})
        for name in names * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *lines = file.read_text().splitlines()
    assert first == "# no newline at the end"
    assert sorted(lines) == sorted(f"{name} {KEY.kind} {KEY.text}" for name in names)


def test_nothing_is_kept_where_the_user_keeps_nothing() -> None:
    append("/dev/null", "gpu-a", KEY, hashed=False)

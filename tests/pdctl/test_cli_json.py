"""Every command speaks JSON: one option, documents with a schema and its version, errors too."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from pdctl import cli
from pdctl.output import Patience, repaint

BAD = "name: t\nmodel: m\nhosts: {a: {}}\ndecod: [{}]\n"
NOWHERE = "http://127.0.0.1:9"
# Arguments with which a command answers at once, where nothing was ever deployed.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "ask": ("hi", "--endpoint", NOWHERE),
    "audit": ("demo",),
    "bench serve": ("--endpoint", NOWHERE),
    "bench transfer": ("bad.yaml",),
    "collect": ("demo",),
    "doctor": ("bad.yaml",),
    "down": ("demo",),
    "drain": ("decode-0", "--name", "demo"),
    "exec": ("decode-0", "--", "true"),
    "init": ("new.yaml",),
    "lock break": ("demo",),
    "lock show": ("demo",),
    "logs": ("--name", "demo"),
    "model list": (),
    "model pull": ("no-such-model",),
    "plan": ("bad.yaml",),
    "restart": ("--name", "demo"),
    "scale": ("decode=2", "-f", "bad.yaml"),
    "status": ("demo",),
    "sync": ("bad.yaml",),
    "up": ("bad.yaml",),
    "validate": ("bad.yaml",),
}


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
    for name, sub in (inner or {}).items():
        yield from leaves(sub, (*path, name))


COMMANDS = dict(leaves(typer.main.get_command(cli.app)))


def test_every_command_is_in_the_table() -> None:
    assert sorted(COMMANDS) == sorted(ARGUMENTS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_json_of_every_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {o for parameter in COMMANDS[name].params for o in parameter.opts}
    assert "--json" in options
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "home"))
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    Path("bad.yaml").write_text(BAD)
    words = name.split()
    monkeypatch.setattr(sys, "argv", ["pdctl", *words, "--json", *ARGUMENTS.get(name, ())])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    documents = [json.loads(shown.out)]
    assert all(re.fullmatch(r"pdctl\.[a-z]+/\d+", d["schema"]) for d in documents)
    failed = documents[0]["schema"] == "pdctl.error/1"
    if failed:
        assert documents[0]["exit_code"] == ended.value.code != 0
        assert documents[0]["error"] and shown.err.startswith("error: ")
    assert "\x1b" not in shown.out + shown.err


def test_help_of_every_command_names_it() -> None:
    for name in COMMANDS:
        assert "--json" in CliRunner().invoke(cli.app, [*name.split(), "--help"]).output, name


# ---- what is shown while one waits ---------------------------------------------------------------


class Terminal(StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def test_patience_speaks_only_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    quick, slow, plain = Terminal(), Terminal(), StringIO()
    with Patience("asking", quick):
        pass
    assert quick.getvalue() == ""
    monkeypatch.setattr(Patience, "AFTER_S", 0.0)
    monkeypatch.setattr(Patience, "AFTER_PLAIN_S", 0.0)
    for stream in (slow, plain):
        with Patience("asking", stream) as patience:
            while not stream.getvalue():
                patience._over.wait(0.01)
    assert "asking" in slow.getvalue() and slow.getvalue().endswith("\r\x1b[K")
    assert plain.getvalue().endswith(" asking\n") and "\x1b" not in plain.getvalue()


def test_a_repaint_clears_nothing_before_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "4")
    monkeypatch.setenv("COLUMNS", "80")
    assert repaint("a\nb", first=False) == "\x1b[Ha\x1b[K\nb\x1b[K\n\x1b[J"
    assert repaint("a", first=True).startswith("\x1b[2J\x1b[H")
    assert repaint("1\n2\n3\n4\n5", first=False).count("\n") == 3, "it must not scroll"


@pytest.mark.parametrize(
    "words",
    [
        "logs --name demo",
        "logs -f --name demo",
        "exec a --name demo -- true",
        "status demo --watch",
    ],
)
def test_an_error_in_a_stream_of_documents_is_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, *rest = words.split()
    result = CliRunner().invoke(cli.app, [first, "--json", *rest])
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["schema"] == "pdctl.error/1"

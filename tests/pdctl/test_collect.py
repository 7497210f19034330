"""The folder with evidence: all of it is there, it is private, and no secret is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from supervision import Home, Site

from pdctl import ops
from pdctl.collect import Evidence, save
from pdctl.errors import ServiceFailed, StateError
from pdctl.shim import redact

UP = "/".join(("..", ".."))
SECRETS = ("hush-hush", "sk-first-key", "second-key-of-many", "pass-in-log")
DECODE = {"host": "local", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}


def files(folder: Path) -> dict[str, str]:
    found = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_text() for p in found}


def assert_private(folder: Path) -> None:
    modes = {p: p.stat().st_mode & 0o777 for p in (folder, *folder.rglob("*"))}
    assert set(modes.values()) == {0o600, 0o700}
    assert all((mode == 0o700) == path.is_dir() for path, mode in modes.items())


@pytest.fixture
def running(home: Home, site: Site, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HUB_TOKEN", SECRETS[0])
    monkeypatch.setenv("MY_KEYS", f"{SECRETS[1]}\n{SECRETS[2]}")
    env = {"MY_PASSWORD": "open-in-file-77", "TOKENIZERS_PARALLELISM": "false", "PLAIN": "seen"}
    path = site.topology(
        router={"host": "local", "port": free_port(), "api_keys": "MY_KEYS"},
        decode=[DECODE | {"secrets": ["HUB_TOKEN"], "env": env}],
    )
    ops.up(path, ops.UpOptions(), ops.silent)
    yield path
    ops.down("demo", 5.0, ops.silent)


def test_everything_is_there_and_nothing_private(home: Home, running: Path) -> None:
    token = (home.dir("demo", "router") / "token").read_text().strip()
    with (home.dir("demo", "decode-0") / "out.log").open("a") as log:
        log.write(f"the hub said {SECRETS[0]} and open-in-file-77\nAuthorization: Bearer {token}\n")
        log.write(f'{{"password": "{SECRETS[3]}", "prompt_tokens": 12}}\nkeys {SECRETS[2]}\n')
    folder = ops.collect("demo", None).path
    assert folder.name.startswith("pdctl-collect-demo-") and folder.parent == Path.cwd()
    assert_private(folder)
    found = files(folder)
    decode = {n.removeprefix("local/decode-0/") for n in found if "/decode-0/" in n}
    assert decode >= {"out.log", "spec.json", "identity.json", "env.json", "config.json"}
    assert {"ledger.json", "summary.json"} <= decode | found.keys()
    assert json.loads(found["status.json"])["schema"] == "pdctl.status/1"
    assert json.loads(found["summary.json"])["hosts"] == ["local"]
    assert json.loads(found["local/facts.json"])["cpus"] >= 1
    assert "cpu_buffer: 1MiB" in found["topology.yaml"]
    assert '"do": "start"' in found["local/audit.log"]

    for name, text in found.items():
        for secret in (*SECRETS, token, "open-in-file-77"):
            assert secret not in text, f"{secret} is in {name}"
    log_text = found["local/decode-0/out.log"]
    assert "the hub said *** and ***" in log_text and '"prompt_tokens": 12' in log_text
    env = json.loads(found["local/decode-0/env.json"])
    assert (env["HUB_TOKEN"], env["PLAIN"]) == ("***", "seen")


def test_it_is_never_written_into_what_is_there(running: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    argv = [sys.executable, "-m", "pdctl", "collect", "demo", "-o", str(target)]
    first = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60)
    made = {"schema": "pdctl.collect/1", "path": str(target), "missing": {}}
    assert json.loads(first.stdout) == made and first.returncode == 0
    with pytest.raises(StateError, match="is there already"):
        ops.collect("demo", target)


@pytest.mark.parametrize(
    ("service", "file"),
    [(f"{UP}/victim", "rc"), ("a", f"{UP}/../victim/rc"), ("a", "/etc/rc"), ("facts.json", "rc")],
)
def test_a_host_writes_nowhere_else(tmp_path: Path, service: str, file: str) -> None:
    (tmp_path / "victim").mkdir()
    good = {"out.log": "a line\n"}
    services = {"b": good, service: {**good, file: "evil"}}
    answer = {"facts": {}, "known": "{}", "audit": "", "services": services}
    evidence = Evidence("demo", "", {"gpu-a": answer, "..": answer}, (), None)
    saved = save(evidence, tmp_path / "out")
    assert list((tmp_path / "victim").iterdir()) == [] and set(saved.missing) == {
        "..",
        f"gpu-a/{service}",
    }
    assert {p.name for p in tmp_path.iterdir()} == {"victim", "out"}
    written = files(saved.path)
    assert written["gpu-a/b/out.log"] == "a line\n" and "evil" not in written.values()
    assert json.loads(written["summary.json"])["missing"] == saved.missing


def test_a_failed_up_leaves_the_evidence_of_before_the_rollback(home: Home, site: Site) -> None:
    events: list[ops.Event] = []
    path = site.topology(decode=[DECODE | {"env": {"STUB_EXIT": "3"}}])
    with pytest.raises(ServiceFailed):
        ops.up(path, ops.UpOptions(), events.append)
    (folder,) = Path.cwd().glob("pdctl-failure-*")
    assert f"what is known of the failure: {folder}" in [e.text for e in events]
    kinds = [e.kind for e in events]
    assert kinds.index("note") < kinds.index("rollback")
    assert_private(folder)
    found = files(folder)
    assert "no such device: the stub gives up" in found["local/decode-0/out.log"]
    assert json.loads(found["local/decode-0/exit.json"])["code"] == 3
    assert "exited with code 3" in json.loads(found["summary.json"])["error"]
    assert json.loads(found["local/router/identity.json"])["service"]["pid"]
    assert home.processes() == []


def test_what_cannot_be_saved_does_not_hide_the_failure(
    home: Home, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdctl.collect._fresh", lambda _: Path("/proc/no/such/folder"))
    events: list[ops.Event] = []
    path = site.topology(decode=[DECODE | {"env": {"STUB_EXIT": "3"}}])
    with pytest.raises(ServiceFailed):
        ops.up(path, ops.UpOptions(), events.append)
    assert any(e.text.startswith("cannot save what is known") for e in events)
    assert home.processes() == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("api_key=abc123", "api_key=***"),
        ('"hub_token": "xyz"', '"hub_token": "***"'),
        ("token_file: /h/token", "token_file: /h/token"),
        ("max_tokens=128 first_token: 12.5 ms", "max_tokens=128 first_token: 12.5 ms"),
        ("Bearer abcdefgh.ijk", "Bearer ***"),
        ("sk-abcdefgh and hf_ABCDEFGH", "sk-*** and hf_***"),
        ("http://me:pw@proxy:3128/", "http://***@proxy:3128/"),
        ("password: null", "password: null"),
        ('a "quo\\"ted" b', "a *** b"),
    ],
)
def test_by_name_shape_and_value(text: str, shown: str) -> None:
    assert redact.text(text, ['"quo"ted"', "quo"] if "quo" in text else []).replace(
        '"***\\"ted"', "***"
    ) == (shown)


def test_values_are_taken_line_by_line_and_plain_words_stay() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "A_KEY": "abcd1234", "B": "x", "S": "one1\ntwo2\n\na"}
    assert redact.private_values(env, ["S"]) == {"abcd1234", "one1", "two2"}
    assert redact.environment(env, ["S"]) == {
        "TOKENIZERS_PARALLELISM": "***",
        "A_KEY": "***",
        "B": "x",
        "S": "***",
    }


def test_an_environment_is_found_wherever_it_is_in_a_document() -> None:
    group = {"env": {"MY_KEY": "k", "PLAIN": "p"}, "host": "a"}
    shown = redact.document({"recorded": {"decode": [group]}, "env": "no mapping"})
    assert shown["recorded"]["decode"] == [{"env": {"MY_KEY": "***", "PLAIN": "p"}, "host": "a"}]
    assert shown["env"] == "no mapping"

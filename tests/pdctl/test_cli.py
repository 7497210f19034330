"""The commands as options, in process: parsing, documents, exit codes of what needs no host."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from pdctl import __version__, cli, state
from pdctl.cli_change import approver
from pdctl.documents import topology_text, validate_document
from pdctl.errors import PdctlError, UsageError
from pdctl.plan import Plan, Step
from pdctl.services import ServiceSpec
from pdctl.topology import load

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
BAD = "name: t\nmodel: some/m\nhosts: {a: {}}\nprefill: [{}]\ndecod: [{}]\n"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


@pytest.fixture(autouse=True)
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run_main(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Through `main`, with its boundary: exit code, stdout, stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pdctl", *args])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    shown = capsys.readouterr()
    return int(exit_.value.code or 0), shown.out, shown.err


def test_the_version() -> None:
    assert invoke("--version").output == f"pdctl {__version__}\n"


def test_every_command_is_there_and_has_a_one_line_summary() -> None:
    text = invoke("--help").output
    commands = [
        "up",
        "plan",
        "restart",
        "drain",
        "status",
        "logs",
        "down",
        "ask",
        "bench",
        "validate",
        "init",
        "model",
    ]
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    for command in commands:
        assert command in lines, command
        assert len(lines[command].split()) > 3
        assert invoke(command, "--help").exit_code == 0
    assert not [line for line in lines.values() if line.endswith("...")], "cut off"


@pytest.mark.parametrize("command", ["ask", "drain", "init"])
def test_what_to_give_is_in_upper_case(command: str) -> None:
    given = invoke(command, "--help").output.splitlines()[0].partition("[OPTIONS]")[2]
    assert given and given == given.upper()


def test_a_misspelt_role_gets_a_guess(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_main(capsys, "scale", "decod=2")
    assert code == 2 and "'decod=2' is not ROLE=N" in err and "did you mean decode?" in err


def test_an_empty_question_is_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    for question in ("", "  \n"):
        code, _, err = run_main(capsys, "ask", question, "--endpoint", "http://127.0.0.1:9")
        assert code == 2 and err.startswith("error: the question is empty")


@pytest.mark.parametrize(
    "args", [["up"], ["up", "--nope"], ["nope"], ["logs", "-n", "x"], ["model"]]
)
def test_a_wrong_command_line_is_usage(args: list[str]) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Usage:" in result.output


# ---- validate ------------------------------------------------------------------------------------

FULL = """
name: full
model: ./m.gguf
hosts: {a: {address: 192.0.2.1}, b: {address: 192.0.2.2, advertise: 192.0.2.3, python: /opt/p}}
router: {host: a, api_keys: KEYS, bind: 192.0.2.1}
prefill:
  - {host: a, replicas: 2, devices: [0, 1], rdma: {device: [mlx5_0, mlx5_1], port: 1}}
decode:
  - {host: b, devices: 3, kv_cache: 1000001, cpu_buffer: 1.5GiB, transfer: rdma,
     secrets: [HF_TOKEN, OTHER], env: {A: "true", B: 7}, rdma: {gid_index: 0}}
"""


def test_validate_prints_the_topology_with_its_defaults() -> None:
    result = invoke("validate", str(TOPOLOGIES / "quickstart.yaml"))
    assert result.exit_code == 0
    content = yaml.safe_load(result.stdout)
    assert content["decode"][0]["cpu_buffer"] == "384MiB"
    assert content["prefill"][0]["host"] == "local"


@pytest.mark.parametrize("text", [*(p.read_text() for p in sorted(TOPOLOGIES.iterdir())), FULL])
def test_the_resolved_topology_is_the_same_one_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    path, again = tmp_path / "t.yaml", tmp_path / "elsewhere" / "again.yaml"
    path.write_text(text)
    resolved = topology_text(validate_document(load(path)))
    again.parent.mkdir()
    again.write_text(resolved)
    assert topology_text(validate_document(load(again))) == resolved
    before, after = load(path).topology, load(again).topology
    assert after.instances() == tuple(
        replace(i, group=i.group.model_copy(update={"host": i.host})) for i in before.instances()
    )
    assert after.router == before.router.model_copy(update={"host": before.host_of(before.router)})
    same = {"model", "router", "prefill", "decode", "mixed"}
    assert after.model_dump(exclude=same) == before.model_dump(exclude=same)


def test_validate_json_has_services_and_hides_what_is_private(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "name: t\nmodel: some/m\nhosts: {a: {}}\nrouter: {bind: 0.0.0.0}\n"
        "mixed: [{env: {MY_TOKEN: hunter2, A: b}, secrets: [HF_TOKEN], replicas: 2, port: 8100}]\n"
    )
    result = invoke("validate", str(path), "--json")
    document = json.loads(result.stdout)
    assert (document["schema"], document["ok"]) == ("pdctl.validate/1", True)
    assert [s["name"] for s in document["services"]] == ["router", "mixed-0", "mixed-1"]
    assert document["services"][2]["ports"] == {"http": 8101}
    (group,) = document["topology"]["mixed"]
    assert group["env"] == {"MY_TOKEN": "***", "A": "b"} and group["secrets"] == ["HF_TOKEN"]
    assert "hunter2" not in result.output
    assert len(document["warnings"]) == 1


def test_validate_looks_for_the_model_where_it_is_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0\x01" + bytes(15))
    path = tmp_path / "t.yaml"

    def validate(model: str, host: str) -> tuple[int, str]:
        path.write_text(f"name: t\nmodel: {model}\nhosts: {{a: {host}}}\nmixed: [{{}}]\n")
        code, _, err = run_main(capsys, "validate", str(path))
        return code, err

    for model, says in (
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("missing.gguf", "does not exist"),
        ("cut.gguf", "truncated"),
    ):
        code, err = validate(model, "{}")
        assert code == 2 and says in err and err.startswith(f"error: {path}:2: model: ")
        assert validate(model, "{address: far.example}")[0] == 0, "it may be there"
    code, err = validate("smollm2-135m", "{}")
    assert code == 0 and err.startswith("warning: ") and "pdctl model pull smollm2-135m" in err
    assert validate("no-such-owner/no-such-model", "{}") == (0, ""), "the network is not asked"


def test_validate_lists_the_model_and_what_it_does_not_allow_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "t.yaml", tmp_path / "m"
    model.mkdir()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(sizes | {"intermediate_size": 8}))
    (model / "w.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + bytes(99))
    mixed = "mixed:\n- {tp_size: 3}\n- {kv_cache: 1000KiB, block_size: 1024, prefix: true}\n"

    def lines(model: str) -> list[str]:
        path.write_text(f"name: t\nmodel: {model}\nhosts: {{a: {{}}}}\n{mixed}")
        code, _, err = run_main(capsys, "validate", str(path))
        assert code == 2
        return [line.removeprefix(f"error: {path}:") for line in err.splitlines()]

    tp, kv, key = sorted(lines("./m"))
    assert tp.startswith("5: mixed[0].tp_size: 3 does not split this model of 4 attention heads")
    assert tp.endswith("use one of 1, 2, 4") and key.startswith("6: mixed[1].prefix: unknown key")
    assert kv.startswith("6: mixed[1].kv_cache: 1000KiB holds 1 block of 524,288 bytes; at least 2")
    model_line, key = lines("smolm2-135m")
    assert model_line.startswith("2: model: smolm2-135m: no such model; did you mean smollm2-135m?")


def test_a_warning_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "name: t\nmodel: some/m\nhosts: {a: {}}\nrouter: {bind: 0.0.0.0}\nmixed: [{}]\n"
    )
    code, out, err = run_main(capsys, "validate", str(path))
    assert code == 0
    assert err.startswith(f"warning: {path}:4: router.bind: listens on 0.0.0.0")
    assert "warning" not in out


@pytest.mark.parametrize("command", ["validate", "up", "plan"])
def test_a_bad_topology_is_exit_2_and_lines_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(BAD)
    code, out, err = run_main(capsys, command, str(path))
    assert (code, out) == (2, "")
    assert err == f"error: {path}:5: decod: unknown key; did you mean 'decode'?\n"
    assert not (tmp_path / "home").exists(), "nothing was touched"


@pytest.mark.parametrize("command", ["validate", "up", "plan"])
def test_with_json_the_error_is_a_document_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(BAD)
    code, out, err = run_main(capsys, command, str(path), "--json")
    document = json.loads(out)
    assert (code, document["schema"], document["exit_code"]) == (2, "pdctl.error/1", 2)
    assert [p["field"] for p in document["problems"]] == ["decod"]
    assert err.startswith("error: ")


# ---- no deployment -------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["status"], ["down"], ["logs"], ["ask", "hi"]])
def test_without_any_deployment_it_says_so(
    capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    code, out, err = run_main(capsys, *args)
    assert (code, out) == (2, "")
    assert err == "error: there is no deployment here\nhint: start one: `pdctl up TOPOLOGY`\n"


def test_the_audit_of_what_never_was_is_empty_and_may_be_a_typo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run_main(capsys, "audit", "demi")
    assert (code, out) == (0, "no change was recorded\n")
    assert err == "warning: no deployment demi has ever run here\n"


def test_down_of_what_is_not_there_is_no_failure_but_may_be_a_typo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state.remember(state.KnownDeployment("demo", ""))
    state.forget("demo")
    for _ in range(2):
        code, out, err = run_main(capsys, "down", "demo")
        assert (code, out, err) == (0, "demo is not running\n", "")
    code, out, err = run_main(capsys, "down", "dmeo")
    assert (code, out) == (0, "dmeo is not running\n")
    assert err == "warning: no deployment dmeo has ever run here\n"


def test_a_state_directory_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDCTL_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03" + bytes(59))
    path = tmp_path / "t.yaml"
    path.write_text("name: t\nmodel: m.gguf\nhosts: {a: {}}\nmixed: [{}]\n")
    code, out, err = run_main(capsys, "up", str(path))
    assert (code, out) == (1, "")
    assert "Not a directory" in err and "hint: " in err


# ---- init and model ------------------------------------------------------------------------------


def test_init_then_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "lab.yaml"
    assert run_main(capsys, "init", str(target))[:2] == (0, f"wrote {target}\n")
    assert run_main(capsys, "validate", str(target))[0] == 0
    code, _, err = run_main(capsys, "init", str(target))
    assert code == 2 and "is left as it is" in err


def test_model_list_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    document = json.loads(invoke("model", "list", "--json").stdout)
    (model,) = [m for m in document["models"] if m["name"] == "smollm2-135m"]
    assert model["pulled"] is False and model["bytes"] > 90_000_000
    assert "smollm2-135m" in invoke("model", "list").stdout


def test_an_unknown_model_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_main(capsys, "model", "pull", "smollm")
    assert (code, out) == (2, "")
    assert "smollm2-135m" in err


# ---- the edge ------------------------------------------------------------------------------------


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("pdctl.init.write_template", fail)


def test_an_expected_error_is_its_line_its_hint_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, UsageError("no", hint="yes"))
    assert run_main(capsys, "init") == (2, "", "error: no\nhint: yes\n")
    fail_with(monkeypatch, PdctlError("broken"))
    assert run_main(capsys, "init") == (1, "", "error: broken\n")


def test_our_own_bug_leaves_a_traceback_in_a_file_without_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fail_with(monkeypatch, ZeroDivisionError("oops"))
    code, out, err = run_main(capsys, "init", "hunter2.yaml")
    assert (code, out) == (1, "")
    assert "error: this is a bug in pdctl: ZeroDivisionError: oops" in err
    assert "Traceback" not in err
    (file,) = tmp_path.glob("pdctl-bug-*.txt")
    assert str(file) in err
    text = file.read_text()
    assert "ZeroDivisionError: oops" in text and __version__ in text
    assert "hunter2" not in text
    assert file.stat().st_mode & 0o077 == 0


def test_an_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    code, out, err = run_main(capsys, "init")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


# ---- consent -------------------------------------------------------------------------------------

SERVICE = ServiceSpec("demo", "decode-0", "decode", "local", argv=("x",))
KEEP = Step("keep", SERVICE, "unchanged", SERVICE, running=True)
START = Step("start", SERVICE, "not there yet")
REPLACE = Step("replace", SERVICE, "changed: env", SERVICE, running=True)
DEAD = Step("remove", SERVICE, "orphan: left over, not running")


def test_without_a_terminal_nothing_that_runs_is_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = Plan("demo", (KEEP, REPLACE), notes=("nothing is served until decode-0 is ready",))
    with pytest.raises(UsageError, match="this would stop decode-0 of demo") as caught:
        approver(yes=False)(plan)
    assert caught.value.exit_code == 2
    assert caught.value.hint == "--yes does it without asking", "plan cannot show a scale"
    shown = capsys.readouterr()
    assert "replace" in shown.err and "nothing is served until" in shown.err and not shown.out
    approver(yes=True)(plan)
    assert "replace" in capsys.readouterr().err, "shown all the same"


@pytest.mark.parametrize(
    ("steps", "shown"),
    [((START,), False), ((KEEP,), False), ((KEEP, START), True), ((KEEP, DEAD), True)],
)
def test_what_stops_nothing_is_not_asked_for(
    capsys: pytest.CaptureFixture[str], steps: tuple[Step, ...], shown: bool
) -> None:
    approver(yes=False)(Plan("demo", steps))
    assert bool(capsys.readouterr().err) == shown


@pytest.mark.parametrize("answer", ["y\n", "YES\n", "n\n", "\n", "what\n", ""])
def test_at_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    if answer.lower().startswith("y"):
        approver(yes=False)(Plan("demo", (REPLACE,)))
    else:
        with pytest.raises(PdctlError, match="nothing was changed"):
            approver(yes=False)(Plan("demo", (REPLACE,)))
    assert "Stop decode-0 of demo? [y/N]: " in terminal.getvalue()


def test_ctrl_c_at_the_question_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", terminal := Terminal())
    monkeypatch.setattr(terminal, "readline", interrupt)
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(KeyboardInterrupt):
        approver(yes=False)(Plan("demo", (REPLACE,)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

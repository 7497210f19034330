"""How it looks: on a terminal, on a narrow one, and off one."""

from __future__ import annotations

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from supervision import eventually

from pdctl.documents import plan_summary, plan_text, status_text
from pdctl.errors import Locked, Problem, TopologyError
from pdctl.events import Event
from pdctl.output import (
    Cell,
    Patience,
    Progress,
    Screen,
    duration,
    error_document,
    print_error,
    table,
)
from pdctl.plan import Plan, Step
from pdctl.services import ServiceSpec
from pdctl.shim.redact import environment
from pdctl.status import BufferStatus, DeploymentStatus, Health, ServiceStatus

PLAIN = Screen(live=False, color=False, unicode=True, width=None)
COLOR = Screen(live=True, color=True, unicode=True, width=80)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


# ---- screens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "color", "live"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
    ],
)
def test_a_terminal_has_colour_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], color: bool, live: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    screen = Screen.of(Terminal())
    assert (screen.color, screen.live) == (color, live)


def test_a_pipe_has_neither_colour_nor_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen.of(io.StringIO())
    assert (screen.color, screen.live, screen.width) == (False, False, None)


def test_symbols_fall_back_where_the_encoding_lacks_them() -> None:
    ascii_only = Screen(live=False, color=False, unicode=False, width=None)
    assert PLAIN.symbol("ok") == "✔"
    assert ascii_only.symbol("ok").isascii()


# ---- tables --------------------------------------------------------------------------------------

ROWS = [("router", Cell("ok", "good"), "http://127.0.0.1:8000"), ("decode-0", "down", "-")]


def test_a_table_word_for_word() -> None:
    assert table(("NAME", "HEALTH", "URL"), ROWS, PLAIN) == (
        "NAME      HEALTH  URL\nrouter    ok      http://127.0.0.1:8000\ndecode-0  down    -"
    )


def test_colour_does_not_shift_columns() -> None:
    import re

    colored = table(("NAME", "HEALTH", "URL"), ROWS, COLOR)
    assert "\x1b[32mok\x1b[0m" in colored
    assert re.sub(r"\x1b\[\d*m", "", colored) == table(("NAME", "HEALTH", "URL"), ROWS, PLAIN)


@given(st.integers(1, 60), st.lists(st.lists(st.text("abc", max_size=12), min_size=4, max_size=4)))
def test_a_narrow_screen_drops_right_columns_and_never_wraps(
    width: int, rows: list[list[str]]
) -> None:
    screen = Screen(live=False, color=False, unicode=True, width=width)
    lines = table(("A", "B", "C", "D"), rows, screen).split("\n")
    shown = lines[0].split()
    assert shown == ["A", "B", "C", "D"][: len(shown)]
    assert all(len(line) <= width for line in lines)
    lost = ["A", "B", "C", "D"][len(shown) :]
    note = [f"(too narrow for {', '.join(lost)})"[:width]] if lost else []
    assert lines[len(rows) + 1 :] == note


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (8.34, "8.3s"),
        (59.9, "59.9s"),
        (250, "4m10s"),
        (11100, "3h05m"),
        (187200, "2d04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- errors --------------------------------------------------------------------------------------


def test_an_error_is_a_line_and_a_hint_is_another() -> None:
    out = io.StringIO()
    print_error(Locked("demo is locked by ada", hint="wait"), out)
    assert out.getvalue() == "error: demo is locked by ada\nhint: wait\n"
    out = io.StringIO()
    print_error(Locked("demo is locked"), out)
    assert out.getvalue() == "error: demo is locked\n"


def test_topology_problems_are_lines_and_documents() -> None:
    error = TopologyError(
        [Problem("t.yaml", 9, "b", "is wrong", "be right"), Problem("t.yaml", 2, "a", "is bad")]
    )
    out = io.StringIO()
    print_error(error, out)
    assert out.getvalue() == "error: t.yaml:2: a: is bad\nerror: t.yaml:9: b: is wrong; be right\n"
    document = error_document(error)
    assert document["schema"] == "pdctl.error/1" and document["exit_code"] == 2
    assert document["problems"][1] == {
        "file": "t.yaml",
        "line": 9,
        "field": "b",
        "what": "is wrong",
        "right": "be right",
    }


# ---- progress ------------------------------------------------------------------------------------


def shown(stream: io.StringIO, *events: Event) -> str:
    with Progress(stream) as report:
        for event in events:
            report(event)
    return stream.getvalue()


def test_a_long_phase_is_named_once_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "AFTER_PLAIN_S", 0.0)
    stream = io.StringIO()
    with Progress(stream) as report:
        report(Event("phase", ""))
        time.sleep(0.5)
        assert stream.getvalue() == ""
        report(Event("phase", "asking the hosts"))
        eventually(stream.getvalue)
        time.sleep(0.5)
    assert stream.getvalue() == ". asking the hosts\n"
    assert shown(io.StringIO(), Event("phase", "quick")) == ""


WAIT = Event("wait", "the model to load", "decode-0", "local", 1.0)


def test_off_a_terminal_each_change_is_one_line() -> None:
    text = shown(
        io.StringIO(),
        Event("keep", "unchanged", "router", "local"),
        Event("start", "not there yet", "decode-0", "local"),
        WAIT,
        Event("wait", "the model to load", "decode-0", "local", 2.0),
        Event("wait", "a path to prefill-0", "decode-0", "local", 3.0),
        Event("wait", "prefill-0 was silent for 9.4 s", "decode-0", "local", 3.5),
        Event("wait", "prefill-0 was silent for 9.9 s", "decode-0", "local", 4.0),
        Event("ready", "http://x", "decode-0", "local", 4.25),
        Event("log", "Traceback", "decode-0", "local"),
        Event("rollback", "stopping decode-0"),
        Event("stopped", "running", "decode-0", "local"),
    )
    assert text.splitlines() == [
        "= local     router      unchanged",
        "> local     decode-0    starting  not there yet",
        ". local     decode-0    waiting   1.0s  the model to load",
        ". local     decode-0    waiting   3.0s  a path to prefill-0",
        ". local     decode-0    waiting   3.5s  prefill-0 was silent for 9.4 s",
        "+ local     decode-0    ready     4.2s  http://x",
        "    | Traceback",
        "! stopping decode-0",
        "+ local     decode-0    stopped   (was running)",
    ]


def test_on_a_terminal_waiting_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    text = shown(Terminal(), WAIT, Event("ready", "http://x", "decode-0", "local", 4.0), WAIT)
    assert text.startswith("\r\x1b[K… 1.0s  decode-0: the model to load\r\x1b[K✔ local")
    assert text.endswith("\r\x1b[K"), "nothing is left of the line at the end"


def test_a_living_line_is_never_wider_than_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    text = shown(Terminal(), Event("wait", "x" * 100, "decode-0", "local", 1.0))
    assert max(len(part) for part in text.split("\r\x1b[K")) < 30


# ---- plans ---------------------------------------------------------------------------------------

SPEC = ServiceSpec(
    "demo",
    "decode-0",
    "decode",
    "a",
    argv=("python", "-m", "runtime"),
    env={"OMP_NUM_THREADS": "2", "MY_API_KEY": "hunter2"},
    files={"config.json": '{"a": 1}\n'},
    secrets=("HF_TOKEN",),
    ports={"http": 8100},
)
PLAN = Plan("demo", (Step("start", SPEC, "not there yet"),))


def test_a_plan_word_for_word() -> None:
    assert plan_text(PLAN, PLAIN, verbose=False).splitlines() == [
        "STEP   SERVICE   HOST  PORTS      WHY",
        "start  decode-0  a     http:8100  not there yet",
        "",
        "demo: 1 to start, 0 unchanged",
    ]


def test_a_verbose_plan_has_commands_and_no_secrets() -> None:
    text = plan_text(PLAN, PLAIN, verbose=True)
    assert "OMP_NUM_THREADS=2 MY_API_KEY=*** HF_TOKEN=*** python -m runtime" in text
    assert '{dir}/config.json:\n    {"a": 1}' in text
    assert "hunter2" not in text


def test_an_empty_plan() -> None:
    assert plan_text(Plan("demo", ()), PLAIN, verbose=True) == "demo: 0 to start, 0 unchanged"


def test_a_summary_counts_everything() -> None:
    kinds = ("start", "replace", "remove", "keep", "keep")
    plan = Plan("demo", tuple(Step(kind, SPEC, "") for kind in kinds))
    assert plan_summary(plan) == "demo: 1 to start, 1 to replace, 1 to remove, 2 unchanged"


@pytest.mark.parametrize(
    "name", ["API_KEY", "HF_TOKEN", "DB_PASSWORD", "aws_secret", "PASSWD", "GOOGLE_CREDENTIALS"]
)
def test_what_sounds_private_is_hidden(name: str) -> None:
    assert environment({name: "x", "OMP_NUM_THREADS": "2"}) == {name: "***", "OMP_NUM_THREADS": "2"}


# ---- status --------------------------------------------------------------------------------------


def service(name: str, health: Health = "healthy", **more: object) -> ServiceStatus:
    fields: dict[str, object] = {
        "name": name,
        "role": name.rpartition("-")[0] or name,
        "host": "a",
        "state": "running",
        "health": health,
        "reason": "",
        "pid": 7,
        "uptime_s": 61.0,
        "url": "http://h:1",
        "ports": {},
        "supervised": True,
        "exit": None,
        "strays": (),
    }
    return ServiceStatus(**(fields | more))  # type: ignore[arg-type]


def test_an_instance_of_several_ranks_says_so() -> None:
    services = (service("prefill-0", tp_size=2), service("decode-0", tp_size=1))
    lines = status_text(DeploymentStatus("demo", "http://r", services), PLAIN).splitlines()
    assert "prefill (tp 2)" in next(line for line in lines if line.startswith("prefill-0"))
    assert "tp" not in next(line for line in lines if line.startswith("decode-0")).split("http")[0]


def test_a_healthy_deployment_word_for_word() -> None:
    found = DeploymentStatus(
        "demo",
        "http://h:1",
        (
            service("router"),
            service("prefill-0", kv_bytes={"shm": 3 << 19, "tcp": 0}, idle=True),
            service(
                "decode-0", kv_bytes={"shm": 3 << 19}, idle=False, held={"requests": 1, "copies": 2}
            ),
        ),
    )
    assert status_text(found, PLAIN).splitlines() == [
        "demo  healthy  http://h:1",
        "SERVICE    ROLE     HOST  PID  STATE    HEALTH     UPTIME  ENDPOINT    KV MOVED    HELD",
        "router     router   a     7    running  ✔ healthy  1m01s   http://h:1  -           -",
        "prefill-0  prefill  a     7    running  ✔ healthy  1m01s   http://h:1  1.5MiB shm  0",
        "decode-0   decode   a     7    running  ✔ healthy  1m01s   http://h:1  1.5MiB shm  "
        "requests=1 copies=2",
    ]


def test_what_is_not_well_is_explained_below() -> None:
    found = DeploymentStatus(
        "demo",
        "http://h:1",
        (
            service("router"),
            service(
                "decode-0",
                "down",
                state="exited",
                pid=None,
                uptime_s=None,
                reason="killed by SIGKILL after 3.0 s",
            ),
        ),
    )
    lines = status_text(found, PLAIN).splitlines()
    assert lines[0] == "demo  degraded  http://h:1"
    assert " ".join(lines[3].split()) == "decode-0 decode a - exited ✗ down - http://h:1 ? ?"
    assert lines[-1] == "decode-0: killed by SIGKILL after 3.0 s"


def test_a_buffer_is_told_of_when_it_is_used_or_was_in_the_way() -> None:
    idle = BufferStatus(170, 0, 0, 0, 0.2, 3.0, 0, 0.0, 0.0)
    busy = BufferStatus(170, 12, 4, 3, 1.5, 3.0, 2, 0.1, 0.75)
    found = DeploymentStatus(
        "demo", "http://h:1", (service("decode-0", buffer=idle), service("decode-1", buffer=busy))
    )
    assert status_text(found, PLAIN).splitlines()[4:] == [
        "decode-1: CPU buffer 12 of 170 blocks, 4 quarantined, 3 requests wait, since the start "
        "1.5 s waited for room, 3.0 s swap-in, 2 swap-outs, 0.8 s away"
    ]


def test_nothing_there() -> None:
    assert status_text(DeploymentStatus("demo", "", ()), PLAIN) == "demo  not running"
    lost = DeploymentStatus("demo", "", (), {"gpu-a": "gpu-a: connect: refused"})
    assert status_text(lost, PLAIN).startswith("demo  unknown\ngpu-a: connect: refused\n")

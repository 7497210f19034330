"""Logs as they come: over restarts, rotation, and a host that was lost for a while."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervision import Home, Lab, eventually

from pdctl import ops
from pdctl.cli_edge import seconds_ago
from pdctl.errors import UsageError
from pdctl.find import Where
from pdctl.logs import LogLine
from pdctl.shim import logs
from pdctl.shim.logs import LogReader, last_lines
from pdctl.shim.service import Service

HERE = Where(hosts=("local",))
ECHO = """
import os, sys, time
open('pipe', 'a').close()
with open('pipe') as f:
    while True:
        sys.stdout.write(f.read()); sys.stdout.flush(); time.sleep(0.02)
"""


class Following:
    """`logs -f` of demo in a thread; what it yields is waited for here."""

    def __init__(self, *services: str) -> None:
        self.lines: queue.Queue[LogLine] = queue.Queue()
        self.stream = ops.logs("demo", ops.LogQuery(services, 50), follow=True, where=HERE)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self.stream:
            self.lines.put(line)
            if line.line == "the end":
                break
        self.stream.close()  # type: ignore[attr-defined]

    def next(self) -> tuple[str, str]:
        line = self.lines.get(timeout=30)
        return line.event, line.line

    def expect(self, *lines: str) -> None:
        assert [self.next() for _ in lines] == [("line", line) for line in lines]


def say(lab: Lab, text: str, name: str = "a") -> None:
    pipe = lab.home.dir("demo", name) / "pipe"
    eventually(pipe.exists)
    with pipe.open("a") as f:
        f.write(text + "\n")


def follower_pid() -> int:
    """The shim that follows for us, among our own children."""

    def find() -> int | None:
        for name in os.listdir("/proc"):
            try:
                stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if int(stat[1]) == os.getpid() and stat[0] != "Z" and command[-2] == b"follow":
                return int(name)
        return None

    return int(eventually(find))


def test_through_restart_and_loss_no_line_is_lost_or_told_twice(home: Home, lab: Lab) -> None:
    lab.start(lab.spec(ECHO))
    say(lab, "one")
    follow = Following()
    follow.expect("one")
    say(lab, "two")
    follow.expect("two")

    os.kill(follower_pid(), signal.SIGKILL)
    say(lab, "three")
    event, reason = follow.next()
    assert event == "lost" and reason.startswith("local: ")
    assert follow.next() == ("found", "followed again")
    follow.expect("three")

    say(lab, "four")
    lab.stop()
    follow.expect("four")
    (home.dir("demo", "a") / "pipe").unlink()
    lab.start(lab.spec(ECHO))
    lab.start(lab.spec(ECHO, name="b"))
    say(lab, "five")
    follow.expect("five")
    say(lab, "of a new service", "b")
    follow.expect("of a new service")
    say(lab, "the end")
    follow.expect("the end")
    follow.thread.join(timeout=30)
    assert not follow.thread.is_alive()
    lab.stop()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "demo" / "a").mkdir(parents=True)
    yield Service(str(tmp_path), "demo", "a")


def reader(service: Service, after: list[int] | None = None, **more: Any) -> LogReader:
    return LogReader(service, {"lines": 10} | more, after)


def lines(r: LogReader) -> list[str]:
    return [line for line, _ in r.new_lines()]


def test_a_rotation_by_copy_and_truncate_loses_nothing(service: Service) -> None:
    log, older = Path(service.path("out.log")), Path(service.path("out.log.1"))
    log.write_text("one\n")
    r = reader(service)
    assert lines(r) == ["one"]
    older.write_text("one\ntwo\nthr")
    log.write_text("")
    os.truncate(log, 0)
    with log.open("a") as f:
        f.write("ee\n")
        f.flush()
        assert lines(r) == ["two", "three"]
        f.write("four\n")
    assert lines(r) == ["four"]


def test_a_restart_and_a_removal_lose_nothing(service: Service, tmp_path: Path) -> None:
    log = Path(service.path("out.log"))
    log.write_text("one\n")
    r = reader(service)
    assert lines(r) == ["one"]
    with log.open("a") as f:
        f.write("two\nunfini")
    os.replace(log, service.path("out.log.1"))
    log.write_text("three\n")
    assert lines(r) == ["two", "unfini", "three"]
    with log.open("a") as f:
        f.write("four\n")
    kept = tmp_path / ".last" / "demo"
    kept.mkdir(parents=True)
    os.replace(log, kept / "a.out.log")
    os.unlink(service.path("out.log.1"))
    assert lines(r) == []
    log.write_text("five\n")
    assert lines(r) == ["four", "five"]


def test_more_than_one_piece_is_read_before_the_next_file(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a restart, and after a host was lost: what was written meanwhile may be much."""
    monkeypatch.setattr(logs, "CHUNK", 100)
    log = Path(service.path("out.log"))
    log.write_text("one\n")
    r = reader(service)
    assert lines(r) == ["one"]
    place = [log.stat().st_ino, 4]
    much = [f"{number:050d}" for number in range(20)]
    with log.open("a") as f:
        f.write("".join(f"{line}\n" for line in much))
    os.replace(log, service.path("out.log.1"))
    log.write_text("".join(f"{line}\n" for line in much) + "end\n")
    assert lines(r) == [*much, *much, "end"]
    assert lines(reader(service, place)) == [*much, *much, "end"]


def test_it_goes_on_where_another_stopped(service: Service) -> None:
    log = Path(service.path("out.log"))
    log.write_text("one\ntwo\nthr")
    first = list(reader(service, [log.stat().st_ino, 0]).new_lines())
    assert [line for line, _ in first] == ["one", "two"]
    with log.open("a") as f:
        f.write("ee\n")
    assert lines(reader(service, first[0][1])) == ["two", "three"]
    assert lines(reader(service, first[1][1])) == ["three"]


@pytest.mark.parametrize(
    ("since_s", "shown"),
    [(3600, ["old", "  old too", "new", "  new too"]), (60, ["new", "  new too"]), (0, [])],
)
def test_since_reads_the_time_in_the_lines(
    tmp_path: Path, since_s: float, shown: list[str]
) -> None:
    def stamp(ago: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S,123 INFO ", time.localtime(time.time() - ago))

    log = tmp_path / "log"
    log.write_text(f"banner\n{stamp(900)}old\n  old too\n{stamp(20)}new\n  new too\n")
    size = log.stat().st_size
    found = last_lines(str(log), size, 99, since_s)
    assert [line.rpartition("INFO ")[2] for line in found] == shown


def test_since_of_a_log_without_times_goes_by_the_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("no time here\n")
    assert last_lines(str(log), 13, 9, 60) == ["no time here"]
    os.utime(log, (0, 1000))
    assert last_lines(str(log), 13, 9, 60) == []


def test_times_as_people_write_them() -> None:
    assert [seconds_ago(t) for t in ("90s", "10m", "2h", "1d")] == [90, 600, 7200, 86400]
    assert abs(time.time() - seconds_ago("1970-01-01T00:16:40+00:00") - 1000) < 60
    with pytest.raises(UsageError, match="is not a time"):
        seconds_ago("yesterday")


def test_json_lines_on_the_command_line(lab: Lab) -> None:
    lab.start(lab.spec("print('hello')"))
    eventually(lambda: lab.status()["state"] == "exited")
    argv = [sys.executable, "-m", "pdctl", "logs", "--name", "demo", "--json", "--since", "1h"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {
            "schema": "pdctl.log/1",
            "event": "line",
            "service": "a",
            "host": "local",
            "line": "hello",
        }
    ]


def test_an_unknown_service_is_told_which_there_are(lab: Lab) -> None:
    lab.start(lab.spec("print('hello')"))
    for follow in (False, True):
        with pytest.raises(UsageError, match="demo has no service b") as failure:
            next(ops.logs("demo", ops.LogQuery(("b",)), follow=follow, where=HERE))
        assert failure.value.hint == "its services: a"

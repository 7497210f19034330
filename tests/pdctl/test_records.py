"""Records as they come from a shim, typed: also from another version of pdctl."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from pdctl.errors import StateError
from pdctl.records import Identity, parse_service
from pdctl.services import ServiceSpec

SPEC = ServiceSpec(
    "demo",
    "decode-0",
    "decode",
    "gpu-a",
    argv=("python", "-m", "runtime"),
    secrets=("KEY",),
    ports={"http": 8100},
)


def found(**changes: Any) -> dict[str, Any]:
    return {
        "deployment": "demo",
        "service": "decode-0",
        "dir": "/h/demo/decode-0",
        "spec": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(SPEC).items()},
        "hash": SPEC.hash,
        "intent": {},
        "state": "running",
        "supervised": True,
        "identity": {
            "boot_id": "b",
            "shim": {"pid": 10, "start_ticks": 100},
            "service": {"pid": 11, "start_ticks": 101},
        },
        "rebooted": False,
        "exit": None,
        "uptime_s": 3.5,
        "strays": [],
    } | changes


def ended(**changes: Any) -> dict[str, Any]:
    record = {"code": None, "signal": None, "error": "", "at": 1.0, "ran_s": 2.0, "asked": False}
    return found(state="exited", supervised=False, exit=record | changes)


def test_a_running_service() -> None:
    record = parse_service("local", found())
    assert record.spec == SPEC and record.spec.hash == SPEC.hash
    assert record.host == "gpu-a", "as the topology calls it"
    assert (record.service, record.shim) == (Identity(11, 101, "b"), Identity(10, 100, "b"))
    assert record.alive and not record.ended
    observed = record.observed()
    assert (observed.name, observed.host, observed.alive) == ("decode-0", "gpu-a", True)
    assert observed.spec_hash == SPEC.hash


@pytest.mark.parametrize(
    ("record", "says", "status"),
    [
        (ended(code=3), "exited with code 3 after 2.0 s", 3),
        (ended(signal=9), "killed by SIGKILL after 2.0 s", -9),
        (ended(signal=64), "killed by SIGRTMAX after 2.0 s", -64),
        (ended(code=127, error="cannot run x: gone"), "cannot run x: gone", 127),
    ],
)
def test_how_it_ended(record: dict[str, Any], says: str, status: int) -> None:
    parsed = parse_service("local", record)
    assert parsed.how_it_ended() == says
    assert parsed.exit is not None and parsed.exit.status == status
    assert parsed.ended and not parsed.alive and not parsed.observed().alive


def test_an_end_that_nobody_recorded() -> None:
    lost = found(state="lost", supervised=False)
    assert "not recorded" in parse_service("local", lost).how_it_ended()
    assert "rebooted" in parse_service("local", lost | {"rebooted": True}).how_it_ended()


def test_a_supervisor_whose_service_ended_does_not_keep_it_from_being_started() -> None:
    assert not parse_service("local", ended(code=0) | {"supervised": True}).observed().alive


@pytest.mark.parametrize("spec", [{}, {"argv": ["x"]}, {**asdict(SPEC), "new_field": 1}])
def test_a_spec_of_another_version_is_none_and_the_rest_stays(spec: dict[str, Any]) -> None:
    record = parse_service("local", found(spec=spec))
    assert record.spec is None and record.alive
    assert record.observed().spec is None


@pytest.mark.parametrize(
    "broken",
    [{"state": "flying"}, {"identity": {"shim": {}}}, {"exit": {"code": 1}}, {"strays": None}],
)
def test_nonsense_names_the_record(broken: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="/h/demo/decode-0 cannot be understood"):
        parse_service("local", found(**broken))

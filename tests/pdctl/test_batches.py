"""What is stopped and started together, in which order, and what is said of it beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pdctl.batches import at_once, batches, remarks
from pdctl.plan import ObservedService, Plan, Step, make_plan
from pdctl.services import ServiceSpec

CONFIG = {"model": {"path": "/m"}, "block_size": 16, "router": "http://r:1", "threads": 1}


def spec(name: str, port: int = 0, env: dict[str, str] | None = None, **config: Any) -> ServiceSpec:
    return ServiceSpec(
        "demo",
        name,
        name.partition("-")[0],  # type: ignore[arg-type]
        "a",
        argv=("run",),
        env=env or {},
        files={"config.json": json.dumps(CONFIG | config)},
        ports={"http": port} if port else {},
    )


def seen(*services: ServiceSpec) -> list[ObservedService]:
    return [ObservedService(s.name, s.host, s, s.hash, True) for s in services]


def shown(plan: Plan, **more: Any) -> list[str]:
    """`-stopped +started` of each batch."""
    return [
        " ".join(
            [f"-{s.service.name}" for s in b.ending] + [f"+{s.service.name}" for s in b.starting]
        )
        for b in batches(plan, **more)
    ]


PAIRS = [spec(n) for n in ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")]


def changed(*names: str, **config: Any) -> list[ServiceSpec]:
    return [spec(s.name, **config) if s.name in names else s for s in PAIRS]


TABLE: dict[str, tuple[list[ServiceSpec], list[str], list[str]]] = {
    "nothing": (PAIRS, [], []),
    "one by one": (
        changed("prefill-0", "prefill-1", "decode-0", "decode-1", threads=2),
        [
            "-prefill-0 +prefill-0",
            "-prefill-1 +prefill-1",
            "-decode-0 +decode-0",
            "-decode-1 +decode-1",
        ],
        [],
    ),
    "what starts comes before what is replaced": (
        [*changed("decode-0", "decode-1", threads=2), spec("decode-2", threads=2)],
        ["+decode-2", "-decode-0 +decode-0", "-decode-1 +decode-1"],
        [],
    ),
    "what is removed serves as long as it can": (
        changed("decode-0", threads=2)[:-1],
        ["-decode-0 +decode-0", "-decode-1"],
        [],
    ),
    "but not while something new may need its place": (
        [*changed("prefill-0", threads=2)[:-1], spec("mixed-0")],
        ["-decode-1 +mixed-0", "-prefill-0 +prefill-0"],
        [],
    ),
    "the router alone": (
        [spec("router", policy="round_robin"), *PAIRS[1:]],
        ["-router +router"],
        ["nothing is served until router is ready"],
    ),
    "another model": (
        [PAIRS[0], *(spec(s.name, model={"path": "/n"}) for s in PAIRS[1:])],
        [
            "-prefill-0 -prefill-1 -decode-0 -decode-1 +prefill-0 +prefill-1 +decode-0 +decode-1",
        ],
        [
            "replaced all at once, because the model changes",
            "nothing is served until prefill-0, prefill-1, decode-0 and decode-1 are ready",
        ],
    ),
}


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_batches(case: str) -> None:
    wanted, expected, notes = TABLE[case]
    plan = make_plan("demo", wanted, seen(*PAIRS))
    assert shown(plan) == expected
    assert list(remarks(plan)) == notes


def test_a_mixed_instance_serves_meanwhile() -> None:
    here = [spec("router"), spec("prefill-0"), spec("decode-0"), spec("mixed-0")]
    wanted = [spec(s.name, threads=2) if s.name == "decode-0" else s for s in here]
    assert remarks(make_plan("demo", wanted, seen(*here))) == ()


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"port": 8101}, {"port": 8102}, "port 8102"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, {"env": {"CUDA_VISIBLE_DEVICES": "1"}}, "GPU 1"),
    ],
)
def test_what_only_one_can_have_is_not_taken_while_the_other_runs(
    before: dict[str, Any], after: dict[str, Any], what: str
) -> None:
    two = spec("decode-1", **after)
    plan = make_plan(
        "demo",
        [spec("decode-0", **after), replace(two, argv=("x",))],
        seen(spec("decode-0", **before), two),
    )
    assert at_once(plan) == f"decode-0 gets {what} of decode-1"
    assert shown(plan) == ["-decode-0 -decode-1 +decode-0 +decode-1"]
    started = make_plan(
        "demo",
        [spec("decode-0", **before), spec("mixed-0", **after)],
        seen(spec("decode-0", **after)),
    )
    assert shown(started) == ["-decode-0 +mixed-0 +decode-0"]


def test_one_shared_gpu_of_several_is_enough() -> None:
    def on(name: str, gpus: str) -> ServiceSpec:
        return spec(name, env={"CUDA_VISIBLE_DEVICES": gpus})

    now = seen(on("mixed-0", "0,1"))
    plan = make_plan("demo", [on("mixed-0", "0"), on("mixed-1", "1")], now)
    assert at_once(plan) == "mixed-1 gets GPU 1 of mixed-0"
    assert shown(plan) == ["-mixed-0 +mixed-1 +mixed-0"]
    plan = make_plan("demo", [on("mixed-0", "0"), on("mixed-1", "2,10")], now)
    assert shown(plan) == ["+mixed-1", "-mixed-0 +mixed-0"]


def test_an_unreadable_record_is_no_base_for_a_rolling_change() -> None:
    unreadable = ObservedService("decode-0", "a", None, "?", True)
    plan = make_plan(
        "demo",
        [spec("decode-0"), spec("decode-1", threads=2)],
        [unreadable, *seen(spec("decode-1"))],
    )
    assert at_once(plan) == "the record of decode-0 cannot be read"
    assert len(batches(plan)) == 1


def test_restarts_are_rolling_only_when_asked() -> None:
    plan = Plan("demo", tuple(Step("restart", s, "asked for", s, running=True) for s in PAIRS))
    assert len(batches(plan)) == 5 and batches(plan)[0].alone is False
    assert [b.alone for b in batches(plan)[1:]] == [True] * 4
    assert len(batches(plan, rolling=False)) == 1

"""`pdctl bench` as a user runs it, against a scripted server on loopback."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_server import MODEL, Action, Pause, Refuse, answer, serve, text
from typer.testing import CliRunner

from pdctl.bench.cli import bench_command
from pdctl.bench.explain import TEXT
from pdctl.errors import PdctlError

RUN = "import typer; from pdctl.bench.cli import bench_command; typer.run(bench_command)"
SMALL = ["--input-len", "16", "--output-len", "3", "--num-prompts", "6"]


def _bench(*args: str) -> tuple[int, str]:
    """Exit code and stdout; a PdctlError is raised as it is."""
    app = typer.Typer()
    app.command()(bench_command)
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def good(number: int, body: dict[str, Any]) -> list[Action]:
    stages = {"reserve": 0.001, "prefill_queue": 0.0, "prefill": 0.004, "transfer": 0.0002}
    return answer(
        body["max_tokens"],
        prompt=len(body.get("prompt", "")),
        gap_s=0.002,
        prefill="prefill-0",
        decode="decode-0",
        path="shm",
        kv_bytes=1 << 20,
        stages=stages,
        ttft_s=0.006,
        e2e_s=0.01,
    )


def test_a_run_prints_the_table_and_writes_the_document(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with serve(good) as server:
        code, stdout = _bench("--endpoint", server.url, *SMALL, "--ignore-eos", "-o", str(out))
    assert code == 0
    assert "Successful requests:                     6\n" in stdout
    assert "Total input tokens:                      96\n" in stdout
    assert "Total generated tokens:                  18\n" in stdout
    assert "KV by shm (MiB):                         6.0 in 6\n" in stdout
    assert len(server.bodies) == 7  # the warm-up is one more
    assert server.bodies[0]["prompt"] not in [b["prompt"] for b in server.bodies[1:]]
    for body in server.bodies:
        assert len(body["prompt"]) == 16 and body["ignore_eos"] is True
        assert min(body["prompt"]) >= 100 and max(body["prompt"]) < 900
    doc = json.loads(out.read_text())
    assert doc["schema"] == "pdctl.bench/1"
    assert doc["arguments"]["request_rate"] == "inf"
    assert doc["target"]["model"] == "toy"
    assert doc["requests"]["successful"] == 6
    assert list(tmp_path.iterdir()) == [out]


def test_json_on_stdout_is_the_document_alone() -> None:
    with serve(good) as server:
        code, stdout = _bench(
            "--endpoint", server.url, *SMALL, "--json", "--request-rate", "200",
            "--goodput", "ttft:5000,tpot:1000", "--warmup", "0",
        )  # fmt: skip
    assert code == 0
    doc = json.loads(stdout)
    assert doc["goodput"]["met"] == 6
    assert doc["sending"]["asked_rate"] == 200
    assert len(server.bodies) == 6


def test_any_failure_makes_the_exit_code_1() -> None:
    def script(number: int, body: dict[str, Any]) -> list[Action]:
        return [Refuse(503, "decode-0 is full")] if number == 3 else good(number, body)

    with serve(script) as server:
        code, stdout = _bench("--endpoint", server.url, *SMALL)
    assert code == 1
    assert "Successful requests:                     5\n" in stdout
    assert "Failed requests:                         1\n" in stdout
    assert "FAILED 1 x HTTP 503, the first: decode-0 is full\n" in stdout


def test_a_failing_warm_up_ends_it_at_once() -> None:
    with serve(lambda number, body: [Refuse(503, "no healthy pair")]) as server:
        with pytest.raises(PdctlError, match="warm-up request failed: HTTP 503: no healthy pair"):
            _bench("--endpoint", server.url, *SMALL)
        assert len(server.bodies) == 1


def test_jsonl_and_chat(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}\n' * 3)
    with serve(good) as server:
        code, stdout = _bench(
            "--endpoint", server.url, "--dataset", "jsonl", "--dataset-path", str(path)
        )
    assert code == 0
    assert server.paths == ["/v1/chat/completions"] * 4
    assert "Total generated tokens:                  6\n" in stdout


def test_sharegpt_asks_for_as_much_as_the_reference_answer(tmp_path: Path) -> None:
    def entry(question: str, reply: str) -> dict[str, Any]:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]
        return {"conversations": turns}

    path = tmp_path / "sharegpt.json"
    too_long = entry("word " * 5000, "yes")
    path.write_text(json.dumps([entry("how?", "this very way"), too_long, entry("why?", "so")]))
    with serve(good) as server:
        code, _ = _bench(
            "--endpoint", server.url, "--dataset", "sharegpt", "--dataset-path", str(path),
            "--warmup", "0",
        )  # fmt: skip
    assert code == 0
    asked = {b["messages"][0]["content"]: b["max_tokens"] for b in server.bodies}
    assert asked == {"how?": 3, "why?": 1}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--request-rate", "fast"], "--request-rate fast"),
        (["--request-rate", "0"], "--request-rate 0"),
        (["--request-rate", "nan"], "--request-rate nan"),
        (["--burstiness", "0"], "--burstiness"),
        (["--timeout", "-1"], "--timeout"),
        (["--goodput", "speed:3"], "--goodput speed:3"),
        (["--dataset", "jsonl"], "needs --dataset-path"),
        (["--dataset-path", "x"], "needs --dataset"),
        (["-o", "/nowhere/at/all.json"], "-o /nowhere/at/all.json"),
        (["--input-len", "4095", "--output-len", "2"], "4096 tokens"),
        (["--model", "gpt"], "does not serve the model gpt"),
    ],
)
def test_bad_usage_sends_nothing(args: list[str], says: str) -> None:
    with serve(good) as server:
        with pytest.raises(PdctlError, match=re.escape(says)) as error:
            _bench("--endpoint", server.url, *args)
        assert error.value.exit_code == 2
        assert server.bodies == []


def test_without_a_vocabulary_size_its_tokenizer_gives_the_ids() -> None:
    model = {k: v for k, v in MODEL.items() if k != "vocab_size"}
    with serve(good, model) as server:
        assert _bench("--endpoint", server.url, *SMALL)[0] == 0
    prompts = [b["prompt"] for b in server.bodies]
    assert all(len(p) == 16 for p in prompts)
    assert len({tuple(p) for p in prompts}) == 7


def test_without_vocabulary_and_tokenizer_there_are_no_random_prompts() -> None:
    model = {"id": "mute"}
    with (
        serve(good, model) as server,
        pytest.raises(PdctlError, match="cannot draw random tokens") as error,
    ):
        _bench("--endpoint", server.url)
    assert error.value.hint == "use --dataset jsonl"


def test_nobody_there() -> None:
    with pytest.raises(PdctlError, match="Connection refused") as error:
        _bench("--endpoint", "127.0.0.1:9")
    assert error.value.hint


def test_with_json_a_failure_is_a_document_too() -> None:
    argv = [sys.executable, "-m", "pdctl", "bench", "--endpoint", "127.0.0.1:9", "--json"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    doc = json.loads(result.stdout)
    assert doc["schema"] == "pdctl.error/1" and "refused" in doc["error"]
    assert result.stderr.splitlines()[0].startswith("error: http://127.0.0.1:9/v1/models: ")


def test_a_bar_on_a_terminal_and_nothing_of_it_on_stdout() -> None:
    terminal, end = pty.openpty()
    with serve(good) as server:
        argv = [sys.executable, "-c", RUN, "--endpoint", server.url, *SMALL]
        bench = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=end, text=True)
        try:
            stdout, _ = bench.communicate(timeout=30)
        finally:
            bench.kill()
        os.close(end)
    drawn = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert bench.returncode == 0
    assert "6/6" in drawn and "0 failed" in drawn
    assert stdout.startswith("============ Serving Benchmark Result")
    assert "\x1b" not in stdout


def test_explain() -> None:
    assert _bench("--explain") == (0, TEXT)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_gives_what_is_done_and_130(tmp_path: Path, sig: signal.Signals) -> None:
    def script(number: int, body: dict[str, Any]) -> list[Action]:
        return good(number, body) if number < 4 else [text("a"), Pause(60.0)]

    out = tmp_path / "partial.json"
    with serve(script) as server:
        argv = [sys.executable, "-c", RUN, "--endpoint", server.url, *SMALL]
        argv += ["--warmup", "0", "--max-concurrency", "2", "-o", str(out)]
        bench = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 20.0
            while len(server.bodies) < 6 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(server.bodies) == 6
            bench.send_signal(sig)
            stdout, stderr = bench.communicate(timeout=10)
        finally:
            bench.kill()
    assert bench.returncode == 130, stderr
    assert "PARTIAL: interrupted, completed requests only\n" in stdout
    assert "Successful requests:                     4\n" in stdout
    assert "Interrupted requests:                    2\n" in stdout
    assert "Traceback" not in stderr
    doc = json.loads(out.read_text())
    assert doc["partial"] is True and doc["requests"]["interrupted"] == 2


def test_ctrl_c_before_anything_is_measured() -> None:
    with serve(lambda number, body: [text("a"), Pause(60.0)]) as server:
        argv = [sys.executable, "-c", RUN, "--endpoint", server.url, *SMALL]
        bench = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 20.0
            while not server.bodies and time.monotonic() < deadline:
                time.sleep(0.02)
            bench.send_signal(signal.SIGINT)
            stdout, stderr = bench.communicate(timeout=10)
        finally:
            bench.kill()
    assert bench.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    assert "interrupted" in stderr


def test_the_options_load_without_the_http_client() -> None:
    """`pdctl --help` imports bench_command: it must stay light."""
    code = (
        "import sys; import pdctl.bench.cli; "
        "print([m for m in ('aiohttp', 'asyncio', 'rich.progress', 'pdctl.bench.runner')"
        " if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr

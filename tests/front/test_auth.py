"""Client keys, the router's word, and what a client may not smuggle in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from runtime.config import read_api_keys
from runtime.errors import ConfigError, RequestError
from runtime.front.auth import Gate

GATE = Gate(b"tok\xc3\xa9n", [b"key-1", b"key-2"], 60.0)


def admit(headers: dict[str, str], gate: Gate = GATE) -> Any:
    return gate.admit(make_mocked_request("POST", "/v1/completions", headers=headers))


@pytest.mark.parametrize("key", ["Bearer key-1", "bearer key-2", "Bearer  key-2 "])
def test_any_of_the_keys_opens(key: str) -> None:
    assert admit({"Authorization": key}).deadline_s == 60.0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "key-1"},
        {"Authorization": "Basic key-1"},
        {"Authorization": "Bearer key-"},
        {"Authorization": "Bearer key-11"},
        {"Authorization": "Bearer tokén"},
        {"x-pdctl-token": "wrong"},
        {"x-pdctl-token": ""},
    ],
    ids=str,
)
def test_nothing_else_does(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError) as failure:
        admit(headers)
    assert failure.value.status == 401 and failure.value.code == "invalid_api_key"


def test_the_router_needs_no_client_key() -> None:
    caller = admit({"x-pdctl-token": "tokén", "x-pdctl-request-id": "q1", "x-pdctl-prefill": "p"})
    assert (caller.request_id, caller.prefill) == ("q1", "p")


def test_without_keys_everyone_may_ask_but_internal_headers_do_not_count() -> None:
    gate = Gate(b"token", [], 60.0)
    caller = admit(
        {"x-pdctl-request-id": "q1", "x-pdctl-prefill": "p", "x-pdctl-deadline-s": "5"}, gate
    )
    assert caller.request_id != "q1" and caller.prefill is None and caller.deadline_s == 60.0
    assert caller.request_id != admit({}, gate).request_id


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("5", 5.0),
        ("600", 60.0),
        ("-1", 0.001),
        ("0.000", 0.001),
        ("x", 60.0),
        ("nan", 60.0),
        ("inf", 60.0),
    ],
)
def test_deadlines_only_shorten(given: str, used: float) -> None:
    assert admit({"x-pdctl-token": "tokén", "x-pdctl-deadline-s": given}).deadline_s == used


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1", "abc-1"), ("x" * 201, None), ("é", None), ("a\tb", None), ("", None)],
)
def test_client_ids_are_echoed_only_when_harmless(given: str, echoed: str | None) -> None:
    headers = {"Authorization": "Bearer key-1", "X-Request-Id": given}
    assert admit(headers).client_request_id == echoed


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("# ours\nkey-1\n\n  key-2  \n")
    assert read_api_keys(str(path)) == (b"key-1", b"key-2")
    assert read_api_keys(None) == ()
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        read_api_keys(str(path))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="api_key_file"):
        read_api_keys(str(path))

"""The finish rule, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.finish import finish_reason
from runtime.protocol import SamplingParams

EOS = (2, 7)


@pytest.mark.parametrize(
    ("token", "num_output", "num_tokens", "changes", "expected"),
    [
        (5, 1, 11, {}, None),
        (2, 1, 11, {}, "stop"),
        (7, 1, 11, {}, "stop"),
        (2, 1, 11, {"ignore_eos": True}, None),
        (9, 1, 11, {"stop_token_ids": (9,)}, "stop"),
        (2, 1, 11, {"stop_token_ids": (2,), "ignore_eos": True}, "stop"),
        (5, 4, 14, {}, "length"),
        (2, 4, 14, {}, "stop"),
        (5, 1, 20, {}, "length"),
        (5, 1, 19, {}, None),
        (5, 1, 11, {"max_tokens": 1}, "length"),
    ],
)
def test_rule(
    token: int, num_output: int, num_tokens: int, changes: dict[str, Any], expected: str | None
) -> None:
    params = SamplingParams(**{"max_tokens": 4, **changes})
    assert finish_reason(params, token, num_output, num_tokens, 20, EOS) == expected

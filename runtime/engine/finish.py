"""When a request is finished: one pure rule, the same wherever a token is sampled."""

from __future__ import annotations

from collections.abc import Collection

from runtime.protocol import FinishReason, SamplingParams


def finish_reason(
    params: SamplingParams,
    token: int,
    num_output: int,
    num_tokens: int,
    limit: int,
    eos_token_ids: Collection[int],
) -> FinishReason | None:
    """After `token` became output number `num_output` and token number `num_tokens` overall.

    `limit` is the context's. Stopping wins over length: a last token may be both.
    """
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        return "stop"
    if num_output >= params.max_tokens or num_tokens >= limit:
        return "length"
    return None

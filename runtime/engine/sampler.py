"""Chooses tokens from logits.

The draw for output position i depends on (seed, i) and that row of logits alone: no state, no
batch. So a first token sampled elsewhere and the rest sampled here equal one uninterrupted run.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from collections import Counter
from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from runtime.protocol import OutputToken, SamplingParams, TokenLogprob

_MASK64 = (1 << 64) - 1
_MOST = sys.float_info.max

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, _MOST),
    "top_p": (0, 1),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
    "presence_penalty": (-_MOST, _MOST),
    "frequency_penalty": (-_MOST, _MOST),
    "repetition_penalty": (sys.float_info.min, _MOST),
}


def unusable(params: SamplingParams) -> str:
    """Why no token can be chosen by these; empty: it can. The front allows less than this."""
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if not least <= value <= most:  # NaN is in no range
            return f"{name} is {value}, and must be in {least:g}..{most:g}"
    if params.logprobs is not None and params.logprobs < 0:
        return f"logprobs is {params.logprobs}, and must not be negative"
    return ""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for this position of this seed's stream; any integer is a seed."""
    counter = struct.pack("<QQ", seed & _MASK64, position)
    digest = hashlib.blake2b(counter, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def is_plain(params: SamplingParams) -> bool:
    """The most likely token, nothing else asked: such rows are sampled together."""
    return params.temperature == 0 and params.logprobs is None and not _penalized(params)


def sample(
    logits: Tensor, params: SamplingParams, prompt: Tokens[int], output: Tokens[int]
) -> OutputToken:
    """One row, float32 [vocab]; `output` are the tokens chosen so far. Does not change `logits`."""
    scores = penalize(logits, params, prompt, output) if _penalized(params) else logits
    if params.temperature == 0:
        token = int(scores.argmax())
    else:
        token = draw(probabilities(scores, params), uniform(params.seed, len(output)))
    return OutputToken(token, None if params.logprobs is None else _logprob(logits, token, params))


def _penalized(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def penalize(
    logits: Tensor, params: SamplingParams, prompt: Tokens[int], output: Tokens[int]
) -> Tensor:
    """Repetition counts prompt and output; presence and frequency count the output only."""
    scores = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(list({*prompt, *output}), dtype=torch.long, device=logits.device)
        values = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        tokens = torch.tensor(list(counts), dtype=torch.long, device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * times
    return scores


def probabilities(scores: Tensor, params: SamplingParams) -> Tensor:
    """Float64 [vocab]: temperature, then top_k, top_p and min_p; not renormalized."""
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    wide = (scores.double() - scores.max().double()) / params.temperature
    chances = wide.softmax(-1)
    if 0 < params.top_k < len(chances):
        least = chances.topk(params.top_k).values[-1]
        chances = torch.where(chances < least, 0.0, chances)
    if params.top_p < 1:
        ordered, indices = chances.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        # The most likely token always stays, even with top_p 0.
        drop = before >= max(params.top_p, 1e-12) * chances.sum()
        drop[0] = False
        chances[indices[drop]] = 0.0
    if params.min_p > 0:
        chances = torch.where(chances < params.min_p * chances.max(), 0.0, chances)
    return chances


def draw(chances: Tensor, at: float) -> int:
    """The token whose part of the total, in order of token ids, holds `at` in [0, 1)."""
    totals = chances.cumsum(0)
    goal = totals[-1] * at
    token = int(torch.searchsorted(totals, goal, right=True))
    if token < len(chances) and chances[token] > 0:
        return token
    # Rounding put the goal at the very end: the last possible token.
    return int(chances.nonzero()[-1])


def _logprob(logits: Tensor, token: int, params: SamplingParams) -> TokenLogprob:
    logprobs = logits.log_softmax(-1)
    top: tuple[tuple[int, float], ...] = ()
    if params.logprobs:
        best = logprobs.topk(min(params.logprobs, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)

"""From one HTTP request to what the core is asked: read, tokenize, check, lay out the choices.

Owns the limits of prompt and answer, and that a large body costs the event loop little. Sends
nothing; `completions` runs what this returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from runtime.errors import TOO_LONG, RequestError
from runtime.front.auth import Caller
from runtime.front.detokenizer import Detokenizer
from runtime.front.instance import Instance
from runtime.front.openai_types import ChatBody, CompletionBody, GenerationBody, parse_body
from runtime.front.responses import ChatFormat, Choice, CompletionFormat, Format, Head
from runtime.protocol import CoreReady, Generate, RequestId

DEADLINE_GRACE_S = 2.0
"""The core enforces the deadline and knows which leg was late; the front only backs it up."""
_THREAD_BYTES = 1 << 14
"""A larger body is understood off the loop, so that it does not delay the tokens of others."""

Prompts = list[tuple[int, ...]]
DoneT = TypeVar("DoneT")


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request that was understood."""

    caller: Caller
    body: GenerationBody
    format: Format
    choices: list[Choice]
    generates: list[Generate]
    """One per choice, in the same order."""
    stop_ids: frozenset[int]
    """A final token among these ended the output and is no part of its text."""
    arrived: float
    deadline: float


async def understand(http: web.Request, work: Callable[[bytes], DoneT]) -> DoneT:
    """What `work` makes of the body: parsed, tokenized. It may run on another thread."""
    raw = await _read_body(http)
    return work(raw) if len(raw) < _THREAD_BYTES else await asyncio.to_thread(work, raw)


def tokenized(
    instance: Instance, kind: type[ChatBody | CompletionBody], raw: bytes
) -> tuple[ChatBody | CompletionBody, Prompts]:
    """One body and its prompts' tokens. Raises RequestError."""
    body = parse_body(raw, kind)
    instance.require_model(body.model)
    tokenizer = instance.tokenizer
    if isinstance(body, ChatBody):
        return body, [tuple(tokenizer.encode_chat(body.messages))]
    return body, [tuple(tokenizer.encode(p)) if isinstance(p, str) else p for p in body.prompt]


def plan_job(
    instance: Instance,
    ready: CoreReady,
    caller: Caller,
    body: ChatBody | CompletionBody,
    prompts: Prompts,
    arrived: float,
) -> Job:
    """Raises RequestError for a prompt that cannot be served."""
    limits = [_token_limit(body, p, ready) for p in prompts]
    seed = body.base_seed()
    generates, choices = list[Generate](), list[Choice]()
    single = len(prompts) * body.n == 1
    for p, prompt in enumerate(prompts):
        for i in range(body.n):
            index = p * body.n + i
            generates.append(
                Generate(
                    id=caller.request_id if single else RequestId(f"{caller.request_id}-{index}"),
                    prompt=prompt,
                    params=body.sampling(max_tokens=limits[p], seed=seed + i),
                    prefill=caller.prefill,
                    deadline_s=caller.deadline_s,
                )
            )
            detokenizer = Detokenizer(instance.tokenizer, body.stop)
            choices.append(Choice(index, p, len(prompt), detokenizer))
    return Job(
        caller=caller,
        body=body,
        format=_format(instance, caller, body),
        choices=choices,
        generates=generates,
        stop_ids=frozenset(ready.eos_token_ids) | frozenset(body.stop_token_ids),
        arrived=arrived,
        deadline=arrived + caller.deadline_s + DEADLINE_GRACE_S,
    )


def _format(instance: Instance, caller: Caller, body: ChatBody | CompletionBody) -> Format:
    chat = isinstance(body, ChatBody)
    head = Head(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{caller.request_id}",
        created=int(time.time()),
        model=instance.config.model.name,
    )
    kind = ChatFormat if chat else CompletionFormat
    return kind(
        head,
        instance.tokenizer,
        logprobs=body.wanted_logprobs is not None,
        ids=body.return_token_ids,
    )


def _token_limit(body: GenerationBody, prompt: tuple[int, ...], ready: CoreReady) -> int:
    """How many tokens this prompt may get. Raises RequestError when it does not fit."""
    param, size, limit = (
        "messages" if isinstance(body, ChatBody) else "prompt",
        len(prompt),
        ready.max_model_len,
    )
    if not prompt:
        raise RequestError("the prompt has no tokens", param=param)
    if size >= limit:
        raise RequestError(
            f"the prompt has {size} tokens; the context of this model is {limit} tokens, "
            "answer included",
            param=param,
            code=TOO_LONG,
        )
    if max(prompt) >= ready.vocab_size:
        raise RequestError(
            f"token id {max(prompt)} is beyond the vocabulary of {ready.vocab_size}", param=param
        )
    wanted = body.wanted_tokens
    if wanted is not None and size + wanted > limit:
        raise RequestError(
            f"the prompt has {size} tokens and the answer may have {wanted}; "
            f"the context of this model is {limit} tokens",
            param="max_tokens",
            code=TOO_LONG,
        )
    return wanted or min(body.default_tokens or limit, limit - size)


async def _read_body(http: web.Request) -> bytes:
    """`http.read()` would keep the body as long as the request, a stream of minutes maybe.

    Raises HTTPRequestEntityTooLarge, before reading where the length is announced.
    """
    limit, size = http.client_max_size, http.content_length
    if size is not None and size > limit:
        raise web.HTTPRequestEntityTooLarge(limit, size)
    body = bytearray()
    while chunk := await http.content.readany():
        body += chunk
        if len(body) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, len(body))
    return bytes(body)

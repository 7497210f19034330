"""From one HTTP request to what the core is asked: tokenize, check, lay out the choices.

Owns the limits of prompt and answer. Sends nothing; `completions` runs what this returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from runtime.errors import TOO_LONG, RequestError
from runtime.front.auth import Caller
from runtime.front.detokenizer import Detokenizer
from runtime.front.instance import Instance
from runtime.front.openai_types import ChatBody, CompletionBody, GenerationBody
from runtime.front.responses import ChatFormat, Choice, CompletionFormat, Format, Head
from runtime.front.tokenizer import Tokenizer
from runtime.protocol import CoreReady, Generate, RequestId

DEADLINE_GRACE_S = 2.0
"""The core enforces the deadline and knows which leg was late; the front only backs it up."""
_THREAD_CHARS = 1 << 14
"""Longer texts are tokenized off the loop, so that they do not delay the tokens of others."""
_MESSAGE_CHARS = 64
"""A message costs the chat template about as much as this many characters."""

ArgT = TypeVar("ArgT")


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


async def plan_job(
    instance: Instance,
    ready: CoreReady,
    caller: Caller,
    body: ChatBody | CompletionBody,
    arrived: float,
) -> Job:
    """Raises RequestError for a prompt that cannot be served."""
    prompts = await _encode(instance, body)
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


async def _encode(instance: Instance, body: ChatBody | CompletionBody) -> list[tuple[int, ...]]:
    tokenizer = instance.tokenizer
    if isinstance(body, ChatBody):
        return [tuple(await encode_chat(tokenizer, body.messages))]
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompt = tuple(await encode_text(len(prompt), tokenizer.encode, prompt))
        prompts.append(prompt)
    return prompts


async def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation's tokens; many messages are work for the template, however short they are."""
    size = sum(len(m["content"]) + _MESSAGE_CHARS for m in messages)
    return await encode_text(size, tokenizer.encode_chat, messages)


async def encode_text(size: int, encode: Callable[[ArgT], list[int]], argument: ArgT) -> list[int]:
    """Tokenize `size` characters, beside the loop when there are many."""
    return encode(argument) if size < _THREAD_CHARS else await asyncio.to_thread(encode, argument)


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
    beyond = next((t for t in prompt if t >= ready.vocab_size), None)
    if beyond is not None:
        raise RequestError(
            f"token id {beyond} is beyond the vocabulary of {ready.vocab_size}", param=param
        )
    if size >= limit:
        raise RequestError(
            f"the prompt has {size} tokens; the context of this model is {limit} tokens, "
            "answer included",
            param=param,
            code=TOO_LONG,
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


async def read_body(http: web.Request) -> bytes:
    """Raises HTTPRequestEntityTooLarge, before reading where the length is announced."""
    size = http.content_length
    if size is not None and size > http.client_max_size:
        raise web.HTTPRequestEntityTooLarge(http.client_max_size, size)
    return await http.read()

"""The OpenAI request bodies that this server understands, validated once at this edge.

Owns every field's type, range and default. Knows no tokens and no engine; errors name the field.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from runtime.errors import RequestError
from runtime.front import content
from runtime.front.content import MAX_CHOICES, MAX_SMALL_BYTES
from runtime.front.parameters import strip_parameters
from runtime.protocol import SamplingParams

MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions; chat completions may fill the context."""

_SEED_MASK = (1 << 63) - 1
_CONTENT = frozenset({"messages", "prompt", "tokens"})
"""What `content` reads from its JSON. All else is small."""
_ERROR_CHARS = 300
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} stop strings; at most {MAX_STOPS} are allowed")
    if "" in stops:
        raise ValueError("has an empty stop string")
    return tuple(stops)


def _stop_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(t) is int and 0 <= t < 1 << 31 for t in value):
        raise ValueError("must be a list of token ids")
    return tuple(value)


Stops = Annotated[tuple[str, ...], BeforeValidator(_stops)]
StopIds = Annotated[tuple[int, ...], BeforeValidator(_stop_ids)]
# Checked whole by their readers: pydantic would build each of their elements again.
Text = Annotated[str, PlainValidator(content.string)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(content.token_ids)]
Prompts = Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(content.prompts)]
Messages = Annotated[list[dict[str, str]], PlainValidator(content.messages)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored."""


class GenerationBody(_Body):
    """What chat and plain completions have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stops = ()
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    ignore_eos: bool = False
    stop_token_ids: StopIds = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Each choice also carries its output as `token_ids`."""

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """When the client names no limit. None: as many as the context has room for."""
        return None

    def base_seed(self) -> int:
        """The client's seed, or a random one."""
        return (secrets.randbits(63) if self.seed is None else self.seed) & _SEED_MASK

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=seed & _SEED_MASK,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            logprobs=self.wanted_logprobs,
        )


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _few_choices(self) -> CompletionBody:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(f"prompt times n is over the limit of {MAX_CHOICES} choices")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def default_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS


class TokenizeBody(_Body):
    """POST /tokenize: either a text or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Of a text. A conversation's are the chat template's."""

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages is required, and not both")
        return self


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: TokenIds


BodyT = TypeVar("BodyT", bound=_Body)
Kind = Literal["chat", "completion"]


def parse_body(raw: bytes, kind: type[BodyT]) -> BodyT:
    """Raises RequestError with the first thing that is wrong."""
    try:
        fields = strip_parameters(_fields.decode(raw), kind.model_fields.keys())
        return kind.model_validate({name: _value(name, json) for name, json in fields.items()})
    except ValidationError as e:
        raise _request_error(e) from e
    except msgspec.ValidationError as e:
        raise RequestError("the body must be a JSON object", code="invalid_json") from e
    except (msgspec.MsgspecError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e


def _value(name: str, json: msgspec.Raw) -> object:
    if name in _CONTENT:
        return json
    if len(json) > MAX_SMALL_BYTES:
        raise RequestError(
            f"{name} is over the limit of {MAX_SMALL_BYTES} bytes", param=name, code="invalid_value"
        )
    return content.small(json)


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"])[:_ERROR_CHARS]
    cause = first.get("ctx", {}).get("error")
    message = (str(cause) if isinstance(cause, ValueError) else first["msg"])[:_ERROR_CHARS]
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_parameter")
    if not param:  # a rule over several fields; its message begins with the field's name
        return RequestError(message, param=message.split(" ", 1)[0], code="invalid_value")
    joint = "" if message.startswith("[") else " " if isinstance(cause, ValueError) else ": "
    return RequestError(f"{param}{joint}{message}", param=param, code="invalid_value")

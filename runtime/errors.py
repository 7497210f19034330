"""The runtime's exceptions, one tree. Foreign exceptions are translated once, at the edge that
meets them.

RuntimeFailure
├── ConfigError          the JSON config, the token file or the model folder is wrong: start fails
│   └── ModelError       the model's files are missing, truncated or of an unsupported kind
├── RankError            a rank of a tensor-parallel instance is lost: the whole instance ends
├── RequestError         the client's fault: answered 400 (404 for an unknown model)
├── CapacityError        no room now, try again: answered 503 with Retry-After
│   └── NoPairError      the router knows nothing healthy that serves the model
├── LegError             one leg of a prefill-decode pair failed: answered 502, or 504 on a deadline
└── TransferError        a transport could not move bytes; becomes a LegError at the hand-over
"""

from __future__ import annotations

from typing import ClassVar, Literal

Leg = Literal["router", "prefill", "decode", "transfer"]
LEG_CLIENT = "client"
"""In an error event: the stream ended because its client did not read. No leg of ours failed."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt that can never fit, or not with its answer."""


class RuntimeFailure(Exception):
    """Base. `hint` says what to do about it, in one line, or is empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self} ({self.hint})" if self.hint else str(self)


class ConfigError(RuntimeFailure):
    """The configuration of this process cannot work; raised before it serves anything."""


class ModelError(ConfigError):
    """The model's files are missing, truncated, or of a kind this runtime does not serve."""


class RankError(RuntimeFailure):
    """The ranks of an instance can no longer compute together."""


class RequestError(RuntimeFailure):
    """The client asked for something impossible. `param` names the field, `status` is 400 or
    404."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class CapacityError(RuntimeFailure):
    """No room for the request now. `retry_after_s` goes into the Retry-After header."""

    type: ClassVar = "overloaded_error"
    code: ClassVar = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoPairError(CapacityError):
    """Nothing healthy serves this model now."""

    type = "service_unavailable"
    code = "no_healthy_pair"


class LegError(RuntimeFailure):
    """One leg failed. `leg` and `instance` name it; `timeout` tells a deadline from a failure."""

    def __init__(
        self, message: str, *, leg: Leg, instance: str = "", timeout: bool = False
    ) -> None:
        super().__init__(message)
        self.leg = leg
        self.instance = instance
        self.timeout = timeout

    @property
    def status(self) -> int:
        """The HTTP status of this failure: 504 when a deadline passed, else 502."""
        return 504 if self.timeout else 502


class TransferError(RuntimeFailure):
    """Bytes could not be moved. Never raised for bytes that arrived, never swallowed for ones that
    did not."""

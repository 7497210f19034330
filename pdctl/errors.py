"""pdctl's exceptions, one tree, and its exit codes. Foreign ones are translated once, at the edge.

PdctlError             1  something failed; `hint` says what to do about it
├── UsageError         2  the command line asks for something impossible
│   └── TopologyError  2  the topology file is wrong: all its problems at once
├── ModelNotFound      2  neither a known alias, nor a path, nor reachable
├── StateError         1  a run directory cannot be used, or its records contradict each other
├── HostCommandError   1  a command on a host failed
├── ServiceFailed      1  a service exited or did not become ready; has its last log lines
├── Locked             4  someone else is changing this deployment
├── HostUnreachable    5  a host cannot be reached or logged in to
└── HostsFailed           several hosts or services failed, or one of several: all errors at once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 3
"""`status` of a deployment that is not whole; `plan` with something to do."""
EXIT_LOCKED = 4
EXIT_UNREACHABLE = 5
EXIT_INTERRUPTED = 130


class PdctlError(Exception):
    """Base. The message is one line; `hint` says what to do, in one line, or is empty."""

    exit_code: int = EXIT_FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(PdctlError):
    """What was asked for cannot be done as asked."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a topology file. `line` counts from 1; 0: the file as a whole."""

    file: str
    line: int
    field: str
    """Dotted, with list positions: `decode[0].cpu_buffer`; empty: the file as a whole."""
    what: str
    right: str = ""
    """What would be right."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        field = f"{self.field}: " if self.field else ""
        right = f"; {self.right}" if self.right else ""
        return f"{where}: {field}{self.what}{right}"


class TopologyError(UsageError):
    """Every problem of a topology, in file order; the message is one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.field)))
        super().__init__("\n".join(str(p) for p in self.problems))


class ModelNotFound(PdctlError):
    """No such model on this machine, and nothing that could fetch it."""

    exit_code = EXIT_USAGE


class StateError(PdctlError):
    """A run directory cannot be read or written, or its records contradict each other."""


class HostCommandError(PdctlError):
    """A command ran on a host and failed."""

    def __init__(
        self, message: str, *, host: str, returncode: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.host = host
        self.returncode = returncode


class ServiceFailed(PdctlError):
    """A service exited, or was not ready in time."""

    def __init__(
        self,
        message: str,
        *,
        service: str,
        host: str,
        log_tail: Sequence[str] = (),
        exit_status: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.service = service
        self.host = host
        self.log_tail = tuple(log_tail)
        self.exit_status = exit_status
        """Exit code of the process, negative for a signal; None: it still runs, or is not known."""


def failed_services(error: PdctlError) -> list[ServiceFailed]:
    """The services that failed, if that is what went wrong."""
    errors = error.errors if isinstance(error, HostsFailed) else (error,)
    return [e for e in errors if isinstance(e, ServiceFailed)]


class Locked(PdctlError):
    """Someone else holds the deployment's lock; `hint` names them."""

    exit_code = EXIT_LOCKED


class HostUnreachable(PdctlError):
    """A host cannot be reached."""

    exit_code = EXIT_UNREACHABLE

    def __init__(self, message: str, *, host: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.host = host


class HostsFailed(PdctlError):
    """What was tried on several hosts at once failed on some: a line for each, and the count."""

    def __init__(self, errors: Sequence[PdctlError], ok: int) -> None:
        self.errors = tuple(errors)
        hints = {e.hint for e in errors}
        same = len(hints) == 1
        lines = [str(e) if same or not e.hint else f"{e}; {e.hint}" for e in errors]
        super().__init__(
            "\n".join([*dict.fromkeys(lines), f"{ok} ok, {len(errors)} failed"]),
            hint=hints.pop() if same else "",
        )
        codes = {e.exit_code for e in errors}
        self.exit_code = (
            codes.pop()
            if len(codes) == 1
            else max(codes & {EXIT_UNREACHABLE, EXIT_FAILED}, default=EXIT_FAILED)
        )

"""Wait until services really answer, and stop waiting the moment one cannot any more.

Asks `GET /ready` of every service and looks at the processes in between. Starts and stops nothing.
The deadline is the caller's.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pdctl.errors import HostsFailed, PdctlError, ServiceFailed
from pdctl.records import Identity, ServiceRecord
from pdctl.services import ServiceSpec

POLL_S = 0.1
_LOOK_SHARE = 3
SLOW_POLL_S = 0.3
"""After a few seconds: every look costs the CPU on which the model is being loaded."""
HTTP_TIMEOUT_S = 2.0
_REASONS = ("waiting_for", "message")
_LAST_WORDS = re.compile(r"(router|worker|core|rank \d+): ")
"""How the line begins in which a process of the runtime says why it cannot start."""
# A proxy from the environment has no business between us and our own services.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reason: str
    """Why not; empty when ready."""
    reachable: bool


Observe = Callable[[], Mapping[str, ServiceRecord]]
"""The services' records now, by name."""
Tail = Callable[[str], Sequence[str]]
"""The last log lines of a service."""
OnReady = Callable[[ServiceSpec, float], None]
"""A service answers, so many seconds after the wait began."""
OnWait = Callable[[ServiceSpec, str, float], None]
"""What a service is waiting for, and since how many seconds."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Where the wait looks, and whom it tells."""

    observe: Observe
    tail: Tail
    on_ready: OnReady
    on_wait: OnWait


def wait_ready(services: Sequence[ServiceSpec], watcher: Watcher, deadline: float) -> None:
    """Return when all are ready, each decode service with a path to each prefill service of these.

    `deadline` is on the monotonic clock.
    Raises ServiceFailed, or for several HostsFailed of these: for all that have ended, also
    those that were ready before, or for all that are not ready at the deadline.
    """
    begun = time.monotonic()
    waiting = {s.name: s for s in services}
    prefills = [s.name for s in services if s.role == "prefill"]
    reasons = dict.fromkeys(waiting, "not asked yet")
    asked: dict[str, Future[Readiness]] = {}
    pool = ThreadPoolExecutor(max_workers=max(1, min(32, len(services))))
    try:
        looked = cost = 0.0
        while waiting:
            now = time.monotonic()
            # Also while a /ready hangs. At many hosts a look is dear: a quarter of the time for it.
            if now - looked >= _LOOK_SHARE * cost:
                records = living(services, watcher)
                looked, cost = time.monotonic(), time.monotonic() - now
            for name in [n for n, f in asked.items() if f.done()]:
                answer = asked.pop(name).result()
                reasons[name] = answer.reason
                if answer.ready:
                    watcher.on_ready(waiting.pop(name), time.monotonic() - begun)
                else:
                    watcher.on_wait(waiting[name], answer.reason, time.monotonic() - begun)
            for name in waiting.keys() - asked.keys():
                service, process = waiting[name], records[name].service
                asked[name] = pool.submit(probe_ready, service, process, prefills)
            if waiting and time.monotonic() >= deadline:
                seconds = time.monotonic() - begun
                late = [_late(s, reasons[s.name], seconds, watcher) for s in waiting.values()]
                raise _all_of(late, len(services))
            if waiting:
                slow = time.monotonic() - begun > 3.0
                time.sleep(
                    max(0.0, min(SLOW_POLL_S if slow else POLL_S, deadline - time.monotonic()))
                )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _late(service: ServiceSpec, reason: str, seconds: float, watcher: Watcher) -> ServiceFailed:
    return ServiceFailed(
        f"{service.name} on {service.host} is not ready after {seconds:.0f} s: {reason}",
        service=service.name,
        host=service.host,
        log_tail=watcher.tail(service.name),
        hint="give it more time with --wait-timeout, or read its log",
    )


def living(services: Sequence[ServiceSpec], watcher: Watcher) -> Mapping[str, ServiceRecord]:
    """Their records. Raises as `wait_ready` for those that have ended, with their last lines."""
    records = watcher.observe()
    ended: list[ServiceFailed] = []
    for service in services:
        record = records.get(service.name)
        if record is None or record.ended:
            how = record.how_it_ended() if record else "its directory is gone"
            tail = watcher.tail(service.name)
            why = next((f": {line}" for line in reversed(tail) if _LAST_WORDS.match(line)), "")
            failed = ServiceFailed(
                f"{service.name} on {service.host}: {how}{why}",
                service=service.name,
                host=service.host,
                log_tail=tail,
                exit_status=record.exit.status if record and record.exit else None,
            )
            ended.append(failed)
    if ended:
        raise _all_of(ended, len(services))
    return records


def _all_of(failed: Sequence[ServiceFailed], of: int) -> PdctlError:
    return failed[0] if len(failed) == 1 else HostsFailed(failed, of - len(failed))


def probe_ready(
    service: ServiceSpec, process: Identity | None, prefills: Sequence[str]
) -> Readiness:
    """One look. A decode service is ready when it has a tested path to each of `prefills`.

    The answer must come from the service's own process: a stranger may have taken its port.
    """
    status, body = get_json(f"{service.url}/ready")
    if status is None:
        return Readiness(False, "no answer yet", reachable=False)
    if process is None or body.get("pid") != process.pid:
        who = f"pid {body['pid']}" if "pid" in body else "a stranger"
        reason = f"{service.url} is answered by {who}, not by this service"
        return Readiness(False, reason, reachable=True)
    if status != 200:
        return Readiness(False, _reason(body) or f"HTTP {status}", reachable=True)
    paths = body.get("peers") or {}
    expected = prefills if service.role == "decode" else ()
    missing = [p for p in expected if not _path(paths.get(p))]
    if missing:
        return Readiness(False, f"no path to {', '.join(missing)}", reachable=True)
    return Readiness(True, "", reachable=True)


def _path(peer: Any) -> Any:
    return peer.get("path") if isinstance(peer, dict) else peer


def _reason(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    found = error if isinstance(error, dict) else body
    if isinstance(found.get("reasons"), list):
        return "; ".join(map(str, found["reasons"]))
    for key in _REASONS:
        if isinstance(found.get(key), str):
            return str(found[key])
    return ""


def get_json(url: str, *, token: str = "") -> tuple[int | None, dict[str, Any]]:
    """Status and JSON object. (None, {}) without an answer; {} for a body that is no object."""
    return _json_of(_ask(url, None, token))


def _json_of(answer: tuple[int | None, str]) -> tuple[int | None, dict[str, Any]]:
    status, text = answer
    try:
        body = json.loads(text)
    except ValueError:
        body = {}
    return status, body if isinstance(body, dict) else {}


def post_json(
    url: str, body: Mapping[str, Any], *, token: str, timeout_s: float = HTTP_TIMEOUT_S
) -> tuple[int | None, dict[str, Any]]:
    """As `get_json`."""
    return _json_of(_ask(url, json.dumps(body).encode(), token, timeout_s))


def get(url: str, *, token: str = "") -> tuple[int | None, str]:
    return _ask(url, None, token)


def _ask(
    url: str, data: bytes | None, token: str, timeout_s: float = HTTP_TIMEOUT_S
) -> tuple[int | None, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if data is not None:
        headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url, data, headers)
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError):
        return None, ""

"""Start, stop and purge services of this host. Every call is made with the deployment's lock held.

Each may be killed at any moment: the next finds what was begun by the records, the service's lock
and the marks.

A start loads little, for a host may run very many: what few need is imported where it is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from . import asker, ports
from .deployment import forget_when_empty
from .files import Refused, private_dir, write_json, write_private
from .procs import MARKER, Proc, marked, send
from .service import OWN_FILES, Service, service_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

REPORT_TIMEOUT_S = 20.0
SWEEP_TIMEOUT_S = 10.0
POLL_S = 0.02
INHERITED = re.compile(
    r"(HOME|PATH|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHONPATH)\Z"
)
"""What a service gets of the environment around the shim; all else is named in the topology."""


# ---- start ---------------------------------------------------------------------------------------


def start(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Start one service; returns when its identity is recorded. Not `started`: it already runs."""
    wanted = request["spec"]
    service = Service(base, wanted["deployment"], wanted["name"])
    fresh = _make_dirs(base, service)

    def prepare() -> None:
        try:
            _write_files(service, request)
        except (OSError, Refused):
            if fresh:
                with contextlib.suppress(OSError):
                    _remove(service.dir)
                forget_when_empty(base, service.deployment)
            raise

    return _start(service, request["hash"], prepare)


def again(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Start a service as it was started last: its spec, files, token and environment are there."""
    service = Service(base, request["deployment"], request["service"])
    if not (service.spec and os.path.exists(service.path("env"))):
        raise Refused("start", f"{service.name}: it was never started", "`pdctl up` starts it")

    def prepare() -> None:
        _clear_records(service)
        _record_intent(service, request)

    return _start(service, service.hash, prepare)


def _start(service: Service, wanted: str, prepare: Callable[[], None]) -> dict[str, Any]:
    lock = os.open(service.path("lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        # Held by a supervisor that is ending, or whose `start` was killed before it saw the result.
        held = not _lock_within(lock, REPORT_TIMEOUT_S, service)
        if held or "service" in service.live():
            return _already(service, wanted)
        _sweep([service], time.monotonic() + SWEEP_TIMEOUT_S)
        service.unlink_segments()
        prepare()
        _launch(service, lock)
    finally:
        os.close(lock)
    return {"started": True, "service": service.describe(None)}


def _make_dirs(base: str, service: Service) -> bool:
    os.makedirs(base, 0o700, exist_ok=True)
    private_dir(os.path.dirname(service.dir))
    if os.path.islink(service.dir):  # it would lead our files elsewhere, and their removal
        raise Refused("state", f"{service.dir} is a symbolic link", "remove it")
    return private_dir(service.dir)


def _lock_within(lock: int, seconds: float, service: Service) -> bool:
    """Take the service's lock. False as soon as another supervisor's service is seen to run."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if "service" in service.live() or time.monotonic() >= deadline:
                return False
        time.sleep(POLL_S)


def _already(service: Service, wanted: str) -> dict[str, Any]:
    service = Service(
        os.path.dirname(os.path.dirname(service.dir)), service.deployment, service.name
    )
    if "service" not in service.live():
        raise Refused("start", f"{service.name}: an earlier start or stop of it still hangs")
    if service.hash != wanted:
        raise Refused("start", f"{service.name} runs with another configuration")
    return {"started": False, "service": service.describe(None)}


def _write_files(service: Service, request: dict[str, Any]) -> None:
    spec = request["spec"]
    _clear_records(service)
    service.spec, service.hash = spec, request["hash"]
    _record_intent(service, request)
    files = {n: text.replace("{dir}", service.dir) for n, text in spec.get("files", {}).items()}
    for name, text in {**files, **request.get("secret_files", {})}.items():
        if os.path.basename(name) != name or name.startswith(".") or name in OWN_FILES:
            raise Refused("request", f"{service.name}: {name!r} cannot be the name of a file")
        write_private(service.path(name), text)
    if request.get("token"):
        write_private(service.path("token"), request["token"] + "\n")
    env = {**inherited(), **spec.get("env", {}), **request.get("secret_env", {})}
    # SPT_NOENV: a service that retitles itself with setproctitle leaves its environment in place.
    env.update({MARKER: service.dir, "SPT_NOENV": "1"})
    write_json(service.path("env"), env)


def _clear_records(service: Service) -> None:
    """Of its last life. One earlier log is kept."""
    for old in ("identity.json", "exit.json", "family.json", "stop.json"):
        if os.path.exists(service.path(old)):
            os.unlink(service.path(old))
    if os.path.exists(service.path("out.log")):
        os.replace(service.path("out.log"), service.path("out.log.1"))


def _record_intent(service: Service, request: dict[str, Any]) -> None:
    service.intent = {"at": time.time(), "by": request.get("by", {})}
    record = {"spec": service.spec, "hash": service.hash, "intent": service.intent}
    write_json(service.path("spec.json"), record)


def inherited() -> dict[str, str]:
    """Of our own environment, what every process that we start may have."""
    return {k: v for k, v in os.environ.items() if INHERITED.match(k)}


def _launch(service: Service, lock: int) -> None:
    log = os.open(service.path("out.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    result, report = os.pipe()
    shim = [sys.executable, "-I", "-S", sys.argv[0]]
    kept = (lock, report, *ports.handles(service.spec.get("ports", {}).values()))
    argv = [*shim, "supervise", service.dir, *map(str, kept)]
    env = {**inherited(), MARKER: service.dir}
    if service.in_systemd:
        from . import systemd

        argv, env = systemd.scope_argv(service, argv), {**env, **systemd.environment()}
    try:
        supervisor = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=env,
            pass_fds=kept,
            start_new_session=True,
        )
    finally:
        os.close(log)
        os.close(report)
    try:
        ready, _, _ = select.select([result], [], [], REPORT_TIMEOUT_S)
        answer = os.read(result, 8192) if ready else b""
    finally:
        os.close(result)
    error = json.loads(answer)["error"] if answer else _last_words(service)
    if error:
        if not answer:
            supervisor.kill()
        supervisor.wait()
        _sweep([service], time.monotonic() + SWEEP_TIMEOUT_S)
        raise Refused("start", f"{service.name}: {error}")


def _last_words(service: Service) -> str:
    """Of a supervisor that did not answer, or of systemd-run in front of it."""
    from .logs import last_lines

    said = last_lines(service.path("out.log"), os.path.getsize(service.path("out.log")), 1)
    return f"its supervisor did not answer{''.join(f': {line}' for line in said)}"


# ---- stop ----------------------------------------------------------------------------------------


def stop(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Stop services (none named: all), then look whether anything of them is left.

    When the one who asks is gone it waits no longer, so that the next finds no lock: what was asked
    to end does so under its supervisor.
    """
    deployment, grace = request["deployment"], float(request["timeout"])
    marks = marked(os.path.join(base, deployment))
    names = request.get("services")
    if names is None:
        names = {*service_names(base, deployment), *map(os.path.basename, marks)}
    services = [Service(base, deployment, n) for n in sorted(names)]
    reports: dict[str, dict[str, Any]] = {
        s.name: {"service": s.name, "was": s.state(), "pids": []} for s in services
    }
    for s in services:
        reports[s.name]["pids"] = _terminate(s, marks, grace)
    # A live supervisor does it and needs a moment beyond the grace; without one we kill ourselves.
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline + 3.0:
        alive = [s for s in services if s.live()]
        if not alive or (
            time.monotonic() >= deadline and not any("shim" in s.live() for s in alive)
        ):
            break
        if asker.gone():
            raise Refused("stop", "whoever asked for it is gone")
        time.sleep(POLL_S)
    swept = _sweep(services, time.monotonic() + SWEEP_TIMEOUT_S)
    marks = marked(os.path.join(base, deployment))
    for s in services:
        report = reports[s.name]
        left = sorted(s.kin(marks))
        report["killed"] = sorted(swept.get(s.name, ()))
        report["left"] = left
        report["segments"] = [] if left else s.unlink_segments()
        report["ports"] = [
            port
            for number in s.spec.get("ports", {}).values()
            for port in [ports.port(base, int(number), s.spec.get("bind") or "127.0.0.1")]
            if not port["free"]
        ]
    return {"services": list(reports.values())}


def _terminate(service: Service, marks: dict[str, list[Proc]], grace: float) -> list[int]:
    """Ask politely: the supervisor, or the service where that is gone. Returns what lived."""
    if (
        service.held() and not service.live()
    ):  # a supervisor on its way; its identity appears in a moment
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and service.held() and not service.live():
            time.sleep(POLL_S)
    pids = sorted(service.kin(marks))
    live = service.live()
    if "shim" in live:
        with contextlib.suppress(OSError):  # a full disk: the supervisor's own default applies
            write_json(service.path("stop.json"), {"grace_s": grace})
        send(live["shim"].pid, live["shim"].ticks, signal.SIGTERM)
    elif "service" in live:
        send(live["service"].pid, live["service"].ticks, signal.SIGTERM)
    return pids


def _sweep(services: list[Service], deadline: float) -> dict[str, set[int]]:
    """KILL all that is verified to belong to the services, until there is nothing."""
    for service in (s for s in services if s.in_systemd):
        from . import systemd

        systemd.end(service)
    killed: dict[str, set[int]] = {}
    while services:
        marks = marked(os.path.dirname(services[0].dir))
        kin = [(s.name, p) for s in services for p in s.kin(marks).values()]
        if not kin or time.monotonic() >= deadline:
            break
        for name, p in kin:
            if send(p.pid, p.ticks, signal.SIGKILL):
                killed.setdefault(name, set()).add(p.pid)
        time.sleep(POLL_S)
    return killed


# ---- after the end -------------------------------------------------------------------------------


def purge(base: str, request: dict[str, Any]) -> dict[str, Any]:
    """Forget services that are gone. `.last` keeps their logs and exit records, one generation."""
    deployment = request["deployment"]
    names = request.get("services")
    everything = names is None
    if names is None:
        names = service_names(base, deployment)
    services = [Service(base, deployment, n) for n in names]
    marks = marked(os.path.join(base, deployment))
    for s in services:
        if s.kin(marks):
            raise Refused("stop", f"{s.name}: still has processes {sorted(s.kin(marks))}")
    if services:
        with contextlib.suppress(OSError):  # a full disk must not keep what is to be removed
            _keep_last(base, deployment, services, forget=everything)
    for s in services:
        if os.path.isdir(s.dir) and not os.path.islink(s.dir):
            _remove(s.dir)
    forget_when_empty(base, deployment)
    return {"purged": sorted(names)}


def _remove(folder: str) -> None:
    """The lock last: by it a removal that was killed is found and goes on, with the secrets."""
    import shutil

    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != "lock":
            os.unlink(entry.path)
    shutil.rmtree(folder)


def _keep_last(base: str, deployment: str, services: list[Service], *, forget: bool) -> None:
    import shutil

    private_dir(os.path.join(base, ".last"))
    kept = os.path.join(base, ".last", deployment)
    if forget:
        shutil.rmtree(kept, ignore_errors=True)
    private_dir(kept)
    for s in services:
        for name in ("out.log", "exit.json"):
            if os.path.exists(s.path(name)):
                os.replace(s.path(name), os.path.join(kept, f"{s.name}.{name}"))

"""The parent of one service. Outlives pdctl; records the exit; leaves no descendant behind.

A child subreaper: whatever the service starts stays below it, double-forked, setsid'ed and renamed
children too. The service's program runs only after its identity is recorded, so no crash can leave
a process without a record. On SIGTERM: asks the service's group, waits the grace, kills the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

from . import procs
from .files import read_json, write_json
from .service import Service

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

LOG_CAP_BYTES = 32 << 20
TICK_S = 1.0
KILL_TIMEOUT_S = 10.0
GRACE_S = 10.0
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    def __init__(self, directory: str, lock: int, report: int, *claims: int) -> None:
        """`claims`: of the service's ports (see `ports`). Ours alone, as the lock: until we die."""
        deployment_dir, name = os.path.split(directory)
        base, deployment = os.path.split(deployment_dir)
        self.service = Service(base, deployment, name)
        self.report = report
        for handle in (lock, report, *claims):
            os.set_inheritable(handle, False)
        self.pid = 0
        self.started = time.monotonic()
        self.asked = False
        self.kill_at: float | None = None
        self.members: list[list[int]] = []

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for ignored in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(ignored, signal.SIG_IGN)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            self.tell(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")
            return
        error = self.spawn()
        if error:
            self.record_exit(None, error)
        self.tell(error)
        if error:
            return
        status = self.watch()
        self.record_exit(status)
        self.kill_family()

    def tell(self, error: str) -> None:
        """Answer the `start` that waits for us; it may be gone."""
        with contextlib.suppress(OSError):
            os.write(self.report, json.dumps({"error": error}).encode())
        os.close(self.report)

    def spawn(self) -> str:
        """Start the service. Returns what went wrong, or an empty string."""
        known = {"boot_id": procs.boot_id(), "shim": procs.identity(os.getpid())}
        write_json(self.service.path("identity.json"), known)
        go, let_go = os.pipe()
        failure, tell_failure = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(let_go)
            self.become_service(go, tell_failure)
        os.close(go)
        os.close(tell_failure)
        service = procs.identity(self.pid)
        write_json(self.service.path("identity.json"), {**known, "service": service})
        os.write(let_go, b"g")
        os.close(let_go)
        error = os.read(failure, 4096).decode(errors="replace")  # empty: exec closed it
        os.close(failure)
        if error:
            os.waitpid(self.pid, 0)
        return error

    def become_service(self, go: int, failure: int) -> NoReturn:
        argv = [a.replace("{dir}", self.service.dir) for a in self.service.spec["argv"]]
        try:
            os.setsid()
            if os.read(go, 1) != b"g":
                os._exit(127)  # the supervisor died before it recorded us
            for changed in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(changed, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.chdir(self.service.dir)
            os.execvpe(argv[0], argv, read_json(self.service.path("env")))
        except (OSError, ValueError) as e:
            what = e.strerror if isinstance(e, OSError) else str(e)
            os.write(failure, f"cannot run {argv[0]}: {what}".encode())
        finally:
            os._exit(127)

    def watch(self) -> int:
        """Wait for the service's end, reaping what else ends; its wait status."""
        while True:
            wait = TICK_S if self.kill_at is None else self.kill_at - time.monotonic()
            info = signal.sigtimedwait(_SIGNALS, max(0.0, min(TICK_S, wait)))
            if info and info.si_signo != signal.SIGCHLD:
                self.ask_to_stop()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                # Ours and not reaped: the pid cannot be another's.
                os.kill(self.pid, signal.SIGKILL)
                self.kill_at = time.monotonic() + TICK_S  # a driver may keep it for a while
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self.pid:
                    return status
                if pid == 0:
                    break
            self.rotate_log()
            self.remember_family()

    def ask_to_stop(self) -> None:
        grace = read_json(self.service.path("stop.json")).get("grace_s")
        self.kill_at = time.monotonic() + (grace if isinstance(grace, (int, float)) else GRACE_S)
        if self.asked:
            return
        self.asked = True
        if os.getpgid(self.pid) == self.pid:
            os.killpg(self.pid, signal.SIGTERM)
        else:
            os.kill(self.pid, signal.SIGTERM)

    def record_exit(self, status: int | None, error: str = "") -> None:
        code = sig = None
        if status is not None:
            sig = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        record = {
            "code": 127 if error else code,
            "signal": sig,
            "error": error,
            "at": time.time(),
            "ran_s": round(time.monotonic() - self.started, 3),
            "asked": self.asked,
        }
        try:
            write_json(self.service.path("exit.json"), record)
        except OSError as e:  # a full disk must not keep the family alive
            print(f"pdctl: cannot record the exit {record}: {e}", file=sys.stderr)

    def kill_family(self) -> None:
        """KILL until nothing is left below us. What was orphaned meanwhile has become our child."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < deadline:
            for p in procs.own_family():
                procs.send(p.pid, p.ticks, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.01)

    def remember_family(self) -> None:
        below = procs.own_children()
        if below is None:
            below = procs.own_family()
        members = sorted([p.pid, p.ticks] for p in below)
        if members != self.members:
            try:
                write_json(self.service.path("family.json"), {"members": members})
                self.members = members
            except OSError:
                pass  # a full disk; tried again at the next tick

    def rotate_log(self) -> None:
        """Keep out.log under its cap: copy and truncate, as the service appends to it."""
        log = self.service.path("out.log")
        try:
            if os.path.getsize(log) > LOG_CAP_BYTES:
                import shutil  # most never get there

                shutil.copyfile(log, log + ".1")
                os.chmod(log + ".1", 0o600)
                os.truncate(log, 0)
        except FileNotFoundError:
            pass  # somebody removed the directory; the service goes on
        except OSError as e:
            print(f"pdctl: cannot rotate the log: {e}", file=sys.stderr)

"""Machines for tests: Linux namespaces on this one, each with a real sshd, beside a laptop's.

A machine has its own network, processes, mounts, /dev/shm, host name, boot id, home and keys; its
disk is a directory. The laptop is a network namespace with a bridge on which pdctl runs. All of
it is made of child processes that die with the test's, and is taken down by their pids.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervision import STUB, eventually

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
TOOLS = ("ip", "nsenter", "ssh", "ssh-keygen", "setpriv", "unshare")
LAN = "10.77"
# Runs as process 1 of a machine. It never ends by itself and reaps what is left to it.
INIT = """
set -e
mount -t tmpfs -o mode=1777,size="$4m" none /dev/shm
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
hostname "$2"
ip link set lo up
mkdir -p /run/sshd
"$3" -f "$1/sshd_config" -E "$1/sshd.log"
: > "$1/up"
while :; do sleep 1000 & wait; done
"""


def why_not() -> str:
    """What is missing for machines of this kind; empty when nothing is."""
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [t for t in TOOLS if shutil.which(t) is None]
    missing += [] if os.path.exists(SSHD) else ["sshd"]
    if missing:
        return f"needs {', '.join(missing)}: install openssh-server, openssh-client and iproute2"
    make = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    namespaces = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork"]
    made = subprocess.run([*namespaces, "sh", "-c", make], capture_output=True, text=True)
    return f"no namespaces here: {made.stderr.strip()}" if made.returncode else ""


@dataclass(frozen=True)
class Completed:
    """A command that has ended."""

    rc: int
    out: str
    err: str
    seconds: float


def _dies_with_us(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    argv = ["setpriv", "--pdeathsig", "KILL", *argv]
    return subprocess.Popen(argv, stdin=quiet, stdout=quiet, start_new_session=True)


def _ip(pid: int, *commands: str) -> None:
    """Run `ip` commands in the network of a process."""
    enter = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
    subprocess.run(enter, input="\n".join(commands) + "\n", text=True, check=True)


@dataclass
class Machine:
    """A host. `address` is in the test network; `name` is its name in the ssh configuration."""

    name: str
    address: str
    disk: Path
    sshd_options: Mapping[str, str] = field(default_factory=dict)
    shm_mib: int = 64
    _outer: subprocess.Popen[bytes] | None = None
    _init: int = 0

    @property
    def home(self) -> Path:
        return self.disk / "home"

    @property
    def base(self) -> Path:
        """PDCTL_HOME there: the default below its HOME."""
        return self.home / ".pdctl"

    @property
    def address6(self) -> str:
        high, low = map(int, self.address.split(".")[2:])
        return f"fd77::{high << 8 | low:x}"

    @property
    def mac(self) -> str:
        """Its own, so that it is the same machine to others after a reboot."""
        return "02:77:" + ":".join(f"{int(n):02x}" for n in self.address.split("."))

    # ---- life ----

    def prepare(self, client_key: str) -> None:
        self.home.mkdir(parents=True, mode=0o700)
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.disk / "host_key")]
        subprocess.run(keygen, check=True)
        (self.disk / "authorized_keys").write_text(client_key)
        options = {
            "HostKey": f"{self.disk}/host_key",
            "AuthorizedKeysFile": f"{self.disk}/authorized_keys",
            "PidFile": f"{self.disk}/sshd.pid",
            "SetEnv": f"HOME={self.home}",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "Subsystem": "sftp internal-sftp",
            **self.sshd_options,
        }
        text = "".join(f"{key} {value}\n" for key, value in options.items())
        (self.disk / "sshd_config").write_text(text)

    def boot(self) -> None:
        """Start it, with a new boot id. Its network is attached by the cluster."""
        (self.disk / "boot_id").write_text(f"{uuid.uuid4()}\n")
        (self.disk / "up").unlink(missing_ok=True)
        namespaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc"]
        init = ["sh", "-c", INIT, "init", str(self.disk), self.name, SSHD, str(self.shm_mib)]
        self._outer = _dies_with_us(["unshare", *namespaces, "--kill-child", *init])
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self._init = int(eventually(lambda: children.read_text().split()[:1], 30)[0])

    def await_up(self) -> None:
        eventually(lambda: (self.disk / "up").exists(), 30)

    def kill(self) -> None:
        """Process 1 dies, and with it all others there. Does not wait for it."""
        if self._outer is not None:
            self._outer.kill()

    def halt(self) -> None:
        """As if the power went: every process there dies, the network goes."""
        if self._outer is not None:
            self.kill()
            self._outer.wait()
            eventually(lambda: not os.path.exists(f"/proc/{self._init}"), 30)
            self._outer = None

    @property
    def pid(self) -> int:
        """Its process 1, as seen from outside."""
        assert self._outer is not None, f"{self.name} is off"
        return self._init

    # ---- acting on it, not by SSH ----

    def enter(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--", *argv]

    def sh(self, script: str) -> str:
        """Run a shell script there, as a person at its console."""
        env = os.environ | {"HOME": str(self.home)}
        run = subprocess.run(
            self.enter("sh", "-ec", script), capture_output=True, text=True, env=env, timeout=60
        )
        assert run.returncode == 0, f"{self.name}: {script}: {run.stderr}"
        return run.stdout

    def spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        """A bystander there. It dies with the test."""
        return _dies_with_us(self.enter(*argv))

    def stop_sshd(self) -> None:
        self.sh(f"kill $(cat {self.disk}/sshd.pid)")
        eventually(lambda: not (self.disk / "sshd.pid").exists(), 30)

    def start_sshd(self) -> None:
        self.sh(f"{SSHD} -f {self.disk}/sshd_config -E {self.disk}/sshd.log")

    def freeze_sshd(self) -> None:
        """Connections are accepted by the kernel, and then nothing comes."""
        self.sh(f"kill -STOP $(cat {self.disk}/sshd.pid)")

    def thaw_sshd(self) -> None:
        self.sh(f"kill -CONT $(cat {self.disk}/sshd.pid)")

    def go_silent(self) -> None:
        """Every packet to it is lost from now on, of open connections too."""
        self.sh(f"ip route add blackhole {LAN}.0.0/17; ip route add blackhole {LAN}.128.0/17")

    def be_heard(self) -> None:
        self.sh(f"ip route del blackhole {LAN}.0.0/17; ip route del blackhole {LAN}.128.0/17")

    # ---- what is on it ----

    def processes(self) -> dict[int, str]:
        """pid (as seen from outside) -> command line of all but its system: init and sshd."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/pid") != own:
                    continue
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # gone meanwhile
            system = ("sleep 1000", "sshd:", f"sh -c {INIT[:10]}", SSHD)
            if state != "Z" and int(name) != self.pid and not command.startswith(system):
                found[int(name)] = command.strip()
        return found

    def listening(self) -> set[int]:
        """TCP ports other than sshd's."""
        rows = [
            row.split()
            for table in ("tcp", "tcp6")
            for row in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
        ]
        return {int(r[1].rsplit(":", 1)[1], 16) for r in rows if r[3] == "0A"} - {22}

    def seen(self, path: Path | str) -> Path:
        """A path there, as its own mounts show it."""
        return Path("/proc", str(self.pid), "root", str(path).lstrip("/"))

    def logins(self) -> int:
        """Connections that were let in since it was made."""
        return (self.disk / "sshd.log").read_text().count("Accepted publickey")

    def segments(self) -> list[str]:
        return sorted(p.name for p in self.seen("/dev/shm").iterdir())

    def files(self) -> list[str]:
        """Below PDCTL_HOME, but for the shim, and what `down` keeps: last logs, audit."""
        kept = (".shim", ".last", ".audit")
        base = self.seen(self.base)
        found = (p.relative_to(base) for p in base.rglob("*"))
        return sorted(str(p) for p in found if p.parts[0] not in kept and p.name != ".locks")

    def leftovers(self) -> dict[str, Any]:
        """What a deployment may have left. All empty: nothing. Give it a moment by `eventually`."""
        return {
            "processes": self.processes(),
            "ports": self.listening(),
            "segments": self.segments(),
            "files": self.files(),
        }

    def clean(self) -> bool:
        return not any(self.leftovers().values())


class Cluster:
    """A laptop and the machines that `add` makes. `pdctl` runs the command line on the laptop."""

    def __init__(
        self, root: Path, interpreter: Sequence[str | Path] = (sys.executable, STUB)
    ) -> None:
        """`interpreter`: what stands in for a python with the runtime; services are run by it."""
        self.root = root
        self.machines: dict[str, Machine] = {}
        self.laptop = root / "laptop"
        self.laptop.mkdir(mode=0o700)
        self._wires = 0
        key = str(self.laptop / "key")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        (self.laptop / "config").write_text(f"Include {self.laptop}/hosts.conf\n")
        self._python = root / "python"
        self._python.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, interpreter))} "$@"\n')
        self._python.chmod(0o700)
        self._holder = _dies_with_us(["unshare", "--net", "sleep", "infinity"])
        here = os.readlink("/proc/self/ns/net")
        eventually(lambda: os.readlink(f"/proc/{self._holder.pid}/ns/net") != here, 30)
        _ip(
            self._holder.pid,
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {LAN}.0.1/16 dev br0",
            "addr add fd77::1/64 dev br0 nodad",
            "link set br0 up",
        )

    # ---- machines ----

    def add(
        self,
        *names: str,
        behind: str | None = None,
        sshd: Mapping[str, str] | None = None,
        shm_mib: int = 64,
    ) -> list[Machine]:
        """Make machines, all at once. `behind`: only that machine reaches them, not the laptop."""
        key = (self.laptop / "key.pub").read_text()
        made = []
        for name in names:
            number = len(self.machines) + 2
            net = "10.78" if behind else LAN
            address = f"{net}.{number >> 8}.{number & 255}"
            machine = Machine(name, address, self.root / "hosts" / name, sshd or {}, shm_mib)
            machine.prepare(key)
            machine.boot()
            self.machines[name] = machine
            made.append(machine)
        if behind:
            self._attach_behind(self.machines[behind], made)
        else:
            self.attach(*made)
        for machine in made:
            machine.await_up()
        self.write_ssh_config()
        self.know(*made)
        return made

    def attach(self, *machines: Machine) -> None:
        """Plug machines into the laptop's network, after `boot`."""
        commands = []
        for machine in machines:
            self._wires += 1
            wire = f"w{self._wires}"
            commands += [
                f"link add {wire} type veth peer name eth0 address {machine.mac} "
                f"netns {machine.pid}",
                f"link set {wire} master br0 up",
            ]
        _ip(self._holder.pid, *commands)
        for machine in machines:
            _ip(
                machine.pid,
                f"addr add {machine.address}/16 dev eth0",
                f"addr add {machine.address6}/64 dev eth0 nodad",
                "link set eth0 up",
            )

    def _attach_behind(self, gate: Machine, machines: Sequence[Machine]) -> None:
        for machine in machines:
            self._wires += 1
            wire = f"w{self._wires}"
            _ip(
                gate.pid,
                f"link add {wire} type veth peer name eth0 netns {machine.pid}",
                f"addr add 10.78.0.1/32 dev {wire}",
                f"link set {wire} up",
                f"route add {machine.address} dev {wire} src 10.78.0.1",
            )
            _ip(
                machine.pid,
                f"addr add {machine.address}/32 dev eth0",
                "link set eth0 up",
                "route add 10.78.0.1 dev eth0",
            )

    def boot(self, machine: Machine) -> None:
        """Switch it on again after `halt`: same disk, new boot id."""
        machine.boot()
        self.attach(machine)
        machine.await_up()

    def reboot(self, machine: Machine) -> None:
        machine.halt()
        self.boot(machine)

    def write_ssh_config(self, **more: str) -> None:
        """Name every machine; `more`: lines for one of them, by its name with `_` for `-`."""
        text = ""
        for m in self.machines.values():
            extra = more.get(m.name.replace("-", "_"), "")
            text += f"Host {m.name}\n{extra}\n  HostName {m.address}\n"
        text += (
            f"Host *\n  User root\n  IdentityFile {self.laptop}/key\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n"
        )
        (self.laptop / "hosts.conf").write_text(text)

    @property
    def known_hosts(self) -> Path:
        return self.laptop / "known_hosts"

    def know(self, *machines: Machine) -> None:
        with open(self.known_hosts, "a") as f:
            for m in machines:
                kind, key = (m.disk / "host_key.pub").read_text().split()[:2]
                f.write(f"{m.address},{m.address6} {kind} {key}\n")

    # ---- the laptop ----

    @property
    def env(self) -> dict[str, str]:
        """Of a user of the laptop. `PDCTL_SSH_CONFIG` leads to the machines."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PDCTL_", "SSH_"))}
        return ours | {
            "HOME": str(self.laptop),
            "PDCTL_HOME": str(self.laptop / "pdctl"),
            "XDG_STATE_HOME": str(self.laptop / "state"),
            "PDCTL_SSH_CONFIG": str(self.laptop / "config"),
            "NO_COLOR": "1",
        }

    def on_laptop(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self._holder.pid), "-n", "--", *argv]

    def pdctl_argv(self, *args: str) -> list[str]:
        return self.on_laptop(sys.executable, "-m", "pdctl", *args)

    def pdctl(self, *args: str, timeout: float = 90, **env: str) -> Completed:
        """Run pdctl as a user of the laptop would."""
        begun = time.monotonic()
        run = subprocess.run(
            self.pdctl_argv(*args),
            capture_output=True,
            text=True,
            env=self.env | env,
            timeout=timeout,
            cwd=self.laptop,
        )
        return Completed(run.returncode, run.stdout, run.stderr, time.monotonic() - begun)

    def start_pdctl(self, *args: str, **env: str) -> subprocess.Popen[str]:
        """Run pdctl and do not wait. Its pid is the process's own: nothing is in between."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.pdctl_argv(*args),
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=self.env | env,
            cwd=self.laptop,
        )

    def topology(self, name: str = "demo", **sections: Any) -> Path:
        """Write a topology of stub services. Default: a router, a prefill and a decode instance on
        the first three machines; the last machine takes what has none of its own."""
        keys = list(self.machines)
        router, prefill, decode = (keys[min(i, len(keys) - 1)] for i in range(3))
        model = self.root / "model.gguf"
        model.write_bytes(b"GGUF\x03" + bytes(59))
        document: dict[str, Any] = {
            "name": name,
            "model": str(model),
            "startup_timeout": 60,
            "drain_timeout": 2,
            "hosts": {key: self.host_section(key) for key in keys},
            "router": {"host": router, "port": 8000},
            "prefill": [{"host": prefill, "kv_cache": "1MiB"}],
            "decode": [{"host": decode, "kv_cache": "1MiB", "cpu_buffer": "1MiB"}],
        } | sections
        path = self.laptop / f"{name}.yaml"
        path.write_text(json.dumps(document, indent=1))
        return path

    def host_section(self, key: str) -> dict[str, str]:
        """Reached by its name, as people write it; its services by its address."""
        advertise = self.machines[key].address
        return {"address": key, "advertise": advertise, "python": str(self._python)}

    # ---- the end ----

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        for machine in self.machines.values():
            machine.halt()
        if self._holder.poll() is None:
            self._holder.send_signal(signal.SIGKILL)
        self._holder.wait()

"""SSH as people have it: jumps, ports, agents, host keys, busy and silent servers; real sshds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, Completed
from supervision import eventually

pytestmark = pytest.mark.ssh

# Commands over one SshHost, on the laptop: what pdctl does first with any host.
SCRIPT = """
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pdctl.errors import PdctlError
from pdctl.remote import Routes, SshHost
routes = Routes()
def one(name):
    host = SshHost(name, name, routes=routes)
    try:
        return host.feed(["hostname"], io.BytesIO(), print).out.strip()
    except PdctlError as e:
        return f"{type(e).__name__}: {e} | {e.hint}"
    finally:
        host.close()
with ThreadPoolExecutor(64) as pool:
    for line in pool.map(one, sys.argv[1:]):
        print(line)
routes.close()
"""


def ask(cluster: Cluster, *names: str, **env: str) -> Completed:
    """What each host answers, one a line, all asked at once."""
    argv = cluster.on_laptop(sys.executable, "-c", SCRIPT, *names)
    run = subprocess.run(
        argv, env=cluster.env | env, capture_output=True, text=True, timeout=60, cwd=Path.cwd()
    )
    assert run.returncode == 0, run.stderr
    return Completed(run.returncode, run.stdout, run.stderr, 0.0)


def test_two_jumps_to_a_host_only_they_reach(cluster: Cluster) -> None:
    cluster.add("gate")
    cluster.add("inner", "deep", behind="gate")
    jump = "  ProxyJump root@gate:22"
    cluster.write_ssh_config(inner=jump, deep=jump)
    assert ask(cluster, "inner", "deep", "gate").out.split() == ["inner", "deep", "gate"]
    assert cluster.machines["gate"].logins() == 2, (
        "one connection for all behind it, one for itself"
    )
    # By way of inner too, which forwards to itself: several hops.
    cluster.write_ssh_config(inner=jump, deep="  ProxyJump gate,inner\n  HostName 10.78.0.4")
    cluster.machines["gate"].sh("echo 1 > /proc/sys/net/ipv4/ip_forward")
    cluster.machines["inner"].sh("ip route add default via 10.78.0.1")
    cluster.machines["deep"].sh("ip route add default via 10.78.0.1")
    assert ask(cluster, "deep").out.split() == ["deep"]
    cluster.machines["inner"].stop_sshd()
    failed = ask(cluster, "deep").out
    assert "jump host inner: connect: the jump host" in failed and "HostUnreachable" in failed


@pytest.mark.parametrize("shell", ["tcsh", "fish"])
def test_any_login_shell(cluster: Cluster, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    (machine,) = cluster.add("gpu-a")
    others = Path("/etc/passwd").read_text().partition("\n")[2]
    accounts = machine.disk / "passwd"
    accounts.write_text(f"root:x:0:0::{machine.home}:{path}\n{others}")
    machine.sh(f"mount --bind {accounts} /etc/passwd")
    for name in (".tcshrc", ".config/fish/config.fish"):
        (machine.home / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.home / name).write_text("echo 'Welcome! to $this {host}'\n")
    topology = str(cluster.topology())
    up = cluster.pdctl("up", topology)  # brings the shim
    assert up.rc == 0, up.err
    run = ("exec", "--host", "gpu-a", "--", "printf", "%s|")
    assert cluster.pdctl(*run, "a'b", "$HOME!", "*").out == "a'b|$HOME!|*|"
    assert cluster.pdctl("up", topology).rc == 0, "the shim is there already"
    assert cluster.pdctl("down", "demo").rc == 0
    assert machine.clean(), machine.leftovers()


def test_a_quiet_connection_shows_that_it_lives_and_costs_little(cluster: Cluster) -> None:
    (machine,) = cluster.add("gpu-a", sshd={"LogLevel": "DEBUG1"})
    cluster.write_ssh_config(gpu_a="  ServerAliveInterval 1")
    assert cluster.pdctl("up", str(cluster.topology())).rc == 0
    follow = cluster.start_pdctl("logs", "-f", "router")
    log = machine.disk / "sshd.log"
    before = log.read_text().count("keepalive@")
    eventually(lambda: log.read_text().count("keepalive@") >= before + 2, 30)
    # A MAC beside the cipher would be computed and compared in python, byte by byte.
    assert "-gcm@openssh.com MAC: <implicit>" in log.read_text()
    follow.send_signal(signal.SIGINT)
    follow.communicate(timeout=30)
    assert cluster.pdctl("down", "demo").rc == 0


def test_a_proxy_command_a_port_a_user_and_ipv6(cluster: Cluster) -> None:
    a, b = cluster.add("gpu-a", "gpu-b", sshd={"Port": "2222"})
    cluster.write_ssh_config(
        gpu_a=f"  Port 2222\n  HostName {a.address6}\n  StrictHostKeyChecking yes",
        gpu_b=f"  Port 2222\n  ProxyCommand {_netcat(cluster)} %h %p",
    )
    assert ask(cluster, "gpu-a", "gpu-b").out == "gpu-a\ngpu-b\n"
    assert "[" not in cluster.known_hosts.read_text(), "a key known for port 22 is good for others"
    assert b.address in cluster.known_hosts.read_text()


def _netcat(cluster: Cluster) -> Path:
    path = cluster.laptop / "netcat"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    path.chmod(0o700)
    return path


def test_keys_of_the_agent_and_locked_ones(cluster: Cluster) -> None:
    cluster.add("gpu-a")
    key = cluster.laptop / "key"
    protect = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(key)]
    subprocess.run(protect, check=True)
    locked = ask(cluster, "gpu-a").out
    assert "authenticate: there is no key to show" in locked
    assert f"{key} has a passphrase" in locked and f"ssh-add {key}" in locked
    unlock = ["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f"]
    plain = cluster.laptop / "plain"
    plain.write_bytes(key.read_bytes())
    plain.chmod(0o600)
    subprocess.run([*unlock, str(plain)], check=True)
    socket = str(cluster.laptop / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: os.path.exists(socket))
        env = os.environ | {"SSH_AUTH_SOCK": socket}
        subprocess.run(["ssh-add", "-q", str(plain)], env=env, check=True)
        assert ask(cluster, "gpu-a", SSH_AUTH_SOCK=socket).out.strip() == "gpu-a"
        cluster.write_ssh_config(gpu_a=f"  IdentityAgent {socket}\n  IdentitiesOnly yes")
        assert ask(cluster, "gpu-a").out.strip() == "gpu-a"
        cluster.write_ssh_config(gpu_a="  IdentityAgent none")
        assert "no key to show" in ask(cluster, "gpu-a", SSH_AUTH_SOCK=socket).out
    finally:
        agent.terminate()
        agent.wait()


def test_host_keys_unknown_changed_revoked_and_new(cluster: Cluster) -> None:
    (a,) = cluster.add("gpu-a")
    known = cluster.known_hosts
    right = known.read_text()
    known.write_text("")
    out = ask(cluster, "gpu-a").out
    assert f"host key: {a.address} is not known; it shows ssh-ed25519 SHA256:" in out
    assert known.read_text() == ""
    other = (cluster.laptop / "key.pub").read_text().split()[1]
    known.write_text(f"{a.address} ssh-ed25519 {other}\n")
    cluster.write_ssh_config(gpu_a="  StrictHostKeyChecking no")
    out = ask(cluster, "gpu-a").out
    assert "not the known one" in out and f"ssh-keygen -R {a.address}" in out
    known.write_text(f"{right}@revoked {right.split(',')[0]} {' '.join(right.split()[1:])}\n")
    assert "is revoked" in ask(cluster, "gpu-a").out
    known.write_text("# mine\n")
    cluster.write_ssh_config(gpu_a="  StrictHostKeyChecking accept-new\n  HostKeyAlias alpha")
    accepted = ask(cluster, "gpu-a")
    assert accepted.out.strip() == "gpu-a"
    assert "alpha: its host key was not known and is added to" in accepted.err
    assert known.read_text().startswith("# mine\nalpha ssh-ed25519 ")
    assert ask(cluster, "gpu-a").err == ""


def test_a_key_it_does_not_take(cluster: Cluster) -> None:
    (a,) = cluster.add("gpu-a")
    (a.disk / "authorized_keys").write_text("")
    out = ask(cluster, "gpu-a").out
    assert f"authenticate: root@{a.address} refuses {cluster.laptop}/key" in out
    assert "authorized_keys? try `ssh gpu-a`" in out


def test_one_session_at_a_time_is_enough(cluster: Cluster) -> None:
    cluster.add("gpu-a", sshd={"MaxSessions": "1", "Ciphers": "aes256-ctr"})
    path = str(cluster.topology())
    for args in (("up", path), ("status",), ("down", "demo")):
        done = cluster.pdctl(*args)
        assert done.rc == 0, done.err


def test_a_server_that_drops_all_but_a_few_logins(cluster: Cluster) -> None:
    """48 hosts of the configuration are one sshd, with OpenSSH's own limit on logins at once."""
    (a,) = cluster.add("gpu-a", sshd={"MaxStartups": "4:100:4", "LogLevel": "VERBOSE"})
    names = [f"alias-{i}" for i in range(48)]
    hosts = (cluster.laptop / "hosts.conf").read_text()
    (cluster.laptop / "hosts.conf").write_text(f"Host alias-*\n  HostName {a.address}\n{hosts}")
    assert ask(cluster, *names).out.split() == ["gpu-a"] * 48


def test_noise_of_the_logins_shell_is_ignored(cluster: Cluster) -> None:
    (a,) = cluster.add("gpu-a")
    (a.home / ".bashrc").write_text("echo welcome to gpu-a\necho '{\"tip\": 1}'\n")
    path = str(cluster.topology())
    for args in (("up", path), ("status", "--json"), ("logs", "-n", "1"), ("down", "demo")):
        done = cluster.pdctl(*args)
        assert done.rc == 0, done.err
        assert "welcome" not in done.out
        if "--json" in args:
            assert json.loads(done.out)["healthy"]

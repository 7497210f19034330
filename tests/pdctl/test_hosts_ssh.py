"""The SSH host against a real sshd on a private port: commands, files, host keys, a deployment."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_port
from supervision import Home, Site, check_program, eventually, gone, ran

from pdctl import ops
from pdctl.errors import HostCommandError, HostUnreachable
from pdctl.remote import SshHost
from pdctl.remote.config import parse_settings, resolve

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = pytest.mark.ssh


@dataclass
class Server:
    root: Path
    port: int
    pid: int

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    def host_key(self) -> str:
        kind, key = (self.root / "host_key.pub").read_text().split()[:2]
        return f"[127.0.0.1]:{self.port} {kind} {key}\n"


@pytest.fixture
def server(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """As the user would have it: `ssh lab` works by an Included file of the configuration."""
    if not os.path.exists(SSHD) or shutil.which("ssh") is None:
        pytest.skip("needs openssh-server and openssh-client")
    root = home.root / "ssh"
    root.mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)]
        subprocess.run(keygen, check=True)
    shutil.copy(root / "user_key.pub", root / "authorized_keys")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # its privilege separation wants it
    port = free_port()
    (root / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {root}/host_key\n"
        f"AuthorizedKeysFile {root}/authorized_keys\nStrictModes no\nUsePAM no\n"
        f"PidFile {root}/pid\nSubsystem sftp internal-sftp\nPermitRootLogin yes\n"
        f"SetEnv PDCTL_HOME={home.base}\n"
    )
    (root / "lab.conf").write_text(
        f"Host lab\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {root}/user_key\n  UserKnownHostsFile {root}/known_hosts\n"
    )
    (root / "config").write_text(f"Include {root}/lab.conf\n")
    monkeypatch.setenv("PDCTL_SSH_CONFIG", str(root / "config"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    subprocess.run([SSHD, "-f", str(root / "sshd_config"), "-E", str(root / "log")], check=True)
    pid = int(eventually(lambda: (root / "pid").exists() and (root / "pid").read_text()))
    server = Server(root, port, pid)
    server.known_hosts.write_text(server.host_key())
    yield server
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: gone(pid))


@pytest.fixture
def ssh(server: Server) -> Iterator[SshHost]:
    host = SshHost("gpu-a", "lab", python=sys.executable)
    yield host
    host.close()


def test_commands_meet_no_shell_and_give_everything_back(ssh: SshHost) -> None:
    code = (
        "import sys; print(sys.argv[1:]); print(sys.stdin.read()); sys.exit('bad ' + 'x' * 70000)"
    )
    nasty = ["$HOME; echo x", "a b", "'", '"', "\n", "*"]
    result = ran(ssh, [sys.executable, "-c", code, *nasty], "in" * 40000)
    assert result.out == f"{nasty}\n{'in' * 40000}\n"
    assert (result.rc, result.err) == (1, f"bad {'x' * 70000}\n")


def test_a_program_is_put_there_once_private_and_whole(ssh: SshHost, home: Home) -> None:
    check_program(ssh, home.base)


def test_a_program_that_ends_before_it_has_read_all(ssh: SshHost, tmp_path: Path) -> None:
    early = ["sh", "-c", "echo full >&2; exit 3"]
    result = ran(ssh, early, "x" * (8 << 20))
    assert (result.rc, result.err) == (3, "full\n")
    large = tmp_path / "large"
    large.write_bytes(bytes(8 << 20))
    heard: list[int] = []
    with large.open("rb") as f:
        result = ssh.feed(early, f, heard.append)
        assert (result.rc, result.err) == (3, "full\n")
        f.seek(1)
        result = ssh.feed(["wc", "-c"], f, heard.append)
    assert result.rc == 0 and int(result.out) == (8 << 20) - 1
    assert ran(ssh, ["true"]).rc == 0


def test_a_channel_ends_with_its_program_and_the_other_way_round(ssh: SshHost) -> None:
    code = (
        "import os, sys\n"
        "print(os.getpid(), flush=True)\n"
        "for line in sys.stdin: print(line.strip().upper(), flush=True)\n"
    )
    channel = ssh.channel([sys.executable, "-c", code])
    pid = int(channel.receive(20) or 0)
    channel.send("one")
    assert channel.receive(20) == "ONE"
    with pytest.raises(HostCommandError, match="no answer within"):
        channel.receive(0.2)
    channel.close()
    eventually(lambda: gone(pid))
    ended = ssh.channel(["sh", "-c", "echo it broke >&2"])
    assert ended.receive(20) is None
    assert ended.error_text() == "it broke"


def test_an_unknown_host_key_is_refused_and_nothing_is_written(
    server: Server, ssh: SshHost
) -> None:
    server.known_hosts.write_text("")
    with pytest.raises(HostUnreachable, match=r"host key: .* is not known") as caught:
        ran(ssh, ["true"])
    assert caught.value.exit_code == 5 and "ssh lab" in caught.value.hint
    assert server.known_hosts.read_text() == ""


def test_a_changed_host_key_is_refused(server: Server, ssh: SshHost) -> None:
    other = (server.root / "user_key.pub").read_text().split()[1]
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} ssh-ed25519 {other}\n")
    with pytest.raises(HostUnreachable, match="not the known one"):
        ran(ssh, ["true"])


def test_accept_new_appends_and_keeps_the_rest(server: Server, ssh: SshHost) -> None:
    config = server.root / "lab.conf"
    config.write_text(config.read_text() + "  StrictHostKeyChecking accept-new\n")
    server.known_hosts.write_text("# a comment\n")
    assert ran(ssh, ["true"]).rc == 0
    assert server.known_hosts.read_text() == "# a comment\n" + server.host_key()


def test_who_may_not_log_in_and_who_is_not_there(server: Server, ssh: SshHost) -> None:
    (server.root / "authorized_keys").write_text("")
    with pytest.raises(HostUnreachable, match=r"authenticate: .* refuses"):
        ran(ssh, ["true"])
    config = server.root / "lab.conf"
    config.write_text(config.read_text().replace(f"Port {server.port}", f"Port {free_port()}"))
    with pytest.raises(HostUnreachable, match="gpu-a") as caught:
        ran(ssh, ["true"])
    assert caught.value.host == "gpu-a"


def test_a_deployment_by_ssh_and_down_after_the_file_is_gone(
    home: Home, site: Site, server: Server
) -> None:
    path = site.topology(
        hosts={"gpu-a": {"address": "lab", "advertise": "127.0.0.1", "python": str(site.python)}},
        router={"host": "gpu-a", "port": free_port()},
        prefill=[{"host": "gpu-a", "kv_cache": "1MiB"}],
        decode=[{"host": "gpu-a", "kv_cache": "1MiB", "cpu_buffer": "1MiB"}],
    )
    result = ops.up(path, ops.UpOptions(), ops.silent)
    assert result.ready and len(result.started) == 3
    assert len(ops.up(path, ops.UpOptions(), ops.silent).kept) == 3
    status = ops.status("demo")
    assert status.healthy and {s.host for s in status.services} == {"gpu-a"}
    lines = [x.line for x in ops.logs("demo", ops.LogQuery(("decode-0",), 5), follow=False)]
    assert lines == ["stub decode-0 starts"]
    path.unlink()
    assert ops.down("demo", 5.0, ops.silent).ok
    assert home.processes() == [] and home.segments() == []


RELAY = """
import contextlib, os, socket, sys, threading, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
def copy(source, target):
    with contextlib.suppress(OSError):
        while piece := os.read(source, 65536):
            os.write(target, piece)
if len(sys.argv) > 2:
    far = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    threading.Thread(target=copy, args=(far.fileno(), 1), daemon=True).start()
    copy(0, far.fileno())
time.sleep(600)
"""


@pytest.mark.parametrize("greets", [True, False])
def test_a_proxy_command_that_heeds_no_end_of_file_ends_with_us(
    server: Server, tmp_path: Path, greets: bool
) -> None:
    relay, pid = tmp_path / "relay.py", tmp_path / "pid"
    relay.write_text(RELAY)
    config = Path(os.environ["PDCTL_SSH_CONFIG"])
    port = server.port if greets else ""
    proxy = f"  ProxyCommand {sys.executable} {relay} {pid} {port}\n"
    config.write_text(f"{config.read_text()}{proxy}  ConnectTimeout {60 if greets else 2}\n")
    with contextlib.closing(SshHost("gpu-a", "lab", python=sys.executable)) as host:
        if greets:
            assert ran(host, ["true"]).rc == 0
        else:
            with pytest.raises(HostUnreachable, match="no SSH server greets"):
                ran(host, ["true"])
    assert eventually(lambda: gone(int(pid.read_text())))


def test_settings_as_ssh_prints_them() -> None:
    found = parse_settings(
        "lab",
        "user ada\nhostname 10.0.0.1\nport 2222\nidentityfile ~/.ssh/a\nidentityfile /k/b\n"
        "proxyjump gate,ada@inner:2200\nproxycommand none\nstricthostkeychecking true\n"
        "userknownhostsfile /k/one /k/two\nglobalknownhostsfile none\n",
    )
    assert (found.hostname, found.port, found.user) == ("10.0.0.1", 2222, "ada")
    assert found.identity_files == (str(Path("~/.ssh/a").expanduser()), "/k/b")
    assert found.jumps == ("gate", "ada@inner:2200") and found.proxy_command == ""
    assert found.known_hosts == ("/k/one", "/k/two") and found.strict == "yes"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh here")
@pytest.mark.parametrize(
    ("text", "user", "hostname", "port"),
    [
        ("2001:db8::1", "", "2001:db8::1", 22),
        ("::1", "", "::1", 22),
        ("ada@2001:db8::1", "ada", "2001:db8::1", 22),
        ("fe80::1%eth0", "", "fe80::1%eth0", 22),
        ("[2001:db8::1]", "", "2001:db8::1", 22),
        ("ada@[2001:db8::1]:2222", "ada", "2001:db8::1", 2222),
        ("[fe80::1%eth0]:2222", "", "fe80::1%eth0", 2222),
        ("[192.0.2.1]", "", "192.0.2.1", 22),  # as `ssh -G` writes a jump host
        ("192.0.2.1:2222", "", "192.0.2.1", 2222),
        ("ada@gpu-a:2222", "ada", "gpu-a", 2222),
        ("gpu-a", "", "gpu-a", 22),
    ],
)
def test_addresses_in_every_form(
    text: str, user: str, hostname: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDCTL_SSH_CONFIG", "/dev/null")
    found = resolve(text)
    assert (found.hostname, found.port) == (hostname, port)
    assert found.user == (user or getpass.getuser())


@pytest.mark.parametrize(
    "text", ["127.0.0.1:99999999", "host:0", "host:abc", "[::1]:abc", ":22", "a b", "-x"]
)
def test_what_is_no_destination_is_one_line(server: Server, text: str) -> None:
    with pytest.raises(HostUnreachable) as caught:
        ran(SshHost(text, text), ["true"])
    assert str(caught.value) == f"{text}: resolve: {text!r} is nothing that ssh could connect to"
    assert "USER@HOST:PORT" in caught.value.hint

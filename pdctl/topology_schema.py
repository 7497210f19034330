"""The topology's frozen models: every key a YAML file may hold, its type, range and default.

What single values can tell is checked here; what takes two of them, in `topology_checks`.
`topologies/reference.yaml` documents every key; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from pdctl.sizes import parse_size

InstanceRole = Literal["prefill", "decode", "mixed"]
ROLES: tuple[InstanceRole, ...] = ("prefill", "decode", "mixed")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RDMA_DEVICE = re.compile(r"[A-Za-z0-9_.-]+")
_ADDRESS = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a name; use up to 40 of a-z, 0-9 and -, "
            "with a letter or digit at both ends"
        )
    return value


def _host_key(value: str) -> str:
    if not _HOST_KEY.fullmatch(value):
        raise ValueError(f"{value!r} is not a host name; use letters, digits, `.`, `_` and `-`")
    return value


def _variable(value: str) -> str:
    """The name of an environment variable. A wrong one is not repeated: it may be the secret."""
    if not _VARIABLE.fullmatch(value):
        raise ValueError(
            "is not the name of an environment variable; "
            "write the name (MY_KEYS), and put the value into that variable"
        )
    return value


def _variable_key(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{value!r} is not a variable name; use letters, digits and _")
    return value


def _address(value: str) -> str:
    if is_ip(value) or _ADDRESS.fullmatch(value):
        return value
    raise ValueError(
        f"{value!r} is not an address; write an IP address or a host name, without a port"
    )


def _text(value: Any) -> Any:
    """Environment values: a number is taken as its text; true and 1.0 have several spellings."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError('must be text; put it in quotes, like "true"')
    return value


def _devices(value: Any) -> tuple[int, ...]:
    if value == "cpu":
        return ()
    ids = value if isinstance(value, tuple) else (value,)
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError("must be cpu or GPU numbers; write `cpu`, `0` or `[0, 1]`")
    return ids


def _rdma_devices(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(n, str) and _RDMA_DEVICE.fullmatch(n) for n in names):
        raise ValueError("must be names of RDMA devices; write `mlx5_0` or `[mlx5_0, mlx5_1]`")
    return names


def _none_is_empty(value: Any) -> Any:
    return {} if value is None else value


Name = Annotated[str, BeforeValidator(lambda v: _name(v) if isinstance(v, str) else v)]
Variable = Annotated[str, BeforeValidator(lambda v: _variable(v) if isinstance(v, str) else v)]
VariableKey = Annotated[
    str, BeforeValidator(lambda v: _variable_key(v) if isinstance(v, str) else v)
]
AddressText = Annotated[str, BeforeValidator(lambda v: _address(v) if isinstance(v, str) else v)]
HostKey = Annotated[str, BeforeValidator(lambda v: _host_key(v) if isinstance(v, str) else v)]
Size = Annotated[int, BeforeValidator(parse_size)]
Devices = Annotated[
    tuple[int, ...],
    BeforeValidator(_devices),
    PlainSerializer(lambda ids: list(ids) or "cpu"),
]
RdmaDevices = Annotated[
    tuple[str, ...],
    BeforeValidator(_rdma_devices),
    PlainSerializer(lambda names: names[0] if len(names) == 1 else list(names)),
]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Environment = dict[VariableKey, Annotated[str, BeforeValidator(_text)]]


class Section(BaseModel):
    """Strict: `"8000"` is not a port and 1 is not true. Unknown keys are mistakes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Host(Section):
    """A machine. Without an address, or with `local`, it is this one and needs no SSH."""

    address: AddressText | None = None
    """How pdctl reaches it by SSH."""
    advertise: AddressText | None = None
    """How other hosts reach its services; the address when left out."""
    bind: AddressText | None = None
    """What its services listen on; the advertised address when left out."""
    python: str | None = None
    """Interpreter with pdctl[runtime]. Left out: what `pdctl sync` put there; here, our own."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return _none_is_empty(value)

    @property
    def local(self) -> bool:
        return self.address in (None, "local")

    @property
    def reachable_at(self) -> str | None:
        """Address under which other hosts reach this one; None when the file names none."""
        if self.advertise is not None:
            return self.advertise
        return None if self.local else self.address


class Router(Section):
    """The OpenAI endpoint in front of all instances."""

    host: str | None = None
    port: Port = 8000
    bind: AddressText | None = None
    policy: Literal["least_loaded", "round_robin"] = "least_loaded"
    api_keys: Variable | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 1

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return _none_is_empty(value)


class Group(Section):
    """Instances of one role that are alike."""

    host: str | None = None
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    tp_size: Count = 1
    devices: Devices = ()
    threads: Count | None = None
    kv_cache: Size = 512 << 20
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    max_num_batched_tokens: Count = 512
    max_num_seqs: Count = 64
    prefix_cache: bool = True
    port: Port | None = None
    env: Environment = {}
    secrets: tuple[Variable, ...] = ()


class RdmaDevice(Section):
    """Which RDMA device, port and address to use; what is left out is chosen on the host."""

    device: RdmaDevices = ()
    port: Annotated[int, Field(ge=1, le=255)] | None = None
    gid_index: Annotated[int, Field(ge=0, le=255)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return _none_is_empty(value)

    def of_replica(self, number: int) -> dict[str, str | int]:
        """What is stated for this replica, as its configuration has it."""
        stated: dict[str, str | int | None] = {"port": self.port, "gid_index": self.gid_index}
        if self.device:
            stated["device"] = self.device[number if len(self.device) > 1 else 0]
        return {key: value for key, value in stated.items() if value is not None}


class PrefillGroup(Group):
    """Computes prompts and sends their KV to decode instances."""

    peer_port: Port | None = None
    rdma: RdmaDevice = RdmaDevice()


class DecodeGroup(Group):
    """Receives KV into its CPU buffer and generates."""

    cpu_buffer: Size = 256 << 20
    transfer: Literal["auto", "cuda_ipc", "shm", "rdma", "tcp"] = "auto"
    rdma: RdmaDevice = RdmaDevice()


class MixedGroup(Group):
    """Does both itself: no transfer."""


class Topology(Section):
    """A whole deployment."""

    name: Name
    model: Annotated[str, Field(min_length=1)]
    model_name: Annotated[str, Field(min_length=1)] | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: Count | None = None
    startup_timeout: Seconds = 300.0
    request_timeout: Seconds = 600.0
    drain_timeout: Seconds = 30.0
    supervisor: Literal["shim", "systemd"] = "shim"
    hosts: Annotated[dict[HostKey, Host], Field(min_length=1)]
    router: Router = Router()
    prefill: tuple[PrefillGroup, ...] = ()
    decode: tuple[DecodeGroup, ...] = ()
    mixed: tuple[MixedGroup, ...] = ()

    def host_of(self, section: Router | Group) -> str:
        """Key of the section's host; the only host when it names none."""
        return section.host if section.host is not None else next(iter(self.hosts))

    def groups(self) -> dict[InstanceRole, tuple[Group, ...]]:
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}

    def instances(self) -> tuple[Instance, ...]:
        """Every instance, numbered per role across groups: prefill-0, prefill-1, decode-0, ..."""
        return tuple(self._instances())

    def _instances(self) -> Iterator[Instance]:
        for role, groups in self.groups().items():
            number = 0
            for index, group in enumerate(groups):
                for replica in range(group.replicas):
                    name = f"{role}-{number}"
                    yield Instance(name, role, self.host_of(group), group, index, replica)
                    number += 1

    def used_hosts(self) -> tuple[str, ...]:
        """Keys of the hosts that run something, in the order of the file."""
        groups = (group for some in self.groups().values() for group in some)
        used = {self.host_of(self.router), *(self.host_of(g) for g in groups if g.replicas)}
        return tuple(key for key in self.hosts if key in used)


@dataclass(frozen=True, slots=True)
class Instance:
    """One replica of a group."""

    name: str
    role: InstanceRole
    host: str
    group: Group
    group_index: int
    replica: int

    def wanted_ports(self) -> dict[str, int | None]:
        """Purpose -> port the file asks for, counted up from the group's first; None: any."""
        ports = {"http": self._counted(self.group.port)}
        if isinstance(self.group, PrefillGroup):
            ports["peer"] = self._counted(self.group.peer_port)
        return ports

    def _counted(self, first: int | None) -> int | None:
        return None if first is None else first + self.replica


def is_ip(address: str) -> bool:
    try:
        ip_address(address)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return address == "localhost" or (is_ip(address) and ip_address(address).is_loopback)


def is_wildcard(address: str) -> bool:
    return is_ip(address) and ip_address(address).is_unspecified

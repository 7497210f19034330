"""Frozen configuration of the router and of a worker, read from one JSON file each.

pdctl writes these files (pdctl/command.py); this module is the only reader. Unknown fields are
errors,
so that a pdctl and a runtime of different versions notice each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from runtime.errors import ConfigError

Role = Literal["prefill", "decode", "mixed"]
TransferKind = Literal["auto", "cuda_ipc", "shm", "rdma", "tcp"]
PolicyName = Literal["least_loaded", "round_robin"]


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host (name, IPv4 or bare IPv6) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self}"


class PeerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill instance as its decode instances know it: its name and its peer address."""

    name: str
    address: Address


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`path` is a .gguf file or a Hugging Face folder on this host; `name` is what clients call it.

    `dtype` is of weights, activations and KV cache; auto is float32 on a CPU, bfloat16 on a GPU.
    """

    path: str
    name: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None


class RdmaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which RDMA port and address to use; None: chosen (runtime/transfer/rdma_ports.py)."""

    device: str | None = None
    port: int | None = None
    gid_index: int | None = None


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One instance. Sizes are bytes, times are seconds."""

    deployment: str
    name: str
    role: Role
    token_file: str
    """0600 file with the deployment's token; every control channel proves knowledge of it."""
    api_key_file: str | None = None
    """0600 file with one client key a line; None: the OpenAI endpoints ask for no key."""
    listen: Address
    """HTTP: OpenAI API, /health, /ready, /metrics, /ledger."""
    peer: Address | None = None
    """Prefill only: where decode instances connect for control messages and, over tcp, KV data."""
    advertise: str
    """The address under which other hosts reach this one (registration, peers)."""
    model: ModelConfig
    block_size: int = 16
    kv_cache_bytes: int
    """Device pool: K and V of all layers."""
    cpu_buffer_bytes: int = 0
    """Decode only: pinned shared memory that prefill writes into."""
    transfer: TransferKind = "auto"
    rdma: RdmaConfig = RdmaConfig()
    tp_size: int = 1
    device: str = "cpu"
    threads: int | None = None
    max_num_batched_tokens: int = 512
    """Token budget of one engine step: decode tokens first, then prefill chunks."""
    max_num_seqs: int = 64
    max_queued: int = 512
    """Requests that may wait before new ones get 503."""
    prefix_cache: bool = True
    router: str | None = None
    """Base URL of the router to register with; None: serve without one."""
    prefill_peers: list[PeerConfig] = []
    """Decode only. Only these are ever dialled: a request can name one of them, not an address."""
    shm_prefix: str
    """Shared memory segments are named `<shm_prefix>.<rank>.<incarnation>`; this prefix is ours
    alone."""
    request_timeout_s: float = 600.0
    reserve_timeout_s: float = 60.0
    """How long a request may wait for room in the CPU buffer before it gets 503."""
    drain_timeout_s: float = 30.0


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The router. Instances are not listed here: they register."""

    deployment: str
    name: str = "router"
    token_file: str
    api_key_file: str | None = None
    listen: Address
    policy: PolicyName = "least_loaded"
    request_timeout_s: float = 600.0
    heartbeat_timeout_s: float = 6.0
    drain_timeout_s: float = 30.0
    """How long streams may go on after SIGTERM."""
    max_body_bytes: int = 8 << 20
    retries: int = 1
    """How often a request that failed before its first byte is tried on another pair."""


ConfigT = TypeVar("ConfigT", WorkerConfig, RouterConfig)


def load(path: Path, kind: type[ConfigT]) -> ConfigT:
    """Read a config file. Raises ConfigError naming the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{path}: {e}") from e


def read_token(path: str) -> bytes:
    """The deployment's token. Raises ConfigError when the file is missing, empty, or readable by
    others.
    """
    return _read_private("token_file", path)


def read_api_keys(path: str | None) -> tuple[bytes, ...]:
    """Client keys, one a line; `#` starts a comment line. Without a file no key is asked for."""
    if path is None:
        return ()
    lines = [line.strip() for line in _read_private("api_key_file", path).splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not keys:
        raise ConfigError(f"api_key_file {path}: has no key", hint="write one key a line")
    return keys


def _read_private(field: str, path: str) -> bytes:
    file = Path(path)
    try:
        mode = file.stat().st_mode
        content = file.read_bytes().strip()
    except OSError as e:
        raise ConfigError(f"{field} {path}: {e.strerror}") from e
    if mode & 0o077:
        raise ConfigError(f"{field} {path}: readable by others", hint=f"chmod 600 {path}")
    if not content:
        raise ConfigError(f"{field} {path}: empty")
    return content
